"""Shapes to which micro-batches are filled up before they are recorded."""

from typing import Any

import pytest
import torch
from orders import alpaca_like, make_elastic_order

from ftkit.data.rendering import Rendered
from ftkit.data.samples.layout import FILLER
from ftkit.data.samples.loader import collate
from ftkit.data.samples.sample_set import SampleSet
from ftkit.training.recorded_steps import Shape, filled, shapes_ahead

LONGEST = 3
SAMPLES = SampleSet.of(
    [Rendered([1, 2, 3, 4], ((2, 4),)), Rendered([5, 6, 7], ((1, 3),)), Rendered([8, 9], ((1, 2),))]
)


def batch_of(*numbers: int, in_row: bool) -> dict[str, Any]:
    sequences = [SAMPLES[number] for number in numbers]
    return collate(sequences, {"label_tokens": 5.0}, padding_free=in_row, numbers=numbers)


def learned(batch: dict[str, Any]) -> list[tuple[int, int, float, int]]:
    """Input, label, weight and sequence of everything that carries loss."""
    weights = batch.get("weights", torch.ones(len(batch["labels"])))
    inputs = batch["input_ids"].flatten()[batch["label_indices"]]
    columns = (inputs, batch["labels"], weights, batch["label_sequences"])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [row for row in rows if row[2]]


@pytest.mark.parametrize(
    ("in_row", "shape"),
    [
        (True, Shape(lines=1, width=13, sequences=8, labels=9)),
        (True, Shape(lines=1, width=6, sequences=3, labels=5)),  # nothing is missing
        (False, Shape(lines=4, width=5, sequences=4, labels=9)),
        (False, Shape(lines=3, width=3, sequences=3, labels=5)),
    ],
)
def test_what_is_learned_stays_the_same_in_a_shape(in_row: bool, shape: Shape) -> None:
    before = batch_of(0, 1, 2, in_row=in_row)
    found = filled(before, shape, LONGEST)
    assert found is not None
    assert learned(found) == learned(before)
    assert found["tokens"] == before["tokens"] == int(found["is_real"].sum()) == 6
    assert found["input_ids"].shape == found["is_real"].shape == (shape.lines, shape.width)
    assert found["padded_tokens"] == shape.lines * shape.width
    of_labels = ("labels", "label_indices", "label_sequences", "weights")
    assert {len(found[name]) for name in of_labels} == {shape.labels}
    assert {len(found[name]) for name in ("lengths", "numbers", "is_real_sequence")} == {
        shape.sequences
    }
    assert found["numbers"] == (0, 1, 2, *(FILLER,) * (shape.sequences - 3))
    assert found["is_real_sequence"].sum() == 3
    assert found["lengths"][:3] == before["lengths"]
    if in_row:
        starts, places = found["starts"].tolist(), found["places"].tolist()
        assert sum(found["sequence_lengths"]) == starts[-1] == shape.width == len(places)
        assert len(starts) == shape.sequences + 1 and starts == sorted(starts)
        assert max(found["sequence_lengths"]) <= LONGEST, "the kernel is told this bound"
        assert places[:6] == [0, 1, 2, 0, 1, 0] and max(places) < LONGEST


@pytest.mark.parametrize("in_row", [True, False])
@pytest.mark.parametrize(
    "change", [{"width": 2}, {"labels": 4}, {"sequences": 2}, {"lines": 0}, {"width": 40}]
)
def test_what_does_not_fit_is_left_as_it_is(change: dict[str, int], in_row: bool) -> None:
    batch = batch_of(0, 1, 2, in_row=in_row)
    fits = Shape(lines=1 if in_row else 3, width=6, sequences=3, labels=5)
    assert filled(batch, fits, LONGEST) is not None
    # In a row, a tail of 34 positions is twelve more sequences.
    found = filled(batch, fits._replace(**change), LONGEST)
    assert (found is None) == (in_row or change != {"width": 40})


@pytest.mark.parametrize("in_row", [True, False])
def test_shapes_hold_the_micro_batches_to_come_with_few_fillers(in_row: bool) -> None:
    lengths = alpaca_like(600)
    samples = SampleSet.of([Rendered([1] * (n + 1), ((n // 2, n + 1),)) for n in lengths])
    order = make_elastic_order(
        lengths,
        samples.label_counts,
        seed=0,
        global_batch_size=16,
        micro_batch_size=8,
        micro_batch_tokens=1024 if in_row else None,
        total_samples=600,
    )
    shapes = shapes_ahead(order, samples, in_row=in_row)
    assert 1 < len(shapes) <= 8
    assert shapes == sorted(shapes, key=lambda shape: shape.width)
    longest, positions, fillers = int(samples.longest.max()), 0, 0
    for step in range(order.total_steps):
        for numbers in order.micro_batches(step):
            batch = collate([samples[n] for n in numbers], {}, padding_free=in_row, numbers=numbers)
            found = (filled(batch, shape, longest) for shape in shapes)
            made = next(one for one in found if one is not None)
            positions += made["padded_tokens"]
            fillers += made["padded_tokens"] - batch["padded_tokens"]
    assert fillers / positions < 0.15
    assert 0.9 <= shapes[-1].width / (1024 if in_row else longest) <= 1
