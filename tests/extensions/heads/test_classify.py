"""The losses and metrics of labelled texts: by their definitions, however a step is split."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ftkit.data.rendering import Rendered
from ftkit.data.samples.loader import collate
from ftkit.data.samples.sample_set import SampleSet
from ftkit.extensions.heads.classify import Classify, f1_macro, pearson
from ftkit.recipe.objectives import ProblemType

CLASSES = ["cat", "dog", "sun"]
SCORES = [[0.5, -1.0, 2.0], [1.5, 0.2, -0.3], [0.1, 0.4, 0.2], [-2.0, 0.3, 0.9]]
TARGETS: dict[ProblemType, list[list[float]]] = {
    "single_label_classification": [[2], [1], [1], [0]],
    "multi_label_classification": [[1, 0, 1], [1, 1, 0], [0, 0, 0], [0, 1, 1]],
    "regression": [[0.25], [1.0], [-0.5], [-1.5]],
}
Made = tuple[Tensor, dict[str, Any]]


def objective(problem: ProblemType) -> Classify:
    return Classify(problem_type=problem, classes=None if problem == "regression" else CLASSES)


def made(problem: ProblemType, texts: range, *, filler: bool = False) -> Made:
    """Scores of some texts, and what a micro-batch says of them."""
    rows = [SCORES[text] for text in texts]
    scores = torch.tensor([row[0] for row in rows] if problem == "regression" else rows)
    targets = [TARGETS[problem][text] for text in texts]
    real = [True] * len(rows) + [False] * filler
    return scores.requires_grad_(), {
        "lengths": (3,) * len(real),
        "label_sequences": torch.arange(len(rows)),
        "is_real_sequence": torch.tensor(real),
        "targets": torch.tensor(
            targets + [[0.0] * len(TARGETS[problem][0])] * filler, dtype=torch.float32
        ),
    }


def values(problem: ProblemType, texts: range) -> dict[str, float]:
    one, (scores, batch) = objective(problem), made(problem, texts)
    sums = zip(one.terms, one.sums(scores, batch), strict=True)
    found = {term.name: value.item() for term, value in sums}
    return found | dict(one.measured(one.tallies(scores, batch)))


def test_the_loss_of_a_class_is_its_cross_entropy() -> None:
    found = values("single_label_classification", range(4))
    expected = [
        math.log(sum(map(math.exp, row))) - row[int(place)]
        for row, (place,) in zip(SCORES, TARGETS["single_label_classification"], strict=True)
    ]
    assert found["loss"] == pytest.approx(sum(expected), rel=1e-6)
    assert found["accuracy"] == 2  # the first and the third
    # cat: found once, labelled once, never right; dog: 1 right of 1 found and 2 labelled; sun: 1
    # right of 2 found and 1 labelled.
    assert found["f1_macro"] == pytest.approx((0 + 2 / 3 + 2 / 3) / 3)


def test_the_loss_of_several_classes_is_the_mean_of_their_binary_cross_entropies() -> None:
    problem: ProblemType = "multi_label_classification"
    found = values(problem, range(4))
    expected = [
        sum(math.log(1 + math.exp(-x if y else x)) for x, y in zip(*both, strict=True)) / 3
        for both in zip(SCORES, TARGETS[problem], strict=True)
    ]
    assert found["loss"] == pytest.approx(sum(expected), rel=1e-6)
    assert found["accuracy"] == 3  # all but the third, in which every class is found
    assert found["f1_macro"] == pytest.approx((4 / 5 + 4 / 5 + 4 / 5) / 3)


def test_the_loss_of_a_number_is_the_squared_difference() -> None:
    found = values("regression", range(4))
    x, y = [row[0] for row in SCORES], [row[0] for row in TARGETS["regression"]]
    assert found["loss"] == pytest.approx(sum((a - b) ** 2 for a, b in zip(x, y, strict=True)))
    assert "accuracy" not in found
    assert found["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1], rel=1e-6)


@pytest.mark.parametrize("problem", TARGETS)
def test_sums_and_gradients_do_not_depend_on_micro_batches(problem: ProblemType) -> None:
    one = objective(problem)
    whole = made(problem, range(4))
    parts = [made(problem, range(1), filler=True), made(problem, range(1, 4))]
    for of_whole, *of_parts in zip(*(one.sums(*batch) for batch in (whole, *parts)), strict=True):
        torch.testing.assert_close(of_whole, torch.stack(of_parts).sum())
    tallies = [one.tallies(*batch) for batch in (whole, *parts)]
    torch.testing.assert_close(tallies[0], tallies[1] + tallies[2])
    for batch in (whole, *parts):
        one.sums(*batch)[0].backward()
    gradients = [batch[0].grad for batch in (whole, *parts)]
    torch.testing.assert_close(gradients[0], torch.cat([g for g in gradients[1:] if g is not None]))


def test_classes_that_nobody_means_do_not_count() -> None:
    right, found, labelled = torch.tensor([[3.0, 0.0, 0.0], [4.0, 0.0, 1.0], [3.0, 0.0, 0.0]])
    assert f1_macro(right, found, labelled) == pytest.approx((6 / 7 + 0) / 2)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([2.0, 2.0, 2.0], [1.0, 2.0, 3.0]),
        ([1.0, 2.0], [7.1, 7.1]),
        ([1e9, 1e9], [0.1, 0.2]),
        ([], []),
    ],
)
def test_constant_numbers_have_no_correlation(x: list[float], y: list[float]) -> None:
    a, b = np.array(x), np.array(y)
    sums = [len(x), a.sum(), b.sum(), (a * a).sum(), (b * b).sum(), (a * b).sum()]
    assert pearson(torch.tensor(sums, dtype=torch.float64)) is None


def test_the_correlation_of_large_numbers_is_exact() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(1000, 1, 500)
    y = x + rng.normal(0, 1, 500)
    sums = [len(x), x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()]
    found = pearson(torch.tensor(sums, dtype=torch.float64))
    assert found == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)


def test_a_text_of_one_token_is_a_sample() -> None:
    known = SampleSet.of(
        [Rendered([7], ((0, 1),), target=(1,)), Rendered([5, 6], ((0, 2),), target=(0,))]
    )
    samples = objective("single_label_classification").view(known)
    assert samples.lengths.tolist() == [1, 2] and samples.label_counts.tolist() == [1, 1]
    sequences = [samples[0], samples[1], None]
    batch = collate(sequences, {}, target_size=1, padding_free=True)
    assert batch["targets"].tolist() == [[1], [0], [0]]
    assert batch["input_ids"].flatten()[batch["label_indices"]].tolist() == [7, 6]
