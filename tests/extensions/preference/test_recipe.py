"""The example of preference tuning: which of two answers is right."""

from pathlib import Path

import pytest
from command import ROOT, Command

from ftkit.runs.report.metrics import read_validation
from ftkit.runs.report.report import read_report


@pytest.mark.matrix
def test_the_right_one_of_two_answers_is_learned_in_90_steps(
    ftkit: Command, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = ftkit("finetune", ROOT / "recipes/preference.yaml", "--out_dir", out, within_s=900)
    assert ended.returncode == 0, ended.stderr
    first, *_, last = read_validation(out / "validation.csv")
    assert (first["step"], last["step"]) == (0, 90)
    assert first["val_accuracy"] == 0.5, "an untrained model equals its reference"
    assert (last["val_accuracy"] or 0) > 0.95, "as the recipe says"
    assert (last["val_rejected_reward"] or 0) < (last["val_chosen_reward"] or 0) - 1
    match = read_report(out / "report.json").exact_match
    assert match is not None and match.before == 0 and (match.after or 0) > 0.8
