"""The head: what the output layer computes of labels, a few rows of logits at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ftkit.models.token_losses import (
    TokenLoss,
    TokenWeight,
    capped_logits,
    differentiated,
    in_cache,
    log_probabilities,
    loss_and_grad,
    rows_in_cache,
    weighted_loss_and_grad,
)
from ftkit.models.token_numbers import TokenNumbers

LOGITS_AT_ONCE = 2**25
"""Number of logits held at once (128 MiB in float32), within the two limits below."""
FEWEST_ROWS, MOST_ROWS = 512, 1024
"""Limits of the positions at once. With fewer, a GPU spends longer on reading the weight than on
multiplying; more are not faster, and slower on CPUs, whose caches they do not fit."""


def rows_at_once(vocabulary: int) -> int:
    """Positions whose logits exist at the same time."""
    return min(max(LOGITS_AT_ONCE // vocabulary, FEWEST_ROWS), MOST_ROWS)


class OutputLayer(nn.Linear):
    """A linear layer that gives logits, or what is computed of them a few rows at a time."""

    loss_and_grad: Callable[..., tuple[Tensor, Tensor]] = staticmethod(loss_and_grad)
    """Replaced by a fused kernel, or compiled, if the recipe says so."""

    def forward(
        self, rows: Tensor, compute: "Callable[[OutputLayer, Tensor], Tensor] | None" = None
    ) -> Tensor:
        """Logits, [n, vocabulary] in the dtype of the computation, or the result of `compute`.

        Args:
            rows: [n, width].
            compute: called with this layer and the rows. It runs inside the forward pass, where a
                sharded weight is whole.
        """
        return super().forward(rows) if compute is None else compute(self, rows)


class _SummedLoss(torch.autograd.Function):
    """Summed loss of a linear layer's results; forward computes the gradients too.

    The gradients of a summed loss are known with the logits, up to the one factor that comes in the
    backward pass. So nothing is kept of the logits, and no product is computed twice.
    """

    # torch.nn.functional.linear_cross_entropy is as fast in float32, but rounds its sum in bfloat16
    # and is missing in torch 2.11.

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        columns: Sequence[Tensor],
        compute: Callable[..., tuple[Tensor, Tensor]],
        trains: bool,
    ) -> Tensor:
        needed = tuple(trains and needs for needs in ctx.needs_input_grad[:3])
        gradients = _Gradients(rows, weight, bias, needed)
        kind = rows.device.type
        rows, weight, bias = _cast(autocast_dtype(kind), rows, weight, bias)
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        # Cast once above: autocast would cast the weight again for every piece.
        with torch.autocast(kind, enabled=False):
            for start, part, *others in _pieces(rows_at_once(len(weight)), rows, *columns):
                loss, grad = compute(F.linear(part, weight, bias), *others)
                total = total + loss
                gradients.add(start, part, grad, weight)
                del grad
        ctx.gradients = gradients
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        # Of several sums the first one is the loss.
        factor = outer[0] if not outer[0].dim() else outer[0][0]
        return *ctx.gradients.times(factor), None, None, None


class _LogProbabilities(torch.autograd.Function):
    """Log-probability of each label; backward computes the logits again, a few rows at a time."""

    # Their gradients are known only after the whole sequence: nothing can be done in the first pass
    # as it is for a sum.

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        softcap: float | None,
        on_cpu: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, bias, labels)
        ctx.softcap, ctx.on_cpu = softcap, on_cpu
        kind = rows.device.type
        ctx.dtype = autocast_dtype(kind)
        rows, weight, bias = _cast(ctx.dtype, rows, weight, bias)
        chosen = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        with torch.autocast(kind, enabled=False):
            for start, part, wanted in _pieces(rows_at_once(len(weight)), rows, labels):
                logits = F.linear(part, weight, bias)
                most = rows_in_cache(logits) if on_cpu else max(len(logits), 1)
                for first, few, right in _pieces(most, logits, wanted):
                    found = log_probabilities(few, softcap)
                    begin = start + first
                    chosen[begin : begin + len(few)] = found.gather(1, right[:, None]).squeeze(1)
        return chosen

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, labels = ctx.saved_tensors
        gradients = _Gradients(rows, weight, bias, ctx.needs_input_grad[:3])
        rows, weight, bias = _cast(ctx.dtype, rows, weight, bias)
        compute: Callable[..., tuple[Tensor, Tensor]]
        compute = partial(weighted_loss_and_grad, softcap=ctx.softcap)
        if ctx.on_cpu:
            compute = partial(in_cache, compute)
        # A log-probability is the negative of a loss.
        columns = labels[:, None], -outer[0][:, None]
        with torch.autocast(rows.device.type, enabled=False):
            for start, part, *others in _pieces(rows_at_once(len(weight)), rows, *columns):
                _, grad = compute(F.linear(part, weight, bias), *others)
                gradients.add(start, part, grad, weight)
                del grad
        return *gradients.take(), None, None, None


def _pieces(at_once: int, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield the first row of each piece, and the piece of each tensor; one piece of no rows."""
    for start in range(0, max(len(tensors[0]), 1), at_once):  # no rows: gradients of zero
        yield start, *(tensor[start : start + at_once] for tensor in tensors)


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Dtype in which a type of device computes under autocast; None: without autocast."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _cast(
    dtype: torch.dtype | None, rows: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if dtype is None:
        return rows, weight, bias
    return rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


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
        # Each gradient is given away before the next one is scaled, so that nothing is held twice.
        for gradient in self.take():
            yield None if gradient is None else gradient.mul_(factor)

    def take(self) -> Iterator[Tensor | None]:
        """Yield the gradients of rows, weight and bias, and forget them."""
        for name in ("_rows", "_weight", "_bias"):
            gradient: Tensor | None = getattr(self, name)
            delattr(self, name)
            yield gradient


