"""Steps that are not all of one size: cut by tokens, or at the ends of epochs."""

import itertools
from typing import Any

import numpy as np
import pytest
from orders import alpaca_like

from ftkit.data.samples.cuts import cut_steps
from ftkit.data.samples.layout import IntArray, RankLayout
from ftkit.data.samples.sampler import ElasticOrder, EpochOrder, Position
from ftkit.recipe.recipe import Train

SAMPLES = 50
LENGTHS = alpaca_like(SAMPLES)
EPOCHS = EpochOrder([SAMPLES], [SAMPLES], seed=1)


def cuts(start_step: int = 0, start_samples: int = 0, **keys: Any) -> IntArray:
    """Positions between the steps of a run of two epochs."""
    train = Train(**({"epochs": 2} | keys))
    found = cut_steps(train, EPOCHS, LENGTHS, start_step=start_step, start_samples=start_samples)
    assert found is not None
    return found.positions


def tokens_of(first: int, last: int) -> int:
    """Tokens of some samples of the run, which lie in one epoch."""
    epoch, place = divmod(first, SAMPLES)
    return int(LENGTHS[EPOCHS.of(epoch)[place : place + last - first]].sum())


def order(positions: IntArray, start: Position, **layout: Any) -> ElasticOrder:
    return ElasticOrder(
        LENGTHS,
        {"labels": LENGTHS // 2},
        epochs=EPOCHS,
        global_batch_size=16,
        total_samples=int(positions[-1]),
        layout=RankLayout(**({"micro_batch_size": 4} | layout)),
        start=start,
        positions=positions,
    )


def test_steps_of_one_size_need_no_cuts() -> None:
    assert cut_steps(Train(), EPOCHS, LENGTHS, start_step=0, start_samples=0) is None


@pytest.mark.parametrize("tokens", [1, 300, 1_000, 10**6])
def test_a_step_takes_samples_up_to_its_tokens_and_one_at_least(tokens: int) -> None:
    positions = cuts(global_batch_tokens=tokens)
    assert (positions[0], positions[-1]) == (0, 2 * SAMPLES)
    for first, last in itertools.pairwise(positions.tolist()):
        assert last == first + 1 or tokens_of(first, last) <= tokens
        # One more sample would be too much, or is of the next epoch.
        assert last % SAMPLES == 0 or tokens_of(first, last + 1) > tokens


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        ({"global_batch_size": 16}, [16, 16, 16, 2] * 2),
        ({"global_batch_size": 25}, [25] * 4),
        ({"global_batch_size": 64}, [50, 50]),
        ({"global_batch_size": 16, "max_steps": 6}, [16, 16, 16, 2, 16, 16]),
        ({"global_batch_size": 16, "epochs": None, "max_steps": 9}, [16, 16, 16, 2] * 2 + [16]),
    ],
)
def test_the_last_step_of_an_epoch_takes_what_is_left(
    keys: dict[str, Any], sizes: list[int]
) -> None:
    assert np.diff(cuts(step_ends_with_epoch=True, **keys)).tolist() == sizes


@pytest.mark.parametrize("keys", [{"global_batch_tokens": 700}, {"step_ends_with_epoch": True}])
@pytest.mark.parametrize("step", [0, 1, 4, 6])
def test_a_run_that_continues_takes_the_same_steps(keys: dict[str, Any], step: int) -> None:
    whole = cuts(**keys)
    rest = cuts(start_step=step, start_samples=int(whole[step]), **keys)
    assert rest.tolist() == whole[step:].tolist()
    assert cuts(start_step=step, start_samples=int(whole[step]), max_steps=step, **keys).size == 1


@pytest.mark.parametrize(
    "layout",
    [
        {"micro_batch_size": 1},
        {"world_size": 2, "rank": 1},
        {"world_size": 3, "micro_batch_size": 50, "micro_batch_tokens": 200, "padding_free": True},
    ],
)
def test_no_layout_changes_the_samples_of_a_step(layout: dict[str, Any]) -> None:
    positions = cuts(global_batch_tokens=700)
    plain = order(positions, Position())
    other = order(positions, Position(), **layout)
    assert other.total_steps == plain.total_steps == len(positions) - 1
    for step in range(plain.total_steps):
        assert other.consumed(step) == positions[step]
        assert other.samples(step).tolist() == plain.samples(step).tolist()
        assert other.divisors(step) == plain.divisors(step)
        assert other.micro_batches(step)
