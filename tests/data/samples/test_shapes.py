"""Shapes that repeat: their lengths, and micro-batches that all have one of a few."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from orders import alpaca_like

from ftkit.data.rendering import Rendered
from ftkit.data.samples.layout import IntArray, RankLayout
from ftkit.data.samples.loader import inference_loader, train_batches, validation_loader
from ftkit.data.samples.sample_set import Joined, Sample, Samples, SampleSet, ScoredSamples
from ftkit.data.samples.sampler import ElasticOrder, EpochOrder, Position
from ftkit.data.samples.shapes import MOST_LENGTHS, FixedShapes, choose_lengths
from ftkit.recipe.devices import Devices
from ftkit.recipe.plan import make_plan
from ftkit.recipe.recipe import Recipe, Train

# --- Lengths --------------------------------------------------------------------------------------


def padded(tokens: IntArray, lengths: list[int]) -> int:
    """Positions of rows, each padded to the next length."""
    return int(np.array(lengths)[np.searchsorted(lengths, tokens)].sum())


@pytest.mark.parametrize("seed", range(60))
def test_no_other_lengths_pad_less(seed: int) -> None:
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, 15, generator.integers(1, 12))
    most = int(generator.integers(1, 5))
    known = np.unique(tokens).tolist()
    found = choose_lengths([tokens], most)
    assert found == sorted({*found}) and len(found) <= most and found[-1] == known[-1]
    fewest = min(
        padded(tokens, [*some, known[-1]])
        for count in range(min(most, len(known)))
        for some in combinations(known[:-1], count)
    )
    assert padded(tokens, found) == fewest


def test_lengths_of_several_sets_are_chosen_together() -> None:
    sets = [np.array([4, 4, 9]), np.empty(0, dtype=np.int64), np.array([30])]
    assert choose_lengths(sets) == [4, 9, 30]
    assert choose_lengths(sets, most=2) == [9, 30]


def test_rows_of_very_many_lengths_are_padded_hardly_more() -> None:
    tokens = np.arange(1, 50_001)
    found = choose_lengths([tokens])
    assert len(found) == MOST_LENGTHS and found[-1] == 50_000
    even = [50_000 * (i + 1) // MOST_LENGTHS for i in range(MOST_LENGTHS)]
    assert padded(tokens, found) < 1.001 * padded(tokens, even)


@pytest.mark.parametrize(
    ("global_", "micro", "tokens", "rows"),
    [(8, 4, None, 4), (8, 3, None, 3), (9, 6, None, 5), (4, 3, None, 2), (2, 8, None, 2),
     (1, 1, None, 1), (16, 4, 900, 4)],
)  # fmt: skip
def test_micro_batches_have_as_many_rows_as_leave_the_fewest_fillers(
    global_: int, micro: int, tokens: int | None, rows: int
) -> None:
    train = Train(global_batch_size=global_, micro_batch_size=micro, global_batch_tokens=tokens)
    recipe = Recipe(checkpoint_dir="base", train=train)
    assert make_plan(recipe, Devices(accelerator="cpu", count=1)).rows == rows


# --- Micro-batches --------------------------------------------------------------------------------

COUNT, HELD_OUT = 61, 17


def rendered(length: int, index: int, **more: Any) -> Rendered:
    first = 1 + index * 7 % (length - 1)
    return Rendered([index + 1] * length, ((first, length),), **more)


def one_each(weight: float = 1.0) -> SampleSet:
    lengths = 2 + alpaca_like(COUNT + HELD_OUT)
    return SampleSet.of(
        rendered(int(length), i, weights=(weight,) if i % 3 == 0 else None)
        for i, length in enumerate(lengths)
    )


def with_labels() -> SampleSet:
    lengths = 2 + alpaca_like(COUNT + HELD_OUT)
    return SampleSet.of(rendered(int(n), i, target=(i % 2 == 0,)) for i, n in enumerate(lengths))


def pairs() -> SampleSet:
    lengths = 2 + alpaca_like(2 * (COUNT + HELD_OUT))
    of_each = (rendered(int(length), i // 2) for i, length in enumerate(lengths))
    return SampleSet.of(of_each, per_sample=2)


KINDS = {
    "answers": one_each,
    "weighted": lambda: one_each(0.5),
    "labels": with_labels,
    "pairs": pairs,
    "scored": lambda: ScoredSamples(pairs()),
}


def joined(one: Sample, before: Sample, most: int) -> Sample:
    """The beginning of a sample, and of the one before it the tokens that carry loss."""
    begins = int(one.trained[0, 0])
    ids = np.concatenate([one.ids[:begins], before.ids[int(before.trained[0, 0]) :]])[:most]
    return Sample(ids, np.array([[begins, len(ids)]], dtype=np.int32))


JOINED = {"labels": joined}


def shapes_of(samples: Samples, rows: int, *, pads_labels: bool = True) -> FixedShapes:
    return FixedShapes(
        rows=rows,
        per_sample=samples.per_sample,
        lengths=tuple(choose_lengths([samples.longest])),
        most_labels=int(samples.label_counts_by_sequence.max()),
        pads_labels=pads_labels,
    )


def order_of(samples: Samples, layout: RankLayout, size: int) -> ElasticOrder:
    return ElasticOrder(
        samples.widths(padding_free=False),
        {"label_tokens": samples.label_counts},
        epochs=EpochOrder([COUNT], [COUNT], 7),
        global_batch_size=size,
        total_samples=2 * COUNT,
        layout=layout,
        start=Position(),
    )


def signature(batch: dict[str, Any]) -> tuple[Any, ...]:
    """Name, shape and dtype of each tensor."""
    found: list[Any] = []
    for name, value in sorted(batch.items()):
        if isinstance(value, dict):
            found.append((name, signature(value)))
        elif isinstance(value, torch.Tensor):
            found.append((name, tuple(value.shape), value.dtype))
    return tuple(found)


def all_batches(
    samples: Samples, layout: RankLayout, size: int, joined: Joined | None
) -> Iterator[dict[str, Any]]:
    """Micro-batches of two epochs, whose last step is short, of a validation and of inference."""
    order = order_of(samples, layout, size)
    yield from train_batches(samples, order, 0, order.total_steps, joined=joined)
    amounts = {"label_tokens": samples.label_counts}
    yield from validation_loader(samples, amounts, HELD_OUT, layout, joined=joined)
    if joined is None:
        yield from inference_loader(samples, np.arange(3, 20), layout)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "rows"), [(8, 4), (10, 3), (7, 1), (5, 5)])
def test_all_micro_batches_of_a_run_have_one_of_a_few_shapes(
    kind: str, size: int, rows: int
) -> None:
    samples = KINDS[kind]()
    layout = RankLayout(micro_batch_size=rows, shapes=shapes_of(samples, rows))
    batches = list(all_batches(samples, layout, size, JOINED.get(kind)))
    if kind in JOINED:  # they are computed by themselves
        batches += [one.pop("joined") | {"divisors": {}} for one in batches]
    for one in batches:
        del one["divisors"]
        if kind not in JOINED:  # nothing reads it; micro-batches of fillers alone have it
            one.pop("targets", None)
    assert len({signature(one) for one in batches}) <= MOST_LENGTHS * (1 + (kind in JOINED))
    assert len({one["input_ids"].shape for one in batches}) <= MOST_LENGTHS
    labels = {(one["input_ids"].shape, len(one["labels"])) for one in batches}
    assert len(labels) == len({one["input_ids"].shape for one in batches})


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_shapes_hold_what_others_hold(kind: str) -> None:
    """The same samples and labels in each step, and nothing that counts beside them."""
    samples, found = KINDS[kind](), []
    is_weighted = samples.label_weights is not None
    for shapes in (None, shapes_of(samples, 3)):
        layout = RankLayout(micro_batch_size=3, shapes=shapes)
        steps: list[list[Any]] = [[]]
        order = order_of(samples, layout, 10)
        for batch in train_batches(samples, order, 0, order.total_steps):
            flat, count = batch["input_ids"].flatten(), batch["label_tokens"]
            weights = batch.get("weights", torch.ones(len(batch["labels"])))
            sequences, numbers = batch["label_sequences"], [*batch["numbers"], None]
            steps[-1] += zip(
                (numbers[i] for i in sequences.tolist()),
                (flat[batch["label_indices"]] * (sequences < len(batch["lengths"]))).tolist(),
                batch["labels"].tolist(),
                weights.tolist(),
                strict=True,
            )
            if shapes is not None:
                assert not weights[count:].any() and len(weights) > 0
                assert set(sequences[count:].tolist()) <= {len(batch["lengths"])}
            assert int(batch["is_real"].sum()) == batch["tokens"]
            assert batch["padded_tokens"] == flat.numel()
            if batch["is_last_of_step"]:
                steps.append([])
        found.append([sorted(x for x in step if x[0] is not None) for step in steps])
    assert found[0] == found[1]
    assert is_weighted == (kind == "weighted")


@pytest.mark.parametrize(("ranks", "rows"), [(1, 4), (2, 3), (3, 2), (4, 1)])
def test_ranks_together_run_each_step_once(ranks: int, rows: int) -> None:
    samples = one_each()
    orders = [
        order_of(
            samples,
            RankLayout(
                micro_batch_size=rows, shapes=shapes_of(samples, rows), rank=rank, world_size=ranks
            ),
            10,
        )
        for rank in range(ranks)
    ]
    for step in range(orders[0].total_steps):
        found = [order.micro_batches(step) for order in orders]
        assert len({len(one) for one in found}) == 1
        taken = [i for one in found for batch in one for i in batch if i >= 0]
        assert sorted(taken) == sorted(orders[0].samples(step).tolist())
        assert max(len(batch) for one in found for batch in one) <= rows


def test_without_padded_labels_only_the_labels_of_samples_are_there() -> None:
    samples = one_each()
    shapes = shapes_of(samples, 4, pads_labels=False)
    layout = RankLayout(micro_batch_size=4, shapes=shapes)
    for batch in all_batches(samples, layout, 8, None):
        assert len(batch["labels"]) == batch["label_tokens"]
        assert "weights" not in batch
        assert batch["input_ids"].shape[0] == 4


def test_the_samples_that_are_alone_are_the_shortest() -> None:
    """A micro-batch costs the same with fillers, so those lie beside the shortest samples."""
    samples = one_each()
    layout = RankLayout(micro_batch_size=4, shapes=shapes_of(samples, 4))
    order = order_of(samples, layout, 10)
    for step in range(order.total_steps - 1):
        batches = [[i for i in one if i >= 0] for one in order.micro_batches(step)]
        assert sorted(map(len, batches), reverse=True) == [4, 4, 2]
        alone = next(one for one in batches if len(one) == 2)
        rest = [i for one in batches if one is not alone for i in one]
        assert max(samples.longest[alone]) <= min(samples.longest[rest])
        lengths = choose_lengths([samples.longest])
        longest = max(samples.longest[i] for one in batches for i in one)
        wide = next(length for length in lengths if length >= longest)
        assert order.largest_micro_batch(step) == 4 * wide
