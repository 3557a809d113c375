"""Foreign checkpoints with code in them: refused by the name of what they would call, uncalled."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_checkpoints import KEPT, recipe
from messages import says

from ftkit.errors import UserError
from ftkit.extensions.foreign_checkpoints.command import import_run
from ftkit.extensions.foreign_checkpoints.commands import ImportOptions


class Bomb:
    """Makes a directory when a loader that calls any function unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


FILES = {
    "trainer": "checkpoint-3/optimizer.pt",
    "deepspeed-zero1": "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "deepspeed-zero3": "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt",
    "deepspeed-bf16": "global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "gpt-neox": "global_step3/mp_rank_00_model_states.pt",
    "distributed": "checkpoint/.metadata",
    "lightning": "checkpoint.ckpt",
    "lightning-sharded": "checkpoint.ckpt/meta.pt",
    "litgpt": "step-000003/lit_model.pth",
    "litgpt-lora": "step-000003/lit_model.pth.lora",
    "trainer-deepspeed": "checkpoint-3/global_step3/mp_rank_00_model_states.pt",
    "trainer-fsdp": "checkpoint-3/optimizer_0/.metadata",
    "trainer-fsdp-gathered": "checkpoint-3/optimizer.bin",
}


def mistake(tmp_path: Path, source: Path) -> str:
    out = tmp_path / "run"
    with pytest.raises(UserError) as error:
        import_run(ImportOptions(source=source, out=out, config=(str(recipe(tmp_path)),)))
    assert not out.exists() and not list(tmp_path.glob(".run*"))
    return str(error.value)


def copied(case: str, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of a checkpoint: what is imported, and the file of it that is looked at."""
    copy = tmp_path / case
    shutil.copytree(KEPT / case, copy)
    inside = Path(FILES[case])
    is_whole = case.startswith(("deepspeed", "gpt-neox"))
    return copy if is_whole else copy / inside.parts[0], copy / inside


@pytest.mark.parametrize("case", FILES)
def test_code_in_a_checkpoint_is_refused_by_its_name_and_not_called(
    tmp_path: Path, case: str
) -> None:
    source, file = copied(case, tmp_path)
    bomb = Bomb(tmp_path / "called")
    if file.name == ".metadata":
        file.write_bytes(pickle.dumps(bomb))
    else:
        torch.save({"state": bomb, "global_step": 3}, file)
    words = mistake(tmp_path, source)
    assert "mkdir" in words and str(file) in words
    assert not bomb.mark.exists()


@pytest.mark.parametrize("case", FILES)
def test_a_checkpoint_that_was_cut_off_or_lacks_a_file_is_one_clear_error(
    tmp_path: Path, case: str
) -> None:
    source, file = copied(case, tmp_path)
    file.write_bytes(file.read_bytes()[:200])
    assert str(file) in mistake(tmp_path, source)
    file.unlink()
    assert str(source) in mistake(tmp_path, source)


def test_a_checkpoint_with_a_missing_rank_is_refused_by_its_number(tmp_path: Path) -> None:
    source, file = copied("deepspeed-zero1", tmp_path)
    file.unlink()
    assert "rank 1 is missing" in mistake(tmp_path, source)


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    source, _ = copied("trainer", tmp_path)
    shutil.copyfile(KEPT / "trl-lora/checkpoint-3/optimizer.pt", source / "optimizer.pt")
    assert says(mistake(tmp_path, source), "not the optimizer")
