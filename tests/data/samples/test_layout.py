import hashlib
import time
from itertools import product

import numpy as np
import pytest
from orders import alpaca_like, make_elastic_order

from ftkit.data.samples.layout import FILLER, IntArray, RankLayout, lay_out, validation_batches
from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import make_plan

Rows = list[list[list[int]]]
"""For each micro-step, for each rank, its samples."""


def lay(lengths: IntArray, *, full: int | None = None, **settings: float) -> Rows:
    layout = RankLayout(**{"micro_batch_size": len(lengths), **settings})
    found = lay_out(lengths, layout, samples_of_full_step=full or len(lengths))
    return [[samples.tolist() for samples in ranks] for ranks in found]


def rows(lengths: IntArray, **settings: float) -> Rows:
    return lay(lengths, padding_free=True, **settings)


def cost(lengths: IntArray, samples: list[int], attention_cost: float) -> float:
    chosen = lengths[samples]
    return float((chosen * (1 + attention_cost * chosen)).sum())


# --- Padded micro-batches -----------------------------------------------------------------------


def test_the_layout_of_padded_micro_batches_never_changes() -> None:
    """Pinned: what a run of an earlier version computed together is computed together."""
    digest = hashlib.sha256()
    for samples, world_size, size in product((1, 7, 12, 50, 130), (1, 2, 3, 8), (1, 2, 5, 64)):
        for full in (samples, samples + 5):
            lengths = alpaca_like(samples, seed=samples)
            found = lay(lengths, full=full, micro_batch_size=size, world_size=world_size)
            digest.update(repr(found).encode())
    assert digest.hexdigest() == "96ea028dcfb407b9a88768873792f8ece74ce00b1158e8e1a80f67e76681752f"


# --- Rows without padding -----------------------------------------------------------------------

LENGTHS = {
    "like Alpaca": alpaca_like(96),
    "one long": np.array([3000, *[40] * 30]),
    "two kinds": np.array([700] * 5 + [30] * 60),
    "all equal": np.full(33, 100),
    "just above a half": np.full(9, 513),
    "one": np.array([17]),
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("size", "tokens"), [(100, 1024), (4, 1024), (100, 600), (1, 1024)])
@pytest.mark.parametrize("attention_cost", [0.0, 0.01])
def test_every_sample_is_in_one_row_that_is_within_the_bounds(
    name: str, world_size: int, size: int, tokens: int, attention_cost: float
) -> None:
    lengths = LENGTHS[name]
    found = rows(
        lengths,
        micro_batch_size=size,
        micro_batch_tokens=tokens,
        world_size=world_size,
        attention_cost=attention_cost,
    )
    taken = [sample for ranks in found for row in ranks for sample in row]
    assert sorted(taken) == list(range(len(lengths)))
    assert {len(ranks) for ranks in found} == {world_size}
    for row in (row for ranks in found for row in ranks if row):
        assert len(row) <= size
        assert lengths[row].sum() <= tokens or len(row) == 1
    places = len(found) * world_size
    assert sum(not row for ranks in found for row in ranks) == max(0, places - len(lengths))
    assert all(any(ranks) for ranks in found)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1024, 2048, 8192])
