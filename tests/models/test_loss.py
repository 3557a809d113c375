"""The output layer with its loss: the logits of a batch never exist at once."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ftkit.models import loss as loss_module
from ftkit.models import token_losses
from ftkit.models.loss import (
    Head,
    HeadOutput,
    Likelihoods,
    LogProbabilities,
    SummedLoss,
    rows_at_once,
)
from ftkit.planning.tracker import LiveTensors

WIDTH, VOCABULARY, ROWS = 16, 50, 23


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "FEWEST_ROWS", 4)
    monkeypatch.setattr(loss_module, "MOST_ROWS", 8)
    monkeypatch.setattr(token_losses, "LOGITS_IN_CACHE", 3 * VOCABULARY)


def make_head(softcap: float | None = None, *, bias: bool = False) -> Any:
    torch.manual_seed(0)
    return Head(nn.Linear(WIDTH, VOCABULARY, bias=bias), softcap)


def weight_of(head: Head) -> Tensor:
    assert isinstance(head.lm_head, nn.Linear)
    return head.lm_head.weight


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of two sequences, and some of their positions with labels."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, ROWS, WIDTH, generator=generator) * 3
    places = torch.randperm(2 * ROWS, generator=generator)[:ROWS]
    return hidden, places, torch.randint(VOCABULARY, (ROWS,), generator=generator)


def by_definition(head: Any, hidden: Tensor, places: Tensor, labels: Tensor) -> Tensor:
    logits = head.lm_head(hidden.flatten(0, 1)[places]).float()
    if head.softcap:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    smoothing = head.label_smoothing if head.training else 0.0
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradients_are_those_of_the_definition(
    softcap: float | None, bias: bool, on_cpu: bool, smoothing: float
) -> None:
    head = make_head(softcap, bias=bias)
    head.label_smoothing = smoothing
    hidden, places, labels = make_batch()
    found = []
    for compute in (partial(head, on_cpu=on_cpu), partial(by_definition, head)):
        head.zero_grad()
        leaf = hidden.clone().requires_grad_()
        loss = compute(leaf, places, labels)
        (loss * 0.125).backward()
        found.append([loss.detach(), leaf.grad, *(p.grad for p in head.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("output", [None, SummedLoss(), LogProbabilities(), Likelihoods()])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_logits_that_a_model_drops_count_nowhere(output: HeadOutput | None, on_cpu: bool) -> None:
    layer, count = nn.Linear(WIDTH, VOCABULARY), 40
    head, fewer = Head(layer, 5.0, count=count), Head(nn.Linear(WIDTH, count), 5.0)
    fewer.load_state_dict({name: p[:count] for name, p in head.state_dict().items()})
    hidden, places, labels = make_batch()
    wanted = None if output is None else labels % count
    found = [one(hidden, places, wanted, output, on_cpu=on_cpu) for one in (head, fewer)]
    assert torch.equal(*found)
    for one in found if not isinstance(output, Likelihoods) else ():
        one.sum().backward()
    for ours, theirs in zip(head.parameters(), fewer.parameters(), strict=True):
        if ours.grad is not None and theirs.grad is not None:
            assert torch.equal(ours.grad[:count], theirs.grad)
            assert not ours.grad[count:].any()


@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_loss_of_16_bit_weights_is_summed_in_32_bits(on_cpu: bool) -> None:
    head = make_head().bfloat16()
    hidden, places, labels = make_batch()
    many = labels.repeat(40)
    loss = head(hidden.bfloat16(), places.repeat(40), many, on_cpu=on_cpu).detach()
    assert loss.dtype == torch.float32
    expected = by_definition(head, hidden.bfloat16(), places.repeat(40), many)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert float(loss) != float(loss.bfloat16())


def test_a_frozen_layer_gives_gradients_to_its_input_alone() -> None:
    head = make_head().requires_grad_(False)
    hidden, places, labels = make_batch()
    leaf = hidden.clone().requires_grad_()
    head(leaf, places, labels).backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0
    assert head.lm_head.weight.grad is None


def test_in_mixed_precision_gradients_of_float32_weights_are_summed_in_float32() -> None:
    """Equal parts stop adding up in bfloat16 once their sum is 256 times one of them."""
    head = make_head()
    hidden, places, labels = make_batch()
    sums = []
    for times in (1, 1000):
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            head(hidden, places[:1].repeat(8 * times), labels[:1].repeat(8 * times)).backward()
        sums.append(weight_of(head).grad)
    few, many = sums
    assert few is not None
    torch.testing.assert_close(many, few * 1000, rtol=1e-4, atol=0)


def test_small_gradients_of_float16_are_left_to_the_loss_scale() -> None:
    """A probability below 6e-8 is zero in float16, unless it is scaled first."""
    head = make_head().half()
    with torch.no_grad():
        weight_of(head).zero_()[0] = 1
    hidden = torch.full((1, 1, WIDTH), 1.5, dtype=torch.float16, requires_grad=True)
    loss = head(hidden, torch.tensor([0]), torch.tensor([0])) * 2**12
    loss.backward()
    gradient = weight_of(head).grad
    assert gradient is not None and gradient[1:].gt(0).all()


@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_micro_batch_without_labels_gives_gradients_of_zero(on_cpu: bool) -> None:
    """Not none at all: strategies wait for each other's gradients."""
    head = make_head(bias=True)
    hidden, places, labels = make_batch()
    head(hidden.requires_grad_(), places[:0], labels[:0], on_cpu=on_cpu).backward()
    for parameter in (*head.parameters(), hidden):
        assert parameter.grad is not None and not parameter.grad.any()


