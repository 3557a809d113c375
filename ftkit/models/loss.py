"""The loss: the output layer with its cross-entropy, a few rows of logits at a time."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 2**25
"""Number of logits held at once (128 MiB in float32), within the two limits below."""
FEWEST_ROWS, MOST_ROWS = 512, 1024
"""Limits of the positions at once. With fewer, a GPU spends longer on reading the weight than on
multiplying; more are not faster, and slower on CPUs, whose caches they do not fit."""
LOGITS_IN_CACHE = 2**20
"""Number of logits that a CPU turns into probabilities at once: 4 MiB in float32, which fit its
caches. Larger pieces took 2 to 4 times as long: 600 rows of 32,000 took 31 instead of 13 ms in
float32, and 53 instead of 14 in bfloat16."""


def rows_at_once(vocabulary: int) -> int:
    """Positions whose logits exist at the same time."""
    return min(max(LOGITS_AT_ONCE // vocabulary, FEWEST_ROWS), MOST_ROWS)


def normalize_loss(total: Tensor, label_tokens: Tensor | int) -> Tensor:
    """Loss of a micro-batch as a share of its step, in nats per label token.

    Dividing by the label tokens of the whole step gives the same sum however the step is split.

    Args:
        total: summed loss of the micro-batch, in nats.
        label_tokens: of the whole step, over all ranks and micro-steps.
    """
    return total / label_tokens


def loss_and_grad(
    logits: Tensor, wanted: Tensor, softcap: float | None, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy in float32, and its gradient in the dtype of the logits.

    Args:
        logits: [n, vocabulary]; overwritten.
        wanted: [n, 1], the labels.
        softcap: bound of the logits; None: they have none.
        smoothing: share of each label that is spread evenly over the vocabulary.
    """
    capped = None
    if softcap:
        capped = torch.tanh(logits.float() / softcap)
        grad = torch.log_softmax(capped * softcap, 1)
    else:
        grad = torch.log_softmax(logits, 1, dtype=torch.float32)
    # `grad` holds log-probabilities until exp_() below turns it into the gradient, in place.
    loss = -grad.gather(1, wanted).sum()
    if smoothing:
        evenly = smoothing / grad.size(1)
        loss = (1 - smoothing) * loss - evenly * grad.sum()
        grad.exp_().sub_(evenly)
        grad.scatter_add_(1, wanted, torch.full_like(wanted, smoothing - 1, dtype=grad.dtype))
    else:
        grad.exp_().scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=grad.dtype))
    if capped is not None:
        # Derivative of softcap * tanh(x / softcap).
        grad.mul_(1 - capped.square_())
    return loss, grad if logits.dtype == grad.dtype else logits.copy_(grad)


def _in_cache(
    compute: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], logits: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `loss_and_grad` of so few rows at once that they fit the caches of a CPU.

    Args:
        compute: `loss_and_grad` with its softcap.
        logits: [n, vocabulary]; overwritten.
        wanted: [n, 1], the labels.
    """
    rows = max(1, LOGITS_IN_CACHE // logits.size(1))
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    for part, right in zip(logits.split(rows), wanted.split(rows), strict=True):
        loss, grad = compute(part, right)
        total += loss
        if grad is not part:
            part.copy_(grad)
    return total, logits


class OutputLayer(nn.Linear):
    """A linear layer that gives logits, or their loss with gradients from the same pass.

    The gradients of a summed loss are known with the logits, up to the one factor that comes in the
    backward pass. So nothing is kept of the logits, and no product is computed twice.
    """

    loss_and_grad: Callable[..., tuple[Tensor, Tensor]] = staticmethod(loss_and_grad)
    """Replaced by a fused kernel, or compiled, if the recipe says so."""

    def forward(
        self,
        rows: Tensor,
        labels: Tensor | None = None,
        softcap: float | None = None,
        *,
        smoothing: float = 0.0,
        on_cpu: bool = False,
    ) -> Tensor:
        """Logits, or the summed loss.

        Args:
            rows: [n, width].
            labels: [n]; None: return logits.
            softcap: bound of the logits; used only with labels.
            smoothing: see `loss_and_grad`.
            on_cpu: whether a CPU computes. False where a CPU predicts the memory of a GPU.

        Returns:
            [n, vocabulary] in the dtype of the computation, or a scalar in float32: the sum of the
            n cross-entropies in nats.
        """
        if labels is None:
            return super().forward(rows)
        compute = partial(self.loss_and_grad, softcap=softcap)
        if smoothing:
            compute = partial(compute, smoothing=smoothing)
        if on_cpu:
            compute = partial(_in_cache, compute)
        # Inside `forward` of an autograd function gradients are always off.
        trains = torch.is_grad_enabled()
        loss: Tensor = _LinearCrossEntropy.apply(
            rows, self.weight, self.bias, labels, compute, trains
        )
        return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of a linear layer's results; forward computes the gradients too."""

    # torch.nn.functional.linear_cross_entropy is as fast in float32, but rounds its sum in bfloat16
    # and is missing in torch 2.11.

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        compute: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        trains: bool,
    ) -> Tensor:
        needed = tuple(trains and needs for needs in ctx.needs_input_grad[:3])
        gradients = _Gradients(rows, weight, bias, needed)
        kind = rows.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            rows, weight = rows.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        step = rows_at_once(len(weight))
        # Cast once above: autocast would cast the weight again for every piece.
        with torch.autocast(kind, enabled=False):
            for start in range(0, max(len(rows), 1), step):  # no rows: gradients of zero
                part, wanted = rows[start : start + step], labels[start : start + step, None]
                loss, grad = compute(F.linear(part, weight, bias), wanted)
                total += loss
                gradients.add(start, part, grad, weight)
                del grad
        ctx.gradients = gradients
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.gradients.times(outer[0]), None, None, None


