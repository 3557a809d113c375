"""Runs that cannot train projector or tower are refused by name, with a change that works."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from messages import message_of, says
from seeing_models import save_model, write_chats
from tiny import make_llama

from ftkit.cli.app import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seen")
    write_chats(folder / "chats.jsonl")
    write_chats(folder / "texts.jsonl", (0, 0))
    save_model("llava", folder / "llava")
    make_llama(folder / "text")
    return folder


KEYS: dict[str, Any] = {
    "data": "JSON",
    "data.path": "chats.jsonl",
    "data.val_split_fraction": 0,
    "data.chat_template": "tokenizer",
    "accelerator": "cpu",
    "images.projector": True,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train.optimizer_in_backward": True}, ["--train.optimizer_in_backward false"]),
        ({"train.from_scratch": True}, ["train.from_scratch", "--images.projector false"]),
        ({"objective": "dpo"}, ["--objective sft", "--images.projector false"]),
        ({"checkpoint_dir": "text"}, ["text", "--images.projector false"]),
        (
            {"images.projector": False, "images.tower": True, "checkpoint_dir": "text"},
            ["images.tower", "--images.tower false"],
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(
    folder: Path, changes: dict[str, Any], words: list[str]
) -> None:
    keys = KEYS | {"checkpoint_dir": "llava"} | changes
    keys |= {name: str(folder / keys[name]) for name in ("checkpoint_dir", "data.path")}
    asked = [word for key, value in keys.items() for word in (f"--{key}", json.dumps(value))]
    assert says(message_of(run, ["plan", "finetune_full", *asked]), "is true", *words)


@pytest.mark.slow
def test_data_without_images_change_no_projector(folder: Path, tmp_path: Path) -> None:
    keys = KEYS | {"checkpoint_dir": str(folder / "llava"), "out_dir": str(tmp_path / "out")}
    keys |= {"data.path": str(folder / "texts.jsonl"), "devices": 1}
    asked = [word for key, value in keys.items() for word in (f"--{key}", json.dumps(value))]
    said = message_of(run, ["finetune_full", *asked])
    assert says(said, "images.projector is true", "--images.projector false")


@pytest.mark.slow
def test_a_checkpoint_with_a_trained_projector_has_its_language_model_written(
    folder: Path, tmp_path: Path
) -> None:
    keys = KEYS | {"checkpoint_dir": str(folder / "llava"), "out_dir": str(tmp_path / "out")}
    keys |= {"data.path": str(folder / "chats.jsonl"), "devices": 1, "train.max_steps": 1}
    asked = [word for key, value in keys.items() for word in (f"--{key}", json.dumps(value))]
    assert run(["finetune_full", *asked]) == 0
    (checkpoint,) = (tmp_path / "out/checkpoints").glob("step-*")
    assert run(["export", str(checkpoint), "--format", "gguf", "--out", str(tmp_path / "a")]) == 0
    names = {tensor.name for tensor in GGUFReader(*(tmp_path / "a").glob("*.gguf")).tensors}
    assert run(["export", str(folder / "llava"), "--format", "gguf", "--out", f"{tmp_path}/b"]) == 0
    assert names == {one.name for one in GGUFReader(*(tmp_path / "b").glob("*.gguf")).tensors}