class HeadOutput(ABC):
    """What a head computes of the rows of a micro-batch that have labels."""

    @abstractmethod
    def compute(self, head: "Head", rows: Tensor, labels: Tensor, *, on_cpu: bool) -> Tensor:
        """Compute it, a few rows of logits at a time.

        Args:
            head: its output layer and softcap.
            rows: [n, width], scaled hidden states.
            labels: [n], the token that follows each.
            on_cpu: whether a CPU computes. False where a CPU predicts the memory of a GPU.
        """


class SummedLoss(HeadOutput):
    """The sum of the tokens' losses: a scalar in nats, float32.

    With a z-loss, [3]: the sums of the loss, of cross-entropies, and of squared logarithms of Z.
    """

    # No dataclass: Fabric would look into it, and convert the weights to the dtype of the model.

    def __init__(
        self,
        weights: Tensor | None = None,
        token_loss: TokenLoss | None = None,
        token_weight: TokenWeight | None = None,
        z_loss: float = 0.0,
    ) -> None:
        """Choose the loss.

        Args:
            weights: [n] float32, factors of the tokens' losses; None: 1 each.
            token_loss: of each token; None: cross-entropy, with the head's label smoothing.
            token_weight: another factor of each cross-entropy, which needs no memory of its own.
            z_loss: coefficient of (log Z)^2 beside each cross-entropy, Z the sum of exp(logits).
        """
        assert sum((token_loss is not None, token_weight is not None, z_loss > 0)) <= 1
        self.weights, self.token_loss, self.token_weight = weights, token_loss, token_weight
        self.z_loss = z_loss

    def compute(self, head: "Head", rows: Tensor, labels: Tensor, *, on_cpu: bool) -> Tensor:
        columns = [labels] if self.weights is None else [labels, self.weights]
        if not head.fuses(rows):
            return head.in_pieces(self._by_autograd(head), rows, *columns).sum(0)
        compute = partial(self._loss_and_grad, head, on_cpu)
        return head.summed(compute, rows, *(one[:, None] for one in columns))

    def _loss_and_grad(
        self, head: "Head", on_cpu: bool, logits: Tensor, *columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        layer = head.lm_head
        assert isinstance(layer, OutputLayer)
        compute: Callable[..., tuple[Tensor, Tensor]]
        if self.token_loss is not None:
            compute = partial(differentiated, self.token_loss, head.softcap)
        elif self.weights is not None or self.token_weight is not None or self.z_loss:
            compute = partial(
                weighted_loss_and_grad,
                softcap=head.softcap,
                token_weight=self.token_weight,
                z_loss=self.z_loss,
            )
        else:
            compute = partial(layer.loss_and_grad, softcap=head.softcap)
        if self.token_loss is None and head.smoothing:
            compute = partial(compute, smoothing=head.smoothing)
        return in_cache(compute, logits, *columns) if on_cpu else compute(logits, *columns)

    def _by_autograd(self, head: "Head") -> Callable[..., Tensor]:
        smoothing = head.smoothing

        def summed(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
            is_plain = self.token_loss is None and self.token_weight is None and not self.z_loss
            if is_plain and weights is None:
                return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
            if self.token_loss is None:
                each = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
            else:
                each = self.token_loss(logits, labels)
            if self.token_weight is not None:
                factors = self.token_weight(log_probabilities(logits.detach()), labels[:, None])
                each = each * factors.squeeze(1)
            if self.z_loss:
                squares = logits.logsumexp(1) ** 2
                sums = torch.stack([each + self.z_loss * squares, each, squares], dim=1)
                return sums if weights is None else sums * weights[:, None]
            return (each if weights is None else each * weights).sum()

        return summed


class LogProbabilities(HeadOutput):
    """The log-probability of each label, [n] float32 in nats, with gradients."""

    def compute(self, head: "Head", rows: Tensor, labels: Tensor, *, on_cpu: bool) -> Tensor:
        if isinstance(head.lm_head, OutputLayer):

            def chosen(layer: OutputLayer, rows: Tensor) -> Tensor:
                weight, bias = head.of_logits(layer)
                result: Tensor = _LogProbabilities.apply(
                    rows, weight, bias, labels, head.softcap, on_cpu
                )
                return result

            result: Tensor = head.lm_head(rows, chosen)
            return result
        return head.in_pieces(_label_log_probabilities, rows, labels)


class Scores(HeadOutput):
    """[n, scores] float32: the scores at each position; [n] of a model with one score."""

    def compute(self, head: "Head", rows: Tensor, labels: Tensor, *, on_cpu: bool) -> Tensor:
        scores: Tensor = head.lm_head(rows)
        return scores.float().squeeze(1)


class Hidden(HeadOutput):
    """[n, width]: the hidden states at each position, behind the last norm."""

    def compute(self, head: "Head", rows: Tensor, labels: Tensor, *, on_cpu: bool) -> Tensor:
        return rows


class Likelihoods(HeadOutput):
    """[n, 2]: the log-probability of each label in nats, and 1 where no token is likelier."""

    # For evaluation: nothing is kept for a backward pass.
    def compute(self, head: "Head", rows: Tensor, labels: Tensor, *, on_cpu: bool) -> Tensor:
        def likelihoods(logits: Tensor, labels: Tensor) -> Tensor:
            is_likeliest = logits.argmax(dim=1) == labels
            chosen = _label_log_probabilities(logits, labels)
            return torch.stack([chosen, is_likeliest.to(chosen.dtype)], dim=1)

        return head.in_pieces(likelihoods, rows, labels)


def _label_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    return log_probabilities(logits).gather(1, labels[:, None]).squeeze(1)


class Head(nn.Module):
    """The output layer and the loss in one, so that the logits of a batch never exist at once."""

    def __init__(
        self,
        layer: nn.Linear,
        softcap: float | None,
        scale: float = 1.0,
        count: int | None = None,
    ) -> None:
        """Make an output layer of the same shape as another.

        Args:
            layer: the other one.
            softcap: bound of the logits; None: they have none.
            scale: factor of the logits.
            count: of the first logits, if the model drops the others; None: there are no others.
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
        self.softcap, self.scale, self.count = softcap, scale, count
        self.tokens = TokenNumbers()
        """Of the body below it, for the dropout of an adapter."""
        self.label_smoothing = 0.0
        """Share of each label that is spread evenly over the vocabulary, in training."""

    def forward(
        self,
        hidden: Tensor,
        label_indices: Tensor,
        labels: Tensor | None,
        output: HeadOutput | None = None,
        *,
        on_cpu: bool = False,
    ) -> Tensor:
        """Logits at some positions, or what is computed of them and their labels.

        Args:
            hidden: [batch, sequence, width].
            label_indices: [n], indices into the flattened batch and sequence.
            labels: [n], the token that follows each position; None: return logits.
            output: what is computed; None: the summed cross-entropy.
            on_cpu: see `HeadOutput.compute`.

        Returns:
            [n, vocabulary] logits in float32, or the output.
        """
        # Only positions with a label: of masked prompts no logits are computed.
        rows = hidden.flatten(0, 1).index_select(0, label_indices)
        if self.scale != 1.0:
            rows = rows * self.scale
        if labels is None:
            return self._logits(rows)
        # An adapter has taken the place of the layer, and may drop some of its input.
        is_adapted = not isinstance(self.lm_head, OutputLayer)
        with self.tokens.within(self.tokens.at(label_indices) if is_adapted else None):
            return (output or SummedLoss()).compute(self, rows, labels, on_cpu=on_cpu)

    def of_logits(self, layer: OutputLayer) -> tuple[Tensor, Tensor | None]:
        """Return the rows of weight and bias that give logits."""
        if self.count is None:
            return layer.weight, layer.bias
        return layer.weight[: self.count], None if layer.bias is None else layer.bias[: self.count]

    def fuses(self, rows: Tensor) -> bool:
        """Whether `summed` can compute a loss of these rows."""
        # An adapter has a forward of its own, and float16 needs the loss scale before small
        # gradients are rounded: autograd computes those.
        return isinstance(self.lm_head, OutputLayer) and not _in_float16(rows)

    def summed(
        self, compute: Callable[..., tuple[Tensor, Tensor]], rows: Tensor, *columns: Tensor
    ) -> Tensor:
        """Sum a loss over all rows, a few rows of logits at a time, and its gradients with it.

        Args:
            compute: called with logits, [n, vocabulary], and the columns of these rows; it returns
                a sum over the rows, or several, of which the first one is the loss, and the
                gradient of the logits, which it may write into them.
            rows: [n, width], of a head that `fuses` them.
            columns: [n, ...] each.

        Returns:
            The sums in float32, of which the first one has gradients.
        """
        # Inside `forward` of an autograd function gradients are always off.
        trains = torch.is_grad_enabled()

        def within(layer: OutputLayer, rows: Tensor) -> Tensor:
            weight, bias = self.of_logits(layer)
            sums: Tensor = _SummedLoss.apply(rows, weight, bias, columns, compute, trains)
            return sums

        result: Tensor = self.lm_head(rows, within)
        return result

    def in_pieces(self, function: Callable[..., Tensor], rows: Tensor, *columns: Tensor) -> Tensor:
        """Compute a function of the logits a few rows at a time, with gradients by autograd.

        Logits are computed again in the backward pass.

        Args:
            function: called with logits, [n, vocabulary] float32, and the columns of these rows; it
                returns a scalar, or a tensor of n rows.
            rows: [n, width].
            columns: [n, ...] each.

        Returns:
            The scalars, [pieces], or the rows of all results.
        """
        out_features = self.lm_head.out_features
        assert isinstance(out_features, int)

        def of_rows(numbers: Tensor | None, rows: Tensor, *columns: Tensor) -> Tensor:
            # Also when it is computed again.
            with self.tokens.within(numbers):
                return function(self._logits(rows), *columns)

        at_once = rows_at_once(out_features)
        hashes = self.tokens.hashes
        numbers = repeat(None) if hashes is None else hashes.split(at_once)
        split = zip(*(one.split(at_once) for one in (rows, *columns)), strict=True)
        pieces = [(some, *piece) for piece, some in zip(split, numbers, strict=False)]
        if len(pieces) == 1 or not torch.is_grad_enabled():
            results = [of_rows(*piece) for piece in pieces]
        else:
            results = [checkpoint(of_rows, *piece, use_reentrant=False) for piece in pieces]
        return torch.cat(results) if results[0].dim() else torch.stack(results)

    def _logits(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(rows)[:, : self.count].float()
        return capped_logits(logits, self.softcap)

    @property
    def smoothing(self) -> float:
        """Label smoothing of this forward pass: in training alone."""
        return self.label_smoothing if self.training else 0.0


def _in_float16(rows: Tensor) -> bool:
    """Return whether products are in float16, where small gradients need the loss scale."""
    return (autocast_dtype(rows.device.type) or rows.dtype) == torch.float16
