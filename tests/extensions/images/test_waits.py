"""The host waits for a card no more often with images than without."""

from pathlib import Path

import pytest
from on_card import RECIPE, OnCard
from preloaded import Preloaded
from runs import options
from seeing_models import FIRST, KINDS
from simulated_card.build import needs_card
from simulated_card.counts import WAITS

pytestmark = [needs_card, pytest.mark.slow]

STEP = 4
"""Step that counts, of six: nothing is saved or measured in it."""
WAITS_IN_A_STEP = {
    "to_host pageable training/step.py:_totals": 1,
    "synchronize device training/step.py:_record": 1,
    "item item strategies/strategy.py:gradient_norm": 1,
}


OWN = (*FIRST, "gemma4")
"""Outside the matrix: families that differ most in how their images are encoded."""
UNSEEN = ("qwen3_vl_moe", "qwen3_5")
"""Experts wait without images too, and the card has no kernel for Qwen3.5's convolutions."""


@pytest.fixture(scope="module")
def machine(
    server_with_cards: Preloaded, seen: Path, tmp_path_factory: pytest.TempPathFactory
) -> OnCard:
    changes = {
        "data__path": seen / "chats.jsonl",
        "data__val_split_fraction": 0,
        "data__chat_template": "tokenizer",
        "train__global_batch_size": 8,
        "train__micro_batch_size": 3,
        "train__max_seq_length": 512,
        "train__max_steps": 6,
    }
    recipe = {k: v for k, v in RECIPE.items() if k != "data__mask_prompt"} | changes
    return OnCard(server_with_cards, tmp_path_factory.mktemp("cards"), options(**recipe))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.matrix] * (kind not in OWN))
        for kind in KINDS
        if kind not in UNSEEN
    ],
)
def test_no_micro_step_with_images_waits_for_the_card(
    machine: OnCard, seen: Path, kind: str
) -> None:
    words = ("--devices", "1", "--checkpoint_dir", str(seen / kind))
    found = machine.completed("finetune_full", *words)
    counts = machine.counts(found.out_dir)
    assert counts.of_step(STEP, *WAITS) == WAITS_IN_A_STEP
    sent = counts.of_step(STEP, "to_device")
    # Whatever comes from pageable memory is a single number.
    assert sum(count for what, count in sent.items() if "pageable" in what) <= 3
