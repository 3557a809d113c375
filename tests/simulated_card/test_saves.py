"""Asynchronous saves of a run on a simulated card, with copies before and beside training."""

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from command import command_environment, command_line
from runs import command_of
from simulated_card.build import library, needs_card
from simulated_card.counts import Counts
from simulated_card.settings import START, Cards

from ftkit.checkpoint.file_checks import hash_file
from ftkit.checkpoint.store import Store
from ftkit.runs.report.report import read_report

pytestmark = needs_card

STEPS = 3
SWITCHED_ON = """
if "ftkit.training.rank" in sys.orig_argv:
    from ftkit.checkpoint import host_copies
    host_copies.COPIES_BESIDE_TRAINING = True
"""


def run_on_card(out: Path, common: list[str], statements: str) -> Counts:
    """A run that saves every step; what it counted on the card."""
    start = out.with_name(f"{out.name}-start")
    start.mkdir()
    with_cards = f"import runpy, sys\nrunpy.run_path({str(START / 'sitecustomize.py')!r})\n"
    (start / "sitecustomize.py").write_text(with_cards + statements)
    card = Cards(kinds=("h100",), library=str(library()), counts=str(start))
    environment = command_environment() | card.environment()
    environment["PYTHONPATH"] += f":{start}"
    keys = {
        "command": "finetune_full",
        "accelerator": "cuda",
        "devices": 1,
        "precision": "32-true",
        "train__max_steps": STEPS,
        "train__save_interval": 1,
        "checkpoint__keep_last": STEPS,
        "eval__interval": 0,
        "eval__max_new_tokens": 0,
    }
    run = subprocess.run(
        command_line(*command_of(out, common, **keys)),
        capture_output=True,
        text=True,
        env=environment,
        cwd=start,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return Counts.read(start)


@pytest.mark.slow
def test_saves_beside_training_are_equal_and_the_host_waits_for_no_copy(
    common: list[str], tmp_path: Path
) -> None:
    expected = {
        "usual": {("main", "device"): 2 * STEPS},
        # That of the main thread comes after a step, when the device has nothing to do.
        "beside": {("main", "device"): STEPS, ("Thread", "event"): STEPS, ("main", "event"): 1},
    }
    for name, statements in (("usual", ""), ("beside", SWITCHED_ON)):
        waits: Counter[tuple[str, str]] = Counter()
        copies = set()
        for event, count in run_on_card(tmp_path / name, common, statements).events.items():
            if event.where.startswith("checkpoint/host_copies.py") and event.kind == "synchronize":
                waits[event.thread, event.what] += count
            elif event.where.startswith("checkpoint/host_copies.py"):
                copies.add((event.kind, event.what))
        assert waits == expected[name]
        assert copies == {("to_host_async", "pinned")}
    stores = [Store(tmp_path / name / "checkpoints") for name in ("usual", "beside")]
    for step in range(1, STEPS + 1):
        usual, beside = (store.path(step) / "shard-00000-of-00001.safetensors" for store in stores)
        assert hash_file(usual) == hash_file(beside)
    warnings = [read_report(tmp_path / name).warnings for name in ("usual", "beside")]
    assert warnings[0] == warnings[1] and "page-locked" not in str(warnings)