def test_without_gradients_nothing_but_a_number_is_left() -> None:
    head = make_head()
    hidden, places, labels = make_batch()
    live = LiveTensors(torch.device("cpu"))
    live.assign([hidden, places, labels, *head.parameters()], "parameters")
    with torch.no_grad(), live:
        loss = head(hidden, places, labels)
    left = live.now()
    assert left.total_bytes - left.bytes["parameters"] == loss.nbytes


def test_on_a_cpu_few_probabilities_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "MOST_ROWS", 64)
    head = make_head().bfloat16().requires_grad_(False)
    hidden, places, labels = make_batch()
    leaf = hidden.bfloat16().requires_grad_()
    peaks = []
    for on_cpu in (False, True):
        live = LiveTensors(torch.device("cpu"))
        with live:
            head(leaf, places.repeat(4), labels.repeat(4), on_cpu=on_cpu)
        peaks.append(live.peak().total_bytes)
    assert peaks[0] - peaks[1] > 0.8 * (64 - 3) * VOCABULARY * 4, "of 64 rows, 3 at once"


@pytest.mark.parametrize("trained", [True, False])
def test_the_memory_of_logits_does_not_grow_with_the_batch(trained: bool) -> None:
    head = make_head().requires_grad_(trained)
    peaks = []
    for copies in (1, 8):
        hidden, places, labels = make_batch()
        places, labels = places.repeat(copies), labels.repeat(copies)
        leaf = hidden.requires_grad_()
        head.zero_grad()
        live = LiveTensors(torch.device("cpu"))
        live.assign([leaf, places, labels, *head.parameters()], "parameters")
        with live:
            head(leaf, places, labels).backward()
        rows_bytes = 2 * len(labels) * WIDTH * 4  # taken from the hidden states, and their gradient
        peaks.append(live.peak().total_bytes - live.now().bytes["parameters"] - rows_bytes)
    logits_bytes = 8 * VOCABULARY * 4
    assert peaks[1] - peaks[0] < logits_bytes


def test_labels_are_smoothed_in_training_alone() -> None:
    head = make_head()
    plain = float(head(*make_batch()))
    head.label_smoothing = 0.2
    assert float(head(*make_batch())) != pytest.approx(plain, rel=1e-3)
    assert float(head.eval()(*make_batch())) == plain


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_adapted_layer_is_left_to_autograd_with_the_same_loss(smoothing: float) -> None:
    head = make_head()
    head.label_smoothing = smoothing
    plain = head.lm_head
    hidden, places, labels = make_batch()
    expected = head(hidden, places, labels)
    head.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.lm_head.weight = plain.weight
    loss = head(hidden, places, labels)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    loss.backward()
    assert plain.weight.grad is not None


