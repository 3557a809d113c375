"""Images of samples: never those of another file, cut, or learned as tokens."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from messages import says
from PIL import Image
from seeing_models import FIRST, KINDS, write_chats

from ftkit.data import dataset
from ftkit.data.cache import cache_directory
from ftkit.data.dataset import DataSets, load_data
from ftkit.data.media_files import first_changed, stamps_of
from ftkit.data.prepare import prepare_records
from ftkit.data.records.media import MediaFile
from ftkit.errors import UserError
from ftkit.extensions.images.image_model import ImageModel, Limits
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component

Row = dict[str, Any]
Load = Callable[..., tuple[DataSets, bool]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with chats.jsonl and its pictures."""
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    write_chats(tmp_path / "data" / "chats.jsonl")
    return tmp_path / "data"


@pytest.fixture
def load(seen: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Gives data of a model, and whether samples were made for them."""

    def load_(folder: Path, kind: str = "llava", most: int = 512, **options: Any) -> Any:
        made = []

        def noted(*arguments: Any) -> Any:
            made.append(arguments)
            return prepare_records(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(dataset, "prepare_records", noted)
            args = {"path": str(folder / "chats.jsonl"), "val_split_fraction": 0.25} | options
            component = Component(class_path="JSON", init_args=args)
            return load_data(component, Tokenizer(seen / kind), most), bool(made)

    return load_


def _write(folder: Path, *rows: Row) -> None:
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _chat(question: Any, answer: Any = "red", **more: Any) -> Row:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **more}


def _files(data: DataSets) -> list[Path]:
    return [Path(one.file) for part in data.parts for split in part.splits.values()
            for one in split.samples.media_files]  # fmt: skip


def _settle(folder: Path) -> None:
    """Let pictures be older than what is written now."""
    for file in (folder / "images").iterdir():
        os.utime(file, (1e9, 1e9))


def test_a_picture_that_changed_is_another_data_set(folder: Path, load: Load) -> None:
    _settle(folder)
    before, made = load(folder)
    assert made and not load(folder)[1]
    picture = folder / "images" / "3.png"
    status = picture.stat()
    Image.new("RGB", (20, 20)).save(picture)
    after, made = load(folder)
    assert made and not load(folder)[1]
    assert before.fingerprint != after.fingerprint
    (notice,) = {notice for part in after.parts for notice in part.notices}
    assert says(notice, picture, "changed")
    os.utime(picture, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not load(folder)[1]


def test_a_picture_of_the_same_size_that_changed_at_once_is_seen(folder: Path, load: Load) -> None:
    # Within the grain of clocks: it has the time of the former one.
    picture = folder / "images" / "0.png"
    Image.new("RGB", (20, 20), "red").save(picture, compress_level=0)
    before, _ = load(folder)
    status = picture.stat()
    Image.new("RGB", (20, 20), "blue").save(picture, compress_level=0)
    os.utime(picture, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert picture.stat().st_size == status.st_size
    after, made = load(folder)
    assert made and after.fingerprint != before.fingerprint


def test_pictures_that_were_copied_are_known_by_what_they_hold(folder: Path, load: Load) -> None:
    _settle(folder)
    before, _ = load(folder)
    for file in (folder / "images").iterdir():
        os.utime(file, (1.1e9, 1.1e9))
    after, made = load(folder)
    assert not made
    assert after.fingerprint == before.fingerprint
    # The next one need not read them.
    entry = next(cache_directory().glob("*/train"))
    stamps = np.fromfile(entry / "media_stamps", dtype="<i8").reshape(-1, 2)
    assert (stamps[:, 1] == 1.1e18).all()


@pytest.mark.parametrize("content", [b"", b"1234567", b"12345678" * 2])
def test_stamps_that_are_lost_cost_a_look_at_the_files(
    content: bytes, folder: Path, load: Load
) -> None:
    load(folder)
    for file in cache_directory().glob("*/*/media_stamps"):
        file.write_bytes(content)
    assert not load(folder)[1]


def test_data_that_moved_find_their_pictures(folder: Path, load: Load, tmp_path: Path) -> None:
    before, _ = load(folder)
    folder.rename(tmp_path / "elsewhere")
    after, made = load(tmp_path / "elsewhere")
    assert not made and after.fingerprint == before.fingerprint
    assert {file.parent for file in _files(after)} == {tmp_path / "elsewhere" / "images"}
    # Validation records are asked as questions, with their pictures.
    asked = [question for question in after.questions if question.media]
    assert asked
    assert all(Path(one.file).is_file() for question in asked for one in question.media)


def test_data_that_were_copied_without_their_pictures_are_refused(
    folder: Path, load: Load, tmp_path: Path
) -> None:
    load(folder)
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(folder / "chats.jsonl", tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is not there"):
        load(tmp_path / "elsewhere")
    assert not load(folder)[1]


@pytest.mark.parametrize("broken", [None, b"no picture"], ids=["missing", "broken"])
def test_a_record_that_was_left_out_is_used_once_its_picture_is_there(
    broken: bytes | None, folder: Path, load: Load
) -> None:
    picture = folder / "images" / "5.png"
    content = picture.read_bytes()
    picture.unlink()
    if broken:
        picture.write_bytes(broken)
    _settle(folder)
    few, _ = load(folder, skip_bad_records=True)
    assert not load(folder, skip_bad_records=True)[1]
    picture.write_bytes(content)
    every, made = load(folder, skip_bad_records=True)
    assert made
    used = [
        sum(split.counts.used for split in one.parts[0].splits.values()) for one in (few, every)
    ]
    assert used[1] == used[0] + 1


def test_a_picture_that_changes_under_a_run_stops_it_by_name(folder: Path, load: Load) -> None:
    data, _ = load(folder)
    picture = folder / "images" / "0.png"
    number = next(
        i for i in range(len(data.train))
        if any(one.file.endswith("/0.png") for one in data.train[i].media)
    )  # fmt: skip
    sample = data.train[number]
    assert data.train.media_reader is not None
    data.train.media_reader.read([sample.media], [sample.ids], None)
    Image.new("RGB", (9, 9)).save(picture)
    with pytest.raises(UserError, match=str(picture)):
        data.train.media_reader.read([sample.media], [sample.ids], None)


def test_models_with_one_tokenizer_have_entries_of_their_own(
    folder: Path, load: Load, seen: Path
) -> None:
    other = seen / "other"
    shutil.copytree(seen / "llava", other, dirs_exist_ok=True)
    file = other / "preprocessor_config.json"
    if not file.is_file():
        file = other / "processor_config.json"
    settings = json.loads(file.read_text())
    settings["image_mean"] = [0.1, 0.2, 0.3]
    file.write_text(json.dumps(settings))
    assert load(folder)[1]
    assert load(folder, "other")[1]
    assert not load(folder)[1]
    assert not load(folder, "other")[1]


def test_files_are_compared_fast(tmp_path: Path) -> None:
    files = []
    for number in range(2500):
        (tmp_path / str(number)).write_bytes(b"%d" % number)
        files.append(MediaFile("image", f"{number}", str(tmp_path / str(number)), False))
        os.utime(tmp_path / str(number), (1e9, 1e9))
    stamps = stamps_of(files, 2 * 10**18)
    assert first_changed(files, stamps)[0] is None  # by stamps alone: no digest is right
    (tmp_path / "2400").write_bytes(b"another")
    assert first_changed(files, stamps)[0] == files[2400]


LITERALS: dict[str, tuple[str, Row]] = {
    "llava": ("<image>", _chat([{"type": "image", "image": "images/0.png"},
                                {"type": "text", "text": "a <image> b"}])),
    "qwen2_5_vl": ("<|image_pad|>", _chat("<image> and <|image_pad|>", images=["images/0.png"])),
    "gemma3": ("<image_soft_token>", _chat("a <image_soft_token>")),
    "idefics3": ("<image>", _chat("what", "a <image>")),
}  # fmt: skip


@pytest.mark.parametrize("kind", LITERALS)
def test_a_token_of_images_that_someone_typed_is_no_place(
    kind: str, folder: Path, load: Load
) -> None:
    token, row = LITERALS[kind]
    plain = _chat("<image>it", images=["images/1.png"])
    _write(folder, *[plain] * 7, row)
    data, _ = load(folder, kind, val_split_fraction=0)
    assert data.counts["train"].used == 7
    ((reason, count),) = data.counts["train"].reasons.items()
    assert count == 1 and token in reason


def test_a_mark_in_a_text_is_a_literal_beside_parts(folder: Path, load: Load, seen: Path) -> None:
    # Of a family with another token, so that the text can be learned.
    parts = [{"type": "image", "image": "images/0.png"}, {"type": "text", "text": "say <image>"}]
    _write(folder, *[_chat(parts)] * 4)
    data, _ = load(folder, "qwen2_5_vl", val_split_fraction=0)
    assert [len(data.train[i].media) for i in range(4)] == [1] * 4
    text = Tokenizer(seen / "qwen2_5_vl").processor.decode(
        data.train[0].ids.tolist(), skip_special_tokens=False
    )
    assert "say <image>" in text


def _places(data: DataSets, token_id: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Of each sample: tokens of images, those that its media claim, and those that carry loss."""
    found = []
    for number in range(len(data.train)):
        sample = data.train[number]
        of_images = np.flatnonzero(sample.ids == token_id).tolist()
        claimed = [i for one in sample.media for i in range(one.first, one.end)]
        learned = [i for first, end in sample.trained.tolist() for i in range(first, end)]
        found.append((of_images, claimed, learned))
    return found


def _token_id(seen: Path, kind: str) -> int:
    config = json.loads((seen / kind / "config.json").read_text())
    return int(config.get("image_token_id", config.get("image_token_index")))


ROLES: list[Row] = [
    {"messages": [
        {"role": "system", "content": "like <image> it"},
        {"role": "user", "content": "<image>what"},
        {"role": "assistant", "content": "it <image> is <image>"},
        {"role": "user", "content": "is <image>"},
        {"role": "assistant", "content": "red"},
    ], "images": [f"images/{number}.png" for number in range(5)]},
    _chat("<image><image>what colour", images=["images/0.png", "images/1.png"]),
    _chat("what colour"),
]  # fmt: skip


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_images_never_carry_loss(
    kind: str, train_on: str, folder: Path, load: Load, seen: Path
) -> None:
    _write(folder, *ROLES)
    data, _ = load(folder, kind, val_split_fraction=0, train_on=train_on)
    counts = []
    for of_images, claimed, learned in _places(data, _token_id(seen, kind)):
        assert {*of_images} <= {*claimed}
        assert not {*claimed} & {*learned}
        assert learned
        counts.append(len(of_images))
    assert sorted(map(bool, counts)) == [False, True, True]
    # What stands around an image of an answer is learned.
    sample = data.train[0]
    third = sample.media[2]
    spans = sample.trained.tolist()
    assert {third.first - 2, third.end + 1} <= {i for a, b in spans for i in range(a, b)}


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
@pytest.mark.parametrize(
    "kind",
    [kind if kind in FIRST else pytest.param(kind, marks=pytest.mark.matrix) for kind in KINDS],
)
def test_no_sample_ends_within_an_image(
    kind: str, overlong: str, folder: Path, load: Load, seen: Path
) -> None:
    _write(folder, *ROLES)
    whole, _ = load(folder, kind, val_split_fraction=0, train_on="all")
    longest = int(whole.train.lengths.max()) + 1
    for most in range(20, longest + 1, 3):
        data, _ = load(folder, kind, most, val_split_fraction=0, train_on="all", overlong=overlong)
        for number, (of_images, claimed, _) in enumerate(_places(data, _token_id(seen, kind))):
            assert {*of_images} <= {*claimed}
            assert len(data.train[number].ids) <= most
            assert all(one.end <= len(data.train[number].ids) for one in data.train[number].media)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_beside_images_have_the_tokens_that_they_have_alone(
    kind: str, folder: Path, load: Load
) -> None:
    texts = [_chat("what colour is it"), _chat("a\n the image", "blue it is")]
    _write(folder, *ROLES[:2], *texts)
    beside, _ = load(folder, kind, val_split_fraction=0)
    _write(folder, *texts)
    alone, _ = load(folder, kind, val_split_fraction=0)
    assert alone.parts[0].part.media == ()
    for number in range(2):
        found, expected = beside.train[number + 2], alone.train[number]
        assert found.ids.tolist() == expected.ids.tolist()
        assert found.trained.tolist() == expected.trained.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_that_exif_turns_is_that_of_its_turned_pixels(
    kind: str, folder: Path, load: Load
) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (24, 72, 3)).astype(np.uint8)
    upright = Image.fromarray(noise)
    exif = Image.Exif()
    exif[0x0112] = 6  # as cameras say that the picture is to be turned by 90 degrees
    upright.save(folder / "images" / "turned.png", exif=exif)
    upright.transpose(Image.Transpose.ROTATE_270).save(folder / "images" / "upright.png")
    _write(folder, *[_chat("<image>", images=[f"images/{n}.png"]) for n in ("turned", "upright")])
    data, _ = load(folder, kind, val_split_fraction=0)
    turned, straight = (data.train[number] for number in range(2))
    assert turned.ids.tolist() == straight.ids.tolist()
    assert data.train.media_reader is not None
    found = [
        data.train.media_reader.read([one.media], [one.ids], None) for one in (turned, straight)
    ]
    for one, other in zip(*(made["inputs"] for made in found), strict=True):
        assert all((one[key] == other[key]).all() for key in other)


