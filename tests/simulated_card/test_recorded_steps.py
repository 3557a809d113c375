"""Micro-steps that are recorded and replayed on a simulated card learn what computed ones learn."""

from pathlib import Path

import pytest
from on_card import OnCard, on_card
from preloaded import Preloaded
from rank_jobs import Outcome
from simulated_card.build import needs_card

from ftkit.runs.report.report import RecordedSteps, Report, read_report

pytestmark = needs_card

STEPS = 8
RECORDED = ("--train.record_steps", "true")
EXACT = 1e-6
"""Largest relative difference of losses."""
ROUNDED = 3e-3
"""The same in 16 bits: sums of fewer rows are rounded elsewhere."""


@pytest.fixture(scope="module")
def machine(
    server_with_cards: Preloaded,
    tiny_base: Path,
    tiny_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> OnCard:
    changes = {"train__max_steps": STEPS, "devices": 1}
    return on_card(server_with_cards, tmp_path_factory.mktemp("cards"), tiny_base, tiny_data, changes)


def report(found: Outcome) -> Report:
    return read_report(found.out_dir)


def replayed(found: RecordedSteps | None) -> RecordedSteps:
    assert found is not None and found.shapes > 0 and found.replayed > 0, found
    return found


CASES = {
    "full": ("finetune_full", (), EXACT),
    "full, bf16-mixed": ("finetune_full", ("--precision", "bf16-mixed"), ROUNDED),
    "LoRA with dropout": ("finetune", (), EXACT),
    "LoRA with dropout, bf16-true": ("finetune", ("--precision", "bf16-true"), ROUNDED),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_computed_steps(machine: OnCard, name: str) -> None:
    command, words, tolerance = CASES[name]
    expected = machine.completed(command, *words)
    found = machine.completed(command, *words, *RECORDED)
    replayed(report(found).recorded_steps)
    print(report(found).recorded_steps, report(found).warnings)
    print(found.losses, expected.losses)
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
