"""docs/tutorial.md: its figures are those of ftkit plan, its outcomes those of the sweep files."""

import subprocess
import sys

import pytest
import yaml
from command import ROOT, command_environment
from notebook_cells import SINGLE_GPU, read_notebook

DOCUMENT = ROOT / "docs" / "tutorial.md"


def table_of(*words: str) -> list[str]:
    command = [sys.executable, ROOT / "scripts" / "tutorial_plans", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=command_environment())
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ["--only", "14-13b-lora", "--only", "a100-7b-4fsdp"],
            id="some",
            marks=pytest.mark.slow,
        ),
        pytest.param([], id="all", marks=pytest.mark.matrix),
    ],
)
def test_the_figures_of_the_document_are_those_of_the_plan(words: list[str]) -> None:
    shown = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
    found = table_of(*words)
    assert len(found) == 2 + (len(words) // 2 or 24)
    assert found == shown if not words else set(found) <= set(shown)


def test_every_experiment_stands_beside_its_outcome() -> None:
    text = DOCUMENT.read_text()
    for name in ("single_gpu", "multi_gpu"):
        for run in yaml.safe_load((ROOT / f"recipes/sweeps/{name}.yaml").read_text())["runs"]:
            rows = [line for line in text.splitlines() if line.startswith(f"| {run['name']} |")]
            assert len(rows) == 1 and rows[0].endswith(f"| {run['note']} |")


def test_the_notebook_shows_the_figures_and_outcomes_of_the_document() -> None:
    code = [cell for cell in read_notebook(SINGLE_GPU).cells if cell.cell_type == "code"]
    (cell,) = [cell for cell in code if "run['note']" in cell.source]
    lines = "".join(output.text for output in cell.outputs).splitlines()
    shown = dict(zip(lines[::2], (line.strip() for line in lines[1::2]), strict=True))
    rows = [line.split(" | ") for line in DOCUMENT.read_text().splitlines()]
    rows = [row for row in rows if len(row) == 6 and " A100 " in f" {row[1]} "]
    assert len(shown) == len(rows) == 19
    for name, _, _, needs, fits, outcome in rows:
        words = f"{name.removeprefix('| ')}: {needs} GiB, {fits}"
        assert shown[words] == outcome.removesuffix(" |")