def test_a_picture_that_is_found_damaged_when_it_is_decoded_makes_a_bad_record(
    folder: Path, load: Load
) -> None:
    picture = folder / "images" / "2.png"
    picture.write_bytes(picture.read_bytes()[:-200])
    with pytest.raises(UserError) as refused:
        load(folder, val_split_fraction=0)
    words = (picture, "is damaged", "--data.skip_bad_records true")
    assert says(str(refused.value), *words)
    data, _ = load(folder, val_split_fraction=0, skip_bad_records=True)
    assert data.counts["train"].used == 7
    assert sum(data.counts["train"].reasons.values()) == 1


def test_a_picture_of_a_shape_that_the_model_does_not_take(folder: Path, load: Load) -> None:
    Image.new("RGB", (4000, 8)).save(folder / "images" / "2.png")
    with pytest.raises(UserError) as refused:
        load(folder, "qwen2_5_vl", val_split_fraction=0)
    assert says(str(refused.value), "images/2.png", "4,000 x 8", "aspect ratio")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("llama4", "torchvision"),
        ("kimi_k25", "torchvision"),
        ("mllama", "cross-attention"),
        ("fuyu", "so far"),
    ],
)
def test_models_that_are_given_no_images_are_refused_with_the_reason(
    kind: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UserError) as refused:
        ImageModel(tmp_path, str, Limits())
    assert says(str(refused.value), f"{kind} models", why, "llava", "remove the records")


