"""A run goes on where its data have moved with their pictures, and stops where one has changed."""

import shutil
from pathlib import Path

import pytest
from command import Command
from messages import says
from PIL import Image
from seeing_models import save_model, write_chats

from ftkit.runs.report.report import read_report

pytestmark = pytest.mark.slow


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    save_model("llava", tmp_path / "model")
    (tmp_path / "data").mkdir()
    write_chats(tmp_path / "data" / "chats.jsonl")
    return [
        *("finetune_full", str(tmp_path / "model"), "--out_dir", "out", "--data", "JSON"),
        *("--data.val_split_fraction", "0", "--train.max_steps", "4", "--train.epochs", "null"),
        *("--train.global_batch_size", "4", "--train.micro_batch_size", "2"),
        *("--train.save_interval", "2", "--eval.interval", "0", "--eval.max_new_tokens", "0"),
        *("--eval.initial_validation", "false", "--eval.final_validation", "false"),
        *("--accelerator", "cpu", "--precision", "32-true", "--train.max_seq_length", "512"),
    ]


def test_a_run_resumes_where_its_data_have_moved(
    ftkit: Command, words: list[str], tmp_path: Path
) -> None:
    data, moved = tmp_path / "data", tmp_path / "moved" / "far"
    whole = ftkit(*words, "--out_dir", "whole", "--data.path", data / "chats.jsonl")
    assert whole.returncode == 0, whole.stderr
    half = ftkit(*words, "--data.path", data / "chats.jsonl", "--stop_after", 2)
    assert half.returncode == 0, half.stderr
    moved.parent.mkdir()
    data.rename(moved)
    rest = ftkit(*words, "--data.path", moved / "chats.jsonl", "--resume", "auto")
    assert rest.returncode == 0, rest.stderr
    losses = [read_report(tmp_path / name).loss for name in ("whole", "out")]
    assert losses[0] is not None and losses[0] == losses[1]


def test_a_run_does_not_resume_with_another_picture(
    ftkit: Command, words: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "data" / "chats.jsonl"
    assert ftkit(*words, "--data.path", file, "--stop_after", 2).returncode == 0
    kept = shutil.copytree(tmp_path / "data" / "images", tmp_path / "kept")
    Image.new("RGB", (20, 20)).save(tmp_path / "data" / "images" / "0.png")
    rest = ftkit(*words, "--data.path", file, "--resume", "auto")
    assert rest.returncode == 2
    assert says(rest.stderr + rest.stdout, "data")
    shutil.copytree(kept, tmp_path / "data" / "images", dirs_exist_ok=True)
    assert ftkit(*words, "--data.path", file, "--resume", "auto").returncode == 0
