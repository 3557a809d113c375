"""Preference pairs and their reference on simulated cards, with the losses of a CPU."""

import json
from pathlib import Path

import pytest
from on_card import OnCard, on_card
from preloaded import Preloaded
from rank_jobs import needs_deepspeed
from simulated_card.build import needs_card
from tiny import make_pairs

from ftkit.runs.report.report import read_report

pytestmark = [needs_card, pytest.mark.slow]
DPO = ("--objective", "dpo", "--objective.beta", "0.5", "--eval.final_validation", "true")
LAYOUTS = {
    "one card": ("--devices", "1"),
    "fsdp": ("--devices", "2", "--strategy", "fsdp"),
    "zero 3": (
        *("--devices", "2", "--strategy", "deepspeed"),
        *("--strategy.offload_optimizer", "false"),
    ),
}


@pytest.fixture(scope="module")
def machine(
    server_with_cards: Preloaded, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> OnCard:
    directory = tmp_path_factory.mktemp("cards")
    file = directory / "pairs.json"
    file.write_text(json.dumps(make_pairs(30)))
    changes = {"data__mask_prompt": "null"}
    return on_card(server_with_cards, directory, tiny_base, file, changes)


@pytest.mark.parametrize(
    ("command", "layout"),
    [
        ("finetune", "one card"),
        ("finetune_full", "one card"),
        pytest.param("finetune", "fsdp", marks=pytest.mark.matrix),
        pytest.param("finetune_full", "fsdp", marks=pytest.mark.matrix),
        pytest.param("finetune", "zero 3", marks=[pytest.mark.matrix, needs_deepspeed]),
        pytest.param("finetune_full", "zero 3", marks=[pytest.mark.matrix, needs_deepspeed]),
    ],
)
def test_pairs_are_learned_on_cards_as_on_a_cpu(command: str, layout: str, machine: OnCard) -> None:
    words = (*DPO, *LAYOUTS[layout])
    ranks = 1 if layout == "one card" else 2
    found = machine.completed(command, *words, ranks=ranks)
    expected = machine.on_cpu(command, *words)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.validation_losses == pytest.approx(expected.validation_losses, rel=1e-5)
    assert expected.losses[-1] < expected.losses[0] - 0.01


def test_recorded_steps_learn_pairs_as_computed_ones(machine: OnCard) -> None:
    words = (*DPO, "--devices", "1", "--train.max_steps", "8")
    expected = machine.completed("finetune", *words)
    found = machine.completed("finetune", *words, "--train.record_steps", "true")
    recorded = read_report(found.out_dir).recorded_steps
    assert recorded is not None and recorded.replayed > 0
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
