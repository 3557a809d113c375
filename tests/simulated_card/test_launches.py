"""Launches and bytes of a step on a GPU: another operation in each layer fails a test."""

from collections.abc import Iterator

import pytest
from command import command_environment
from simulated_card.build import needs_card
from simulated_card.machine import Machine, cards, machine, with_cards

pytestmark = [needs_card, pytest.mark.slow]

MOST = {
    "full, TinyLlama 1.1B": (1369, 58, 94.3),
    "LoRA of all layers, Llama 2 7B": (4548, 140, 374.6),
    "QLoRA nf4 of all layers, Llama 2 7B": (4769, 147, 381.8),
    "experts, LoRA of attention, Qwen3 MoE": (3775, 152, 268.6),
    "windows, full, Gemma 3 text": (2552, 92, 263.2),
    "generation, TinyLlama 1.1B": (799, 36, 2.34),
}
"""Launches of a step and of a layer in it, and gigabytes that it reads and writes."""


@pytest.fixture(scope="module")
def h100() -> Iterator[Machine]:
    with machine(with_cards(command_environment(), cards("h100"))) as found:
        yield found


def work_of(name: str) -> list[tuple[int, float]]:
    from launches import CASES
    from launches import work_of as counted

    return [
        (work.launches, (work.product_bytes + work.other_bytes) / 1e9)
        for work in counted(CASES[name])
    ]


@pytest.mark.parametrize("name", MOST)
def test_a_step_launches_and_moves_no_more_than_before(name: str, h100: Machine) -> None:
    step, of_layer = h100.run(work_of, name)
    most_launches, most_in_layer, most_gigabytes = MOST[name]
    assert step[0] <= most_launches and of_layer[0] <= most_in_layer
    assert step[1] <= most_gigabytes * 1.01
    # A number that is far too high would notice nothing.
    assert step[0] > 0.95 * most_launches and step[1] > 0.95 * most_gigabytes
