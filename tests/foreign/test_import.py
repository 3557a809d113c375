"""Runs that others began: what other programs have written goes on under ftkit, step for step.

The checkpoints in tests/foreign/checkpoints were written by these programs themselves
(`scripts/make_foreign_checkpoints`), which then did one step more: its loss and weights are here.
"""

import csv
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from command import Command
from foreign_checkpoints import KEPT, recipe
from safetensors.torch import load_file

from ftkit.checkpoint.metadata import read_metadata
from ftkit.checkpoint.store import Store

CLOSE = 1e-5


def go_on(ftkit: Command, run: Path, method: str) -> dict[str, str]:
    """The row of the step after the import."""
    command = "finetune" if method == "lora" else "finetune_full"
    asked = (command, "--config", run / "recipe.yaml", "--resume", "auto", "--stop_after", 1)
    ended = ftkit(*asked)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    with (run / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    return row


def weights_of(ftkit: Command, run: Path, method: str) -> dict[str, torch.Tensor]:
    """Those of the newest checkpoint, by Hugging Face's names."""
    if method == "lora":
        return load_file(Store(run / "checkpoints").path(4) / "adapter/adapter_model.safetensors")
    out = run.with_name("exported")
    ended = ftkit("export", Store(run / "checkpoints").path(4), "--format", "hf", "--out", out)
    assert ended.returncode == 0, ended.stderr
    return load_file(out / "model.safetensors")


def differences(found: Mapping[str, torch.Tensor], noted: Mapping[str, list[float]]) -> float:
    """The largest between weights and what was noted of theirs."""
    worst = 0.0
    for name, values in noted.items():
        plain = name.replace(".default.", ".")
        flat = found[plain].float().flatten()
        places = [i * (flat.numel() - 1) // (len(values) - 1) for i in range(len(values))]
        worst = max(worst, (flat[places] - torch.tensor(values)).abs().max().item())
    return worst


CASES = {
    "trainer": ("checkpoint-3", "full"),
    "trl-lora": ("checkpoint-3", "lora"),
    "deepspeed-zero1": ("", "full"),
    "deepspeed-zero3": ("", "full"),
    "distributed": ("checkpoint", "full"),
    "lightning": ("checkpoint.ckpt", "full"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_step_after_an_import_is_the_one_that_the_other_program_did(
    ftkit: Command, tmp_path: Path, case: str
) -> None:
    inside, method = CASES[case]
    source, run = KEPT / case / inside, tmp_path / "run"
    theirs = json.loads((KEPT / case / "next.json").read_text())
    imported = ftkit("import", source, "--out", run, "--config", recipe(tmp_path))
    assert imported.returncode == 0, imported.stderr
    assert "not taken over: the order of the samples" in imported.stdout
    (step,) = Store(run / "checkpoints").steps()
    assert step == theirs["step"] - 1
    metadata = read_metadata(Store(run / "checkpoints").path(step))
    assert metadata.samples == 18 and metadata.method == method
    assert metadata.learning_rate == pytest.approx(theirs["learning_rate"], rel=1e-6)

    row = go_on(ftkit, run, method)
    assert float(row["lr"]) == pytest.approx(theirs["learning_rate"], rel=1e-6)
    assert float(row["loss"]) == pytest.approx(theirs["loss"], abs=CLOSE)
    found = weights_of(ftkit, run, method)
    assert found.keys() == {name.replace(".default.", ".") for name in theirs["weights"]}
    assert differences(found, theirs["weights"]) < CLOSE


def test_the_checkpoints_are_as_their_programs_wrote_them() -> None:
    noted = json.loads((KEPT / "files.json").read_text())
    found = {
        path.relative_to(KEPT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in KEPT.rglob("*")
        if path.is_file() and path.name != "files.json"
    }
    assert found == noted