def test_data_of_bad_pictures_alone_say_so(folder: Path, load: Load) -> None:
    for picture in (folder / "images").iterdir():
        picture.write_bytes(picture.read_bytes()[:-200])
    rows = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    _write(folder, *[row for row in rows if "images" in row])
    with pytest.raises(UserError) as refused:
        load(folder, val_split_fraction=0, skip_bad_records=True)
    assert says(str(refused.value), "Correct the images, or remove them")


WRITERS = ("vicuna", "llama2", "mistral", "chatml", "zephyr")
"""Templates of texts alone, with and without tokens of their own around turns."""


@pytest.mark.parametrize("template", WRITERS)
@pytest.mark.parametrize("kind", KINDS)
def test_templates_without_tokens_of_their_own_write_each_image_once(
    kind: str, template: str, folder: Path, load: Load, seen: Path
) -> None:
    _write(folder, *ROLES[1:], *reversed(ROLES[1:]))
    by_model, _ = load(folder, kind, val_split_fraction=0)
    data, _ = load(folder, kind, val_split_fraction=0, chat_template=template)
    token_id = _token_id(seen, kind)
    for number in range(len(by_model.train)):
        own, expected = data.train[number], by_model.train[number]
        assert (own.ids == token_id).sum() == (expected.ids == token_id).sum()
        sizes = [[one.end - one.first for one in sample.media] for sample in (own, expected)]
        assert sizes[0] == sizes[1]


