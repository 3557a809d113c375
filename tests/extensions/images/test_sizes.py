"""data.image_max_pixels and data.image_min_pixels: images are scaled before the processor."""

import json
from pathlib import Path
from typing import Any

import pytest
from messages import says
from PIL import Image
from seeing_models import KINDS

from ftkit.data.dataset import DataSets, load_data
from ftkit.data.own_data import OwnData
from ftkit.errors import UserError
from ftkit.extensions.images.image_model import Limits
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.changes import recipe_changes
from ftkit.recipe.parsing import from_dict, read_recipe, to_dict
from ftkit.recipe.recipe import Component

Size = tuple[int, int]
SCALED: dict[str, tuple[Limits, Size, Size]] = {
    "nothing is said": (Limits(), (200, 100), (200, 100)),
    "within": (Limits(image_max_pixels=20_000, image_min_pixels=20_000), (200, 100), (200, 100)),
    "too many": (Limits(image_max_pixels=512), (200, 100), (32, 16)),
    "too few": (Limits(image_min_pixels=2048), (20, 20), (45, 45)),
    "a line": (Limits(image_max_pixels=4), (10_000, 1), (200, 1)),
}


@pytest.mark.parametrize("name", SCALED)
def test_an_image_keeps_its_shape(name: str) -> None:
    limits, size, expected = SCALED[name]
    assert limits.within(Image.new("RGB", size)).size == expected


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    Image.linear_gradient("L").resize((200, 100)).save(tmp_path / "a.png")
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "red"}]
    row = {"messages": turns, "images": ["a.png"]}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    return tmp_path / "chats.jsonl"


def _load(file: Path, model: Path, **options: Any) -> DataSets:
    args = {"path": str(file), "val_split_fraction": 0, **options}
    return load_data(Component(class_path="JSON", init_args=args), Tokenizer(model), 512)


def _pixels(data: DataSets) -> Any:
    sample = data.train[0]
    assert data.train.media_reader is not None
    read = data.train.media_reader.read([sample.media], [sample.ids], None)
    (image,) = read["inputs"]
    return image["pixel_values"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_sees_the_scaled_image(kind: str, file: Path, seen: Path) -> None:
    plain = _load(file, seen / kind)
    scaled = _load(file, seen / kind, image_max_pixels=288)
    small = file.parent / "small"
    small.mkdir()
    image = Image.open(file.parent / "a.png").convert("RGB").resize((24, 12))
    image.save(small / "a.png")
    (small / "chats.jsonl").write_text(file.read_text())
    expected = _load(small / "chats.jsonl", seen / kind)
    assert (_pixels(scaled) == _pixels(expected)).all()
    assert scaled.train[0].ids.tolist() == expected.train[0].ids.tolist()
    assert (
        _pixels(plain).shape != _pixels(scaled).shape or (_pixels(plain) != _pixels(scaled)).any()
    )


def test_fewer_pixels_are_fewer_tokens(file: Path, seen: Path) -> None:
    kind = seen / "qwen2_5_vl"
    lengths = [
        int(_load(file, kind, **options).train.lengths[0])
        for options in ({}, {"image_max_pixels": 1024}, {"image_max_pixels": 256})
    ]
    assert lengths == sorted(lengths, reverse=True) and len({*lengths}) == 3


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "nothing": ({"image_max_pixels": 0}, ("data.image_max_pixels is 0", "589824")),
    "a text": ({"image_min_pixels": "many"}, ("data.image_min_pixels is 'many'", "589824")),
    "true": ({"image_max_pixels": True}, ("data.image_max_pixels is True",)),
    "least above most": (
        {"image_max_pixels": 100, "image_min_pixels": 200},
        (
            "data.image_min_pixels is 200",
            "data.image_max_pixels is 100",
            "--data.image_min_pixels 100",
        ),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_values_that_are_refused(name: str) -> None:
    options, words = BAD[name]
    with pytest.raises(UserError) as refused:
        OwnData.of(Component(class_path="JSON", init_args={"path": "a.jsonl", **options}))
    assert says(str(refused.value), *words)


def test_records_without_images_are_not_scaled(file: Path, seen: Path) -> None:
    row = json.loads(file.read_text().splitlines()[0])
    del row["images"]
    file.write_text(f"{json.dumps(row)}\n" * 2)
    with pytest.raises(UserError) as refused:
        _load(file, seen / "gemma3", image_max_pixels=100)
    assert says(str(refused.value), "data.image_max_pixels", "no images", "Remove")


@pytest.mark.parametrize("key", ["image_max_pixels", "image_min_pixels"])
def test_a_resumed_run_cannot_change_them(key: str) -> None:
    before = read_recipe([], [("checkpoint_dir", "base"), ("data", "JSON"), ("data.path", "a")])
    values = to_dict(before)
    values["data"]["init_args"][key] = 1000
    fixed, _ = recipe_changes(before, from_dict(values, before.method))
    assert fixed == [f"data.{key} not set -> 1000"]