class _Gradients:
    """Gradients of rows, weight and bias, those that are needed."""

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]
    ) -> None:
        self._needed = needed
        self._rows = torch.empty_like(rows) if needed[0] else None
        self._weight: Tensor | None = None
        self._weight_dtype = weight.dtype
        self._bias = torch.zeros_like(bias) if bias is not None and needed[2] else None

    def add(self, start: int, part: Tensor, grad: Tensor, weight: Tensor) -> None:
        """Add the share of some rows.

        Args:
            start: index of the first of them.
            part: [n, width], the rows.
            grad: [n, vocabulary], the gradient of their logits.
            weight: [vocabulary, width], of the same dtype.
        """
        if self._rows is not None:
            self._rows[start : start + len(part)] = grad @ weight
        if self._bias is not None:
            self._bias += grad.sum(0)
        if not self._needed[1]:
            return
        if self._weight is None:
            # Not zeros and then a sum: one pass less over a tensor of the size of the head.
            self._weight = (grad.t() @ part).to(self._weight_dtype)
        elif self._weight_dtype == grad.dtype:
            self._weight.addmm_(grad.t(), part)
        else:  # in mixed precision the sum stays float32
            self._weight += grad.t() @ part

    def times(self, factor: Tensor) -> Iterator[Tensor | None]:
        """Yield the gradients of rows, weight and bias times a scalar, and forget them."""
        for name in ("_rows", "_weight", "_bias"):
            gradient: Tensor | None = getattr(self, name)
            # Each gradient is given away before the next one is scaled, so that nothing is held
            # twice.
            delattr(self, name)
            yield None if gradient is None else gradient.mul_(factor)


class Head(nn.Module):
    """The output layer and the loss in one, so that the logits of a batch never exist at once."""

    def __init__(self, layer: nn.Linear, softcap: float | None, scale: float = 1.0) -> None:
        """Make an output layer of the same shape as another.

        Args:
            layer: the other one.
            softcap: bound of the logits; None: they have none.
            scale: factor of the logits.
        """
        super().__init__()
        width, vocabulary = layer.in_features, layer.out_features
        self.lm_head: nn.Module = OutputLayer(
            width,
            vocabulary,
            bias=layer.bias is not None,
            device=layer.weight.device,
            dtype=layer.weight.dtype,
        )
        self.softcap, self.scale = softcap, scale
        self.label_smoothing = 0.0
        """Share of each label that is spread evenly over the vocabulary, in training."""

    def forward(
        self,
        hidden: Tensor,
        label_indices: Tensor,
        labels: Tensor | None,
        *,
        each: bool = False,
        on_cpu: bool = False,
    ) -> Tensor:
        """Logits at some positions, their summed loss, or the likelihood of each label.

        Args:
            hidden: [batch, sequence, width].
            label_indices: [n], indices into the flattened batch and sequence.
            labels: [n], the token that follows each position; None: return logits.
            each: return the likelihood of each label.
            on_cpu: see `OutputLayer.forward`.

        Returns:
            [n, vocabulary] logits in float32, or the sum of the n cross-entropies in nats, or
            [n, 2]: the log-probability of each label in nats, and 1 where no token is likelier.
        """
        # Only positions with a label: of masked prompts no logits are computed.
        rows = hidden.flatten(0, 1).index_select(0, label_indices)
        if self.scale != 1.0:
            rows = rows * self.scale
        if labels is None:
            return self._logits(rows)
        if each:
            return torch.cat([self._likelihoods(*piece) for piece in self._pieces(rows, labels)])
        # An adapter has a forward of its own, and float16 needs the loss scale before small
        # gradients are rounded: autograd computes those.
        if isinstance(self.lm_head, OutputLayer) and not _in_float16(rows):
            loss: Tensor = self.lm_head(
                rows, labels, self.softcap, smoothing=self._smoothing, on_cpu=on_cpu
            )
            return loss
        return self._loss_in_pieces(rows, labels)

    def _loss_in_pieces(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Summed loss by autograd, for output layers that an adapter has replaced."""
        pieces = self._pieces(rows, labels)
        if len(pieces) == 1:
            return self._loss(rows, labels)
        losses = [checkpoint(self._loss, *piece, use_reentrant=False) for piece in pieces]
        return torch.stack(losses).sum()

    def _pieces(self, rows: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Rows and labels, split so that the logits of each part may exist at once."""
        out_features = self.lm_head.out_features
        assert isinstance(out_features, int)
        at_once = rows_at_once(out_features)
        return list(zip(rows.split(at_once), labels.split(at_once), strict=True))

    def _logits(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(rows).float()
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits

    def _likelihoods(self, rows: Tensor, labels: Tensor) -> Tensor:
        logits = self._logits(rows)
        is_likeliest = logits.argmax(dim=1) == labels
        chosen = logits.log_softmax(dim=1).gather(1, labels[:, None]).squeeze(1)
        return torch.stack([chosen, is_likeliest.to(chosen.dtype)], dim=1)

    def _loss(self, rows: Tensor, labels: Tensor) -> Tensor:
        logits = self._logits(rows)
        return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=self._smoothing)

    @property
    def _smoothing(self) -> float:
        return self.label_smoothing if self.training else 0.0


def _in_float16(rows: Tensor) -> bool:
    """Return whether products are in float16, where small gradients need the loss scale."""
    kind = rows.device.type
    mixed = torch.is_autocast_enabled(kind)
    return (torch.get_autocast_dtype(kind) if mixed else rows.dtype) == torch.float16