def test_a_template_that_leaves_out_a_message_with_an_image_is_refused(
    folder: Path, load: Load
) -> None:
    source = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}"
    )
    row = {"messages": [{"role": "system", "content": "<image>"}, *_chat("<image>?")["messages"]]}
    _write(folder, row | {"images": ["images/0.png", "images/1.png"]}, *[_chat("what")] * 3)
    data, _ = load(folder, val_split_fraction=0, chat_template=source)
    assert data.counts["train"].used == 3
    (reason,) = data.counts["train"].reasons
    assert says(reason, "1 image for 2")


@pytest.mark.parametrize("key", ["reasoning_content", "tool_calls"])
def test_a_token_of_images_anywhere_in_a_conversation_is_no_place(
    key: str, folder: Path, load: Load
) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": "<image>"}}}]
    value: Any = calls if key == "tool_calls" else "<image>"
    plain = _chat([{"type": "image", "image": "images/0.png"}])
    marked = _chat([{"type": "image", "image": "images/0.png"}])
    marked["messages"][1][key] = value
    _write(folder, *[plain] * 3, marked)
    data, _ = load(folder, val_split_fraction=0)
    assert data.counts["train"].used == 3


def test_instructions_with_images_need_a_chat_template(folder: Path, load: Load) -> None:
    row = {"instruction": "<image>what", "input": "", "output": "red", "images": ["images/0.png"]}
    _write(folder, *[row] * 2)
    with pytest.raises(UserError) as refused:
        load(folder, val_split_fraction=0)
    assert says(str(refused.value), "images", "--data.chat_template tokenizer")
    data, _ = load(folder, val_split_fraction=0, chat_template="tokenizer")
    _write(folder, *[_chat("<image>what", images=["images/0.png"])] * 2)
    same, _ = load(folder, val_split_fraction=0, chat_template="tokenizer")
    assert data.train[0].ids.tolist() == same.train[0].ids.tolist()
