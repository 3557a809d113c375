"""recipes/images.yaml: a small model that sees learns the names of drawn figures."""

import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT, Command, command_environment

from ftkit.runs.report.report import read_report


def _trained(ftkit: Command, folder: Path, pictures: int, *words: object) -> tuple[float, float]:
    """Shares of right answers about pictures that are held out, before training and after it."""
    script = [sys.executable, ROOT / "scripts/make_images_example", "--out", folder]
    subprocess.run(
        [*map(str, script), "--pictures", str(pictures)], check=True, env=command_environment()
    )
    ended = ftkit(
        *("finetune_full", ROOT / "recipes/images.yaml", "--out_dir", folder / "out"),
        *("--checkpoint_dir", folder / "model", "--data.path", folder / "chats.jsonl", *words),
        within_s=900,
    )
    assert ended.returncode == 0, ended.stderr
    match = read_report(folder / "out/report.json").exact_match
    assert match is not None and match.before is not None and match.after is not None
    return match.before, match.after


@pytest.mark.slow
def test_the_recipe_runs(ftkit: Command, tmp_path: Path) -> None:
    few = ("--train.max_steps", 2, "--eval.exact_match", 8)
    before, _ = _trained(ftkit, tmp_path / "example", 48, *few)
    assert before == 0


@pytest.mark.matrix
def test_the_names_of_figures_are_learned(ftkit: Command, tmp_path: Path) -> None:
    before, after = _trained(ftkit, tmp_path / "example", 1200)
    assert before == 0
    assert after > 0.95, "as the recipe says"
