"""`ftkit data` shows images: their place, size and tokens, and small pictures that ftkit draws."""

import base64
import io
import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from PIL import Image
from seeing_models import save_model

from ftkit.data.dataset import load_data
from ftkit.data.inspection.command import inspect_data
from ftkit.data.inspection.display import InspectionText, inspection_page
from ftkit.data.inspection.findings import find_duplicates
from ftkit.data.inspection.inspection import Inspection
from ftkit.data.samples.sample_set import media_numbers
from ftkit.extensions.images.files import reference
from ftkit.extensions.images.looks import look
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component
from ftkit.training.journal import Journal, log_data_summary
from ftkit.utils.console.terminal import plain_text

SIZES = {"a.jpg": (640, 480), "b.png": (40, 120)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("qwen2_5_vl", folder / "qwen")
    return folder / "qwen"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    exif = Image.Exif()
    exif[0x010E] = "secret"  # a description
    for name, size in SIZES.items():
        Image.new("RGB", size, "red").save(tmp_path / name, exif=exif, comment="secret")
    turns = [
        {"role": "user", "content": "<image>what<image>"},
        {"role": "assistant", "content": "it is red"},
    ]
    row = {"messages": turns, "images": list(SIZES)}
    plain = {"messages": [turns[0] | {"content": "what"}, turns[1]]}
    lines = [json.dumps(one) for one in (row, plain)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines * 2))
    return tmp_path / "chats.jsonl"


@pytest.fixture
def seen(file: Path, model: Path) -> Inspection:
    data = {"data": "JSON", "data.path": str(file), "data.val_split_fraction": "0"}
    overrides = [("checkpoint_dir", str(model)), *data.items()]
    return inspect_data([], overrides, show=4, progress=lambda *_: None)


def test_numbers_of_images(seen: Inspection, file: Path, model: Path) -> None:
    (numbers,) = seen.sources[0].train.media
    args = {"path": str(file), "val_split_fraction": 0}
    data = load_data(Component(class_path="JSON", init_args=args), Tokenizer(model), 512)
    (again,) = media_numbers([part.splits["train"].samples for part in data.parts])
    assert numbers == again
    each = sorted(one.end - one.first for i in range(4) for one in data.train[i].media)
    assert numbers.count == len(each) == 4
    assert (numbers.least_tokens, numbers.most_tokens) == (each[0], each[-1])
    assert numbers.median_tokens == each[2]
    assert numbers.share == pytest.approx(sum(each) / (data.train.lengths.sum() + 4))


def test_the_terminal_shows_each_image_at_its_place(seen: Inspection) -> None:
    text = plain_text(InspectionText(seen), 200)
    assert len(re.findall(r"\[image a\.jpg, 640 x 480, \d+ tokens\]", text)) == 2
    assert len(re.findall(r"\[image b\.png, 40 x 120, \d+ tokens\]", text)) == 2
    assert "<|image_pad|>" not in text
    assert "not used" not in text


def test_the_page_has_small_pictures_and_loads_nothing(seen: Inspection) -> None:
    page = inspection_page(seen)
    sources = re.findall(r'src="([^"]*)"', page)
    assert len(sources) == 4
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1] == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    for source, size in zip(sources, list(SIZES.values()) * 2, strict=True):
        head, _, content = source.partition(",")
        assert head == "data:image/jpeg;base64"
        picture = Image.open(io.BytesIO(base64.b64decode(content)))
        assert max(picture.size) <= 160
        assert picture.size[0] * size[1] == pytest.approx(picture.size[1] * size[0], rel=0.05)


def test_a_picture_holds_nothing_of_its_file_but_pixels(file: Path) -> None:
    for name in SIZES:
        found = reference(name, file.parent)
        content = base64.b64decode(look(found["file"], found["sha256"]).picture.partition(",")[2])
        assert b"secret" in (file.parent / name).read_bytes()
        assert b"secret" not in content
        assert b"Exif" not in content


def test_samples_with_other_images_are_no_duplicates(file: Path, model: Path) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    Image.new("RGB", SIZES["a.jpg"], "blue").save(file.parent / "c.jpg")
    rows[0]["images"][0] = "c.jpg"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    args = {"path": str(file), "val_split_fraction": 0}
    data = load_data(Component(class_path="JSON", init_args=args), Tokenizer(model), 512)
    sets = [part.splits["train"].samples for part in data.parts]
    assert data.train[0].ids.tolist() == data.train[2].ids.tolist()
    assert find_duplicates(sets, []).train == 1  # that of the records without images


def test_the_start_of_a_run_says_how_many_tokens_images_have(file: Path, model: Path) -> None:
    args = {"path": str(file), "val_split_fraction": 0}
    data = load_data(Component(class_path="JSON", init_args=args), Tokenizer(model), 512)
    display, recorder = Mock(), Mock()
    log_data_summary(data, Journal(display, recorder))
    said = [str(call.args[0]) for call in display.message.call_args_list]
    (line,) = [text for text in said if text.startswith("train data: 4 images")]
    (numbers,) = media_numbers([part.splits["train"].samples for part in data.parts])
    assert line == f"train data: {numbers.text}"
