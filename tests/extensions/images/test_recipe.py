"""recipes/images.yaml: a small model that sees learns the names of drawn figures."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT, Command, command_environment

from ftkit.extensions.images.looks import look
from ftkit.runs.report.report import Report, read_report
from ftkit.runs.report.table import report_as_html


def _trained(ftkit: Command, folder: Path, pictures: int, *words: object) -> Report:
    """Report of the recipe, which answers about pictures that are held out."""
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
    return read_report(folder / "out/report.json")


def _before_and_after(report: Report) -> tuple[float, float]:
    """Shares of right answers before training and after it."""
    match = report.exact_match
    assert match is not None and match.before is not None and match.after is not None
    return match.before, match.after


@pytest.mark.slow
def test_the_recipe_runs(ftkit: Command, tmp_path: Path) -> None:
    few = ("--train.max_steps", 2, "--eval.exact_match", 8)
    report = _trained(ftkit, tmp_path / "example", 48, *few)
    assert _before_and_after(report)[0] == 0
    (example,) = report.examples
    (medium,) = example.media
    file = tmp_path / "example/pictures" / medium.name
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert medium.picture == look(str(file), digest).picture
    words = f"[image {medium.name}, 32 x 32, 16 tokens]"
    assert medium.words == words
    said = (tmp_path / "example/out/run.log").read_text()
    assert said.count(f"sample: {example.instruction} {words}") == 2, "before and after training"
    assert f'<img src="{medium.picture}"' in report_as_html(report)


@pytest.mark.matrix
def test_the_names_of_figures_are_learned(ftkit: Command, tmp_path: Path) -> None:
    before, after = _before_and_after(_trained(ftkit, tmp_path / "example", 1200))
    assert before == 0
    assert after > 0.95, "as the recipe says"