def test_a_step_takes_hardly_more_micro_steps_than_its_tokens_fill(
    world_size: int, tokens: int
) -> None:
    for seed in range(20):
        lengths = alpaca_like(128, seed)
        found = rows(lengths, micro_batch_tokens=tokens, world_size=world_size)
        fewest = -(-int(lengths.sum()) // (tokens * world_size))
        assert len(found) in (fewest, fewest + 1)


def test_micro_steps_differ_from_step_to_step_as_their_tokens_do() -> None:
    few, many = np.full(16, 100), np.full(16, 400)
    assert [len(rows(some, micro_batch_tokens=1600)) for some in (few, many)] == [1, 4]


@pytest.mark.parametrize(("samples", "micro_steps"), [(16, 2), (12, 2), (8, 1), (3, 1)])
def test_without_a_number_of_tokens_sequences_alone_decide_how_many_micro_steps_there_are(
    samples: int, micro_steps: int
) -> None:
    found = rows(alpaca_like(samples), full=16, micro_batch_size=4, world_size=2)
    assert len(found) == micro_steps


@pytest.mark.parametrize(
    ("bounds", "of_ranks", "waiting"),
    [
        ({"micro_batch_tokens": 1024}, 1.01, 1.02),
        ({"micro_batch_tokens": 2048}, 1.01, 1.02),
        ({"micro_batch_size": 4}, 1.05, 1.07),
    ],
)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("attention_cost", [0.0, 0.002])
def test_ranks_carry_nearly_equal_cost_and_wait_little_in_any_micro_step(
    bounds: dict[str, int], of_ranks: float, waiting: float, world_size: int, attention_cost: float
) -> None:
    """The costliest row of every micro-step decides how long all ranks take for it."""
    for seed in range(20):
        lengths = alpaca_like(128, seed)
        found = rows(lengths, world_size=world_size, attention_cost=attention_cost, **bounds)
        each = np.array([[cost(lengths, row, attention_cost) for row in ranks] for ranks in found])
        assert each.sum(0).max() / each.sum(0).mean() < of_ranks
        assert each.max(1).sum() * world_size / each.sum() < waiting


def test_attention_counts_where_it_is_dear() -> None:
    """One of 1,000 tokens costs as much as many short ones of twice as many tokens."""
    lengths = np.array([1000, *[50] * 40])
    (ranks,) = rows(lengths, world_size=2, attention_cost=1 / 1000)
    tokens = sorted(int(lengths[row].sum()) for row in ranks)
    assert tokens == [1050, 1950]
    (ranks,) = rows(lengths, world_size=2)
    assert sorted(int(lengths[row].sum()) for row in ranks) == [1500, 1500]


@pytest.mark.parametrize("attention_cost", [0.0, 0.01])
def test_the_row_with_most_tokens_runs_in_the_first_micro_step(attention_cost: float) -> None:
    for seed in range(10):
        lengths = alpaca_like(128, seed)
        found = rows(lengths, micro_batch_tokens=1024, world_size=2, attention_cost=attention_cost)
        largest = [max(int(lengths[row].sum()) for row in ranks) for ranks in found]
        assert largest == sorted(largest, reverse=True)


def test_a_sequence_with_more_tokens_than_the_budget_runs_alone() -> None:
    lengths = np.array([50, 900, 50, 2000, 50])
    found = rows(lengths, micro_batch_tokens=800)
    assert found == [[[3]], [[1]], [[0, 2, 4]]]


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("padding_free", "longest", "samples", "tokens"),
    [(True, 200, 16, 1000), (False, 200, 5, None), (False, 300, 3, None), (False, 2000, 1, None)],
)
def test_a_padded_micro_batch_holds_as_many_samples_as_the_longest_would_fit_in(
    padding_free: bool, longest: int, samples: int, tokens: int | None
) -> None:
    keys = [("checkpoint_dir", "base"), ("train.micro_batch_tokens", "1000")]
    plan = make_plan(read_recipe([], keys, method="lora"), Devices(accelerator="cpu", count=1))
    found = RankLayout.of(plan, padding_free=padding_free, attention_cost=0, longest=longest)
    assert (found.micro_batch_size, found.micro_batch_tokens) == (samples, tokens)
    pairs = read_recipe([], [*keys, ("objective", "dpo")], method="lora")
    of_pairs = make_plan(pairs, Devices(accelerator="cpu", count=1)).padded_samples(200)
    assert of_pairs == 2


def test_the_same_step_is_laid_out_the_same_again() -> None:
    lengths = alpaca_like(300)
    settings = {"micro_batch_tokens": 700, "world_size": 3, "attention_cost": 0.001}
    assert rows(lengths, **settings) == rows(lengths, **settings)


def test_a_step_of_thousands_is_laid_out_in_milliseconds() -> None:
    lengths = alpaca_like(4096)
    began = time.process_time()
    for tokens in (512, 1024, 8192):
        rows(lengths, micro_batch_tokens=tokens, world_size=8, attention_cost=0.01)
    assert time.process_time() - began < 1.0


