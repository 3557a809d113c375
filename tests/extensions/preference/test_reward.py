"""The loss of a reward model: by its formula, and the same however a step is split."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ftkit.data.rendering import Rendered
from ftkit.data.samples.loader import collate
from ftkit.data.samples.sample_set import SampleSet, ScoredSamples
from ftkit.extensions.preference.reward import Reward
from ftkit.models.loss import Head, Scores

SCORES = ((0.5, -1.0), (-0.2, 0.3), (1.5, 1.5))
"""Of the chosen and the rejected answer of three pairs."""


def pair_batch(pairs: range, *, filler: bool = False) -> tuple[Tensor, dict[str, Any]]:
    """Scores of some pairs, and what a micro-batch says of them."""
    scores = torch.tensor([score for pair in pairs for score in SCORES[pair]]).requires_grad_()
    real = [True] * len(scores) + [False, False] * filler
    return scores, {
        "lengths": (3,) * len(real),
        "label_sequences": torch.arange(len(scores)),
        "is_real_sequence": torch.tensor(real),
    }


def values(objective: Reward, batch: tuple[Tensor, dict[str, Any]]) -> dict[str, float]:
    names = (term.name for term in objective.terms)
    return {n: value.item() for n, value in zip(names, objective.sums(*batch), strict=True)}


def test_the_loss_of_a_pair_is_its_formula() -> None:
    found = values(Reward(), pair_batch(range(3)))
    expected = sum(math.log(1 + math.exp(rejected - chosen)) for chosen, rejected in SCORES)
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    assert found["accuracy"] == 1.5  # one is right, one wrong, and one a tie
    assert found["margin"] == pytest.approx(1.5 - 0.5)
    assert found["chosen_reward"] == pytest.approx(1.8)


def test_scores_can_be_kept_around_zero() -> None:
    plain, centred = Reward(), Reward(center_weight=0.01)
    found = values(centred, pair_batch(range(3)))
    expected = sum((chosen + rejected) ** 2 for chosen, rejected in SCORES)
    assert found["center_loss"] == pytest.approx(expected, rel=1e-6)
    assert found["preference_loss"] == values(plain, pair_batch(range(3)))["loss"]
    assert centred.loss_of(found) == pytest.approx(found["preference_loss"] + 0.01 * expected)


@pytest.mark.parametrize("objective", [Reward(), Reward(center_weight=0.5)])
def test_sums_and_gradients_do_not_depend_on_micro_batches(objective: Reward) -> None:
    whole = pair_batch(range(3))
    parts = [pair_batch(range(1), filler=True), pair_batch(range(1, 3))]
    sums = [objective.sums(*batch) for batch in (whole, *parts)]
    for of_whole, *of_parts in zip(*sums, strict=True):
        torch.testing.assert_close(of_whole, torch.stack(of_parts).sum())
    for one in sums:
        sum(one[: 1 + (len(one) > 5)]).backward()
    gradients = [batch[0].grad for batch in (whole, *parts)]
    torch.testing.assert_close(gradients[0], torch.cat([g for g in gradients[1:] if g is not None]))


@pytest.mark.parametrize("padding_free", [False, True])
def test_the_score_is_that_of_the_last_token_of_each_sequence(padding_free: bool) -> None:
    known = SampleSet(
        np.arange(10, dtype=np.int32),
        np.array([0, 4, 10]),
        np.array([[1, 4], [2, 6]], dtype=np.int32),
        np.array([0, 1, 2]),
        per_sample=2,
    )
    samples = Reward().view(known)
    assert samples.lengths_by_sequence.tolist() == [[4, 6]], "all tokens are given"
    assert samples.label_counts_by_sequence.tolist() == [[1, 1]]
    batch = collate(samples.sequences(0), {}, per_sample=2, padding_free=padding_free)
    assert batch["tokens"] == 10 and batch["samples"] == 1
    torch.manual_seed(0)
    head = Head(torch.nn.Linear(8, 1, bias=False), None)
    hidden = torch.randn(*batch["input_ids"].shape, 8)
    rows = hidden.flatten(0, 1)
    last = rows[[3, 9]] if padding_free else rows[[3, 6 + 5]]
    assert batch["input_ids"].flatten()[batch["label_indices"]].tolist() == [3, 9]
    found = head(hidden, batch["label_indices"], batch["labels"], Scores())
    (weight,) = head.parameters()
    torch.testing.assert_close(found, (last @ weight.T).squeeze(1))


def test_samples_of_several_sources_keep_them() -> None:
    known = SampleSet.of([Rendered([1, 2, 3], [(1, 3)])] * 4, per_sample=2)
    assert ScoredSamples(known).sources.tolist() == [0, 0]
    assert len(ScoredSamples(known)) == 2