def test_as_many_rows_at_once_as_pay_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = {
        vocabulary: rows_at_once(vocabulary) for vocabulary in (8_192, 32_000, 49_152, 128_256)
    }
    assert found == {8_192: 1024, 32_000: 1024, 49_152: 682, 128_256: 512}
    assert math.isclose(rows_at_once(128_256) * 128_256 * 4 / 2**20, 250.5)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_each_label_has_its_probability_and_whether_it_is_the_likeliest(
    softcap: float | None,
) -> None:
    head = make_head(softcap)
    hidden, places, labels = make_batch()
    logits = head(hidden, places, None)
    labels[::3] = logits.argmax(dim=1)[::3]
    found = head(hidden, places, labels, Likelihoods())
    expected = -F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(found[:, 0], expected)
    assert found[:, 1].tolist() == (logits.argmax(dim=1) == labels).float().tolist()
    assert 0 < found[:, 1].sum() < ROWS


def focal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = logits.log_softmax(1).gather(1, labels[:, None]).squeeze(1)
    return -((1 - chosen.exp()) ** 2) * chosen


def improbability(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    return 1 - log_probabilities.gather(1, labels).exp()


def wrapped(head: Any) -> Any:
    """A head whose output layer has a forward of its own, as under an adapter."""
    head.lm_head = WrappedLayer(head.lm_head)
    return head


class WrappedLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out_features = layer, VOCABULARY

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.layer(rows)
        return result


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize(
    "case", ["weights", "smoothing", "z-loss", "own loss", "own weight", "log-probabilities"]
)
def test_other_outputs_and_their_gradients_are_those_of_the_definition(
    case: str, softcap: float | None, on_cpu: bool, adapted: bool
) -> None:
    hidden, places, labels = make_batch()
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(ROWS, generator=generator)
    smoothing = 0.1 if case in ("smoothing", "z-loss") else 0.0

    def expected(head: Any, hidden: Tensor) -> Tensor:
        rows = head.lm_head(hidden.flatten(0, 1)[places]).float()
        logits = rows if softcap is None else softcap * torch.tanh(rows / softcap)
        if case == "log-probabilities":
            return (logits.log_softmax(1).gather(1, labels[:, None])[:, 0] * weights).sum()
        if case == "own loss":
            return (focal_loss(logits, labels) * weights).sum()
        each = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        if case == "z-loss":
            squares = logits.logsumexp(1) ** 2
            sums = torch.stack([each + 0.1 * squares, each, squares])
            return (sums * weights).sum(1)
        if case == "own weight":
            each = each * (1 - (-each.detach()).exp())
        return (each * weights).sum()

    def computed(head: Any, hidden: Tensor) -> Tensor:
        if case == "log-probabilities":
            chosen = head(hidden, places, labels, LogProbabilities(), on_cpu=on_cpu)
            return (chosen * weights).sum()
        output = SummedLoss(
            weights,
            focal_loss if case == "own loss" else None,
            improbability if case == "own weight" else None,
            0.1 if case == "z-loss" else 0.0,
        )
        result: Tensor = head(hidden, places, labels, output, on_cpu=on_cpu)
        return result

    found = []
    for compute in (computed, expected):
        head = make_head(softcap, bias=True)
        head.label_smoothing = smoothing
        head = wrapped(head) if adapted else head
        leaf = hidden.clone().requires_grad_()
        loss = compute(head, leaf)
        (loss.reshape(-1)[0] * 0.125).backward()  # of several sums, the first is the loss
        found.append([loss.detach(), leaf.grad, *(p.grad for p in head.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "output",
    [
        SummedLoss(torch.empty(0)),
        SummedLoss(None, focal_loss),
        SummedLoss(None, None, improbability),
        LogProbabilities(),
    ],
)
def test_other_outputs_without_labels_give_gradients_of_zero(output: HeadOutput) -> None:
    head = make_head(bias=True)
    hidden, places, labels = make_batch()
    head(hidden.requires_grad_(), places[:0], labels[:0], output).sum().backward()
    for parameter in (*head.parameters(), hidden):
        assert parameter.grad is not None and not parameter.grad.any()