def test_ranks_together_run_a_step_whatever_its_budget() -> None:
    lengths = alpaca_like(50)
    settings = {"seed": 1, "global_batch_size": 12, "micro_batch_size": 12, "total_samples": 50}
    for tokens, world_size in product((300, 1000, 5000), (1, 2, 3)):
        orders = [
            make_elastic_order(
                lengths,
                lengths // 2,
                **settings,
                micro_batch_tokens=tokens,
                rank=rank,
                world_size=world_size,
            )
            for rank in range(world_size)
        ]
        for step in range(orders[0].total_steps):
            ranks = [order.micro_batches(step) for order in orders]
            assert len({len(batches) for batches in ranks}) == 1
            taken = [i for batches in ranks for batch in batches for i in batch if i != FILLER]
            assert sorted(taken) == sorted(orders[0].samples(step))
            sizes = [
                lengths[batch].sum() for batches in ranks for batch in batches if batch[0] >= 0
            ]
            assert orders[0].largest_micro_batch(step) == max(sizes)


# --- Validation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 7, 20, 50, 1000])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "bounds",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 3},
        {"micro_batch_size": 8},
        {"micro_batch_size": 8, "padding_free": True},
        {"micro_batch_size": 50, "padding_free": True, "micro_batch_tokens": 600},
    ],
)
def test_validation_takes_the_first_samples_on_every_layout(
    world_size: int, bounds: dict[str, int], limit: int
) -> None:
    lengths = alpaca_like(50)
    ranks = [
        validation_batches(lengths, limit, RankLayout(**bounds, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    samples = [i for batches in ranks for batch in batches if batch != [FILLER] for i in batch]
    assert sorted(samples) == list(range(min(limit, 50)))
    assert all(
        1 <= len(batch) <= bounds["micro_batch_size"] for batches in ranks for batch in batches
    )
    tokens = [lengths[batch].sum() for batches in ranks for batch in batches if batch != [FILLER]]
    assert "micro_batch_tokens" not in bounds or max(tokens) <= bounds["micro_batch_tokens"]


@pytest.mark.parametrize("padding_free", [False, True])
def test_validation_of_nothing_has_no_batches(padding_free: bool) -> None:
    layout = RankLayout(micro_batch_size=4, padding_free=padding_free)
    assert validation_batches(alpaca_like(50), 0, layout) == []


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("samples", [4, 5, 9, 13, 15, 16])
def test_samples_of_equal_length_leave_no_rank_without_one(
    samples: int, padding_free: bool
) -> None:
    batches = [
        validation_batches(
            np.full(samples, 100),
            samples,
            RankLayout(micro_batch_size=4, padding_free=padding_free, rank=rank, world_size=4),
        )
        for rank in range(4)
    ]
    assert [[FILLER]] not in batches
    assert max(len(batch) for [batch] in batches) == -(-samples // 4)


# --- Media --------------------------------------------------------------------------------------


def laid_with_work(lengths: list[int], work: list[int], **settings: float) -> Rows:
    layout = RankLayout(**{"micro_batch_size": len(lengths), **settings})
    found = lay_out(
        np.array(lengths), layout, samples_of_full_step=len(lengths), work=np.array(work)
    )
    return [[sorted(samples.tolist()) for samples in ranks] for ranks in found]


def test_encoding_media_takes_room_in_a_row() -> None:
    limits = {"padding_free": True, "micro_batch_tokens": 100}
    assert laid_with_work([40, 40, 20], [0, 0, 0], **limits) == [[[0, 1, 2]]]
    (first,), (second,) = laid_with_work([40, 40, 20], [0, 0, 70], **limits)
    assert sorted([first, second]) == [[0, 1], [2]]
    # As a sample that is longer than a row, so one whose media cost more runs alone.
    found = laid_with_work([40, 40, 20], [0, 0, 700], **limits)
    assert [2] in [samples for (samples,) in found]


def test_ranks_encode_media_at_the_same_time() -> None:
    lengths, work = [50] * 8, [400, 400, 0, 0, 0, 0, 0, 0]
    limits = {"padding_free": True, "micro_batch_size": 2, "world_size": 2}
    with_media = [
        [{0, 1} & {*samples} for samples in ranks]
        for ranks in laid_with_work(lengths, work, **limits)
    ]
    assert [{0}, {1}] in [sorted(ranks, key=sorted) for ranks in with_media]


@pytest.mark.parametrize("padding_free", [True, False])
def test_media_that_cost_nothing_change_nothing(padding_free: bool) -> None:
    lengths = alpaca_like(60)
    settings = {"padding_free": padding_free, "micro_batch_size": 4, "world_size": 2}
    expected = lay(lengths, **settings)
    found = laid_with_work(lengths.tolist(), [0] * 60, **settings)
    assert found == [[sorted(samples) for samples in ranks] for ranks in expected]
