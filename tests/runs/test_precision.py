"""Where no precision is named: what the CPU computes fast, and later what the checkpoint has."""

import json
import re
from pathlib import Path

import pytest
from command import DEFAULT_SIGNALS, Start
from messages import says
from runs import WITHOUT_EVALUATION, command_of

from ftkit.checkpoint.store import Store
from ftkit.cli.app import run
from ftkit.runs.report.report import Report, read_report

UNNAMED = {"precision": "null", "train__max_steps": 4}


def on_cpu(*, fast: bool) -> str:
    """Statements after which the command finds that the CPU multiplies bfloat16 fast, or not."""
    stand_in = f"ftkit.recipe.devices.multiplies_bf16 = lambda: {fast}"
    return f"{DEFAULT_SIGNALS}\nimport ftkit.recipe.devices\n{stand_in}\n"


def emulated(report: Report) -> list[str]:
    """Its warnings of emulated products."""
    key = "precision is bf16-mixed ... CPU ... --precision 32-true"
    return [warning for warning in report.warnings if says(warning, key)]


@pytest.mark.parametrize(
    ("fast", "precision", "devices"), [(True, "bf16-mixed", 1), (False, "32-true", 2)]
)
def test_a_run_keeps_the_precision_that_it_began_with_on_a_cpu_of_another_default(
    fast: bool, precision: str, devices: int, start: Start, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    keys = WITHOUT_EVALUATION | UNNAMED | {"devices": devices, "train__micro_batch_size": 1}
    with start(out, "--stop_after", "2", **keys, before=on_cpu(fast=fast)) as begun:
        code, said, errors = begun.end()
    report = read_report(out / "report.json")
    assert report.outcome == "stopped", (code, said, errors)
    assert report.resolved and report.resolved.precision == precision
    assert emulated(report) == []
    with start(out, resume="auto", **keys, before=on_cpu(fast=not fast)) as continued:
        code, said, errors = continued.end()
    assert code == 0, errors
    report = read_report(out / "report.json")
    assert report.resolved and report.resolved.precision == precision
    assert report.resumed and report.resumed.changes == []
    assert f"precision {precision}, as in the checkpoint" in said
    assert len(emulated(report)) == (precision == "bf16-mixed")
    measured = re.findall(r"(\d+) times as long in bfloat16 as in float32", said)
    assert len(measured) == (precision == "bf16-mixed"), said
    assert Store(out / "checkpoints").metadata(4).layout.precision == precision


@pytest.mark.parametrize(("fast", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
@pytest.mark.parametrize("gpu", [None, "h200", "t4"])
def test_a_plan_is_in_the_precision_of_its_machine(
    gpu: str | None,
    fast: bool,
    precision: str,
    common: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("ftkit.recipe.devices.multiplies_bf16", lambda: fast)
    there = {} if gpu is None else {"gpu": gpu, "accelerator": "cuda"}
    words = command_of(tmp_path / "out", common, **UNNAMED | there)
    assert run(["plan", *words, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["precision"]
    assert found == {None: precision, "h200": "bf16-mixed", "t4": "16-mixed"}[gpu]
