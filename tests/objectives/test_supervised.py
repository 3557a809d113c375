"""The supervised loss: by its formula, and the same however a step is split."""

import math
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ftkit.data.rendering import Rendered
from ftkit.data.samples.sample_set import SampleSet
from ftkit.models.loss import Head
from ftkit.objectives.objective import Objective
from ftkit.objectives.supervised import Dft, Eaft, Supervised

WIDTH, VOCABULARY, LABELS = 8, 40, 24
HIDDEN = torch.randn(1, LABELS, WIDTH, generator=torch.Generator().manual_seed(0)) * 2
TARGETS = torch.randint(VOCABULARY, (LABELS,), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.rand(LABELS, generator=torch.Generator().manual_seed(2)) * 3 + 0.1
HALVES = [range(5), range(5, LABELS)]


def make_head(smoothing: float = 0.0) -> Head:
    torch.manual_seed(0)
    head = Head(nn.Linear(WIDTH, VOCABULARY, bias=False), None)
    head.label_smoothing = smoothing
    return head


def loss_and_gradient(
    objective: Objective, head: Head, labels: range, divisor: float, weights: Tensor | None
) -> tuple[float, Tensor]:
    """Share of some labels in the loss of a step, and its gradient."""
    places = torch.tensor(list(labels))
    batch: dict[str, Any] = {"labels": TARGETS[places]}
    if weights is not None:
        batch["weights"] = weights[places]
    head.zero_grad()
    output = head(HIDDEN, places, batch["labels"], objective.output(batch))
    total = objective.sums(output, batch)[0]
    (total / divisor).backward()
    (weight,) = head.parameters()
    assert weight.grad is not None
    return float(total / divisor), weight.grad.clone()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_weighted_mean_whatever_the_split(smoothing: float) -> None:
    head, divisor = make_head(smoothing), float(WEIGHTS.sum())
    (weight,) = head.parameters()
    logits = HIDDEN[0] @ weight.t()
    losses = F.cross_entropy(logits, TARGETS, reduction="none", label_smoothing=smoothing)
    expected = (losses * WEIGHTS).sum() / divisor
    (gradient,) = torch.autograd.grad(expected, weight)
    for split in ([range(LABELS)], HALVES):
        shares = [loss_and_gradient(Supervised(), head, part, divisor, WEIGHTS) for part in split]
        assert sum(loss for loss, _ in shares) == pytest.approx(float(expected), rel=1e-6)
        torch.testing.assert_close(sum(grad for _, grad in shares), gradient)


def plain_loss(objective: str, logits: Tensor) -> Tensor:
    """Losses of all labels, by the definitions of the papers.

    Args:
        objective: its name.
        logits: [labels, vocabulary].
    """
    log_probabilities = logits.log_softmax(1)
    losses = -log_probabilities.gather(1, TARGETS[:, None]).squeeze(1)
    if objective == "z-loss":
        return losses + 0.1 * logits.exp().sum(1).log() ** 2
    if objective == "dft":
        return losses * (-losses).exp().detach()
    top = log_probabilities.detach().exp().sort(dim=1, descending=True).values[:, :20]
    top = top / top.sum(1, keepdim=True)
    entropy = -(top * top.log()).sum(1) / math.log(20)
    return losses * (entropy if objective == "eaft" else entropy**3)


ADAPTED: dict[str, Objective] = {
    "dft": Dft(),
    "eaft": Eaft(),
    "eaft, alpha 3": Eaft(alpha=3),
    "z-loss": Supervised(z_loss=0.1),
}


@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_adapted_losses_are_those_of_the_papers(name: str, weights: Tensor | None) -> None:
    head = make_head()
    divisor = LABELS if weights is None else float(WEIGHTS.sum())
    (weight,) = head.parameters()
    losses = plain_loss(name, HIDDEN[0] @ weight.t())
    expected = (losses if weights is None else losses * weights).sum() / divisor
    (gradient,) = torch.autograd.grad(expected, weight)
    for split in ([range(LABELS)], HALVES):
        shares = [loss_and_gradient(ADAPTED[name], head, part, divisor, weights) for part in split]
        assert sum(loss for loss, _ in shares) == pytest.approx(float(expected), rel=1e-5)
        torch.testing.assert_close(sum(grad for _, grad in shares), gradient)


def test_without_its_exponent_eaft_is_cross_entropy() -> None:
    head, every = make_head(), range(LABELS)
    found = loss_and_gradient(Eaft(alpha=0), head, every, LABELS, None)
    loss, gradient = loss_and_gradient(Supervised(), head, every, LABELS, None)
    assert found[0] == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(found[1], gradient)


@pytest.mark.parametrize("objective", ADAPTED.values())
def test_adapted_losses_are_validated_by_cross_entropy(objective: Objective) -> None:
    assert type(objective.validated) is Supervised
    assert not objective.validated.reported


def test_a_z_loss_is_reported_beside_the_cross_entropy_and_without_its_coefficient() -> None:
    head, objective, places = make_head(), Supervised(z_loss=0.1), torch.arange(LABELS)
    output = head(HIDDEN, places, TARGETS, objective.output({}))
    sums = torch.stack(list(objective.sums(output, {}))).tolist()
    found = dict(zip((term.name for term in objective.terms), sums, strict=True))
    assert found["cross_entropy"] == pytest.approx(float(head(HIDDEN, places, TARGETS)))
    assert found["loss"] == pytest.approx(found["cross_entropy"] + 0.1 * found["z_loss"])
    assert objective.loss_of(found) == found["loss"]
    assert not Supervised().reported


@pytest.mark.parametrize("weight", [0.5, 3.0])
def test_equal_weights_everywhere_change_nothing(weight: float) -> None:
    head, every = make_head(), range(LABELS)
    loss, gradient = loss_and_gradient(Supervised(), head, every, LABELS, None)
    equal = torch.full((LABELS,), weight)
    found = loss_and_gradient(Supervised(), head, every, float(equal.sum()), equal)
    assert found[0] == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(found[1], gradient)


def test_the_divisor_is_the_sum_of_the_weights() -> None:
    plain = [Rendered([1, 2, 3, 4], ((0, 2), (2, 4))), Rendered([5, 6, 7], ((1, 3),))]
    weighted = [plain[0]._replace(weights=(0.5, 2.0)), plain[1]]
    for samples, expected in ((plain, [3, 2]), (weighted, [4.5, 2])):
        (amounts,) = Supervised().amounts(SampleSet.of(samples)).values()
        assert amounts.tolist() == expected
