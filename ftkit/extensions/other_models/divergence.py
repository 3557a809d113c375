"""The divergence between two models' distributions, a few rows of logits of both at a time."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ftkit.models.loss import Head, HeadOutput, OutputLayer, autocast_dtype
from ftkit.models.token_losses import TokenWeight, in_cache, log_probabilities

Direction = Literal["forward", "reverse"]


class HiddenRows(HeadOutput):
    """The rows themselves, [n, width], from which `FrozenHead` computes logits later."""

    def compute(self, head: Head, rows: Tensor, labels: Tensor, *, on_cpu: bool) -> Tensor:
        return rows


class FrozenHead:
    """The output layer of a model that is not trained: it gives logits of a few rows at a time."""

    def __init__(self, head: Head, whole: Callable[[Tensor], Tensor]) -> None:
        """Wrap a head.

        Args:
            head: of the model.
            whole: gathers a parameter that may be sharded; every rank calls it.
        """
        self._head, self._whole = head, whole
        self.softcap = head.softcap

    @torch.no_grad()
    def gathered(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """Gather the weights; every rank calls this.

        Args:
            dtype: in which logits are computed.

        Returns:
            Function of rows, [n, width], that gives their logits, [n, vocabulary], uncapped.
        """
        # Read every time: under FSDP a parameter that is sharded again is another tensor.
        layer = self._head.lm_head
        assert isinstance(layer, OutputLayer)
        count = self._head.count
        weight = self._whole(layer.weight)[:count].to(dtype)
        bias = None if layer.bias is None else self._whole(layer.bias)[:count].to(dtype)

        @torch.no_grad()
        def logits(rows: Tensor) -> Tensor:
            # Cast once above: autocast would cast the weight again for every piece.
            with torch.autocast(rows.device.type, enabled=False):
                return F.linear(rows.to(dtype), weight, bias)

        return logits


class Divergence(HeadOutput):
    """Sums over the tokens: loss, divergence and cross-entropy, [3] in nats, float32.

    The first one, of which there are gradients, is the divergence plus the weighted cross-entropy.
    """

    # No dataclass: as `SummedLoss`.

    def __init__(
        self,
        teacher: FrozenHead,
        teacher_rows: Tensor,
        *,
        direction: Direction,
        temperature: float,
        cross_entropy_weight: float,
        weights: Tensor | None = None,
        divergence_weight: float = 1.0,
        token_weight: TokenWeight | None = None,
    ) -> None:
        """Choose the divergence.

        Args:
            teacher: head of the other model.
            teacher_rows: [n, its width], what it computes logits from.
            direction: forward: KL(teacher, own); reverse: KL(own, teacher).
            temperature: by which the logits of both are divided; the divergence is multiplied by
                its square, so that gradients keep their size.
            cross_entropy_weight: of the labels' cross-entropy, which has no temperature.
            weights: [n] float32, factors of the tokens; None: 1 each.
            divergence_weight: of the divergence in the loss.
            token_weight: factor of the cross-entropy of each label in the loss, which has no
                gradient, from log-probabilities without temperature and labels; None: 1 each.
        """
        self._divergence_weight, self._token_weight = divergence_weight, token_weight
        self._teacher, self._teacher_rows, self._weights = teacher, teacher_rows, weights
        self._direction, self._temperature = direction, temperature
        self._cross_entropy_weight = cross_entropy_weight

    def compute(self, head: Head, rows: Tensor, labels: Tensor, *, on_cpu: bool) -> Tensor:
        # Only here, beside the logits: it takes as much memory as the output layer of the teacher.
        teacher = self._teacher.gathered(autocast_dtype(rows.device.type) or rows.dtype)
        weights = rows.new_ones(len(rows), dtype=torch.float32)
        if self._weights is not None:
            weights = self._weights
        columns = labels[:, None], weights[:, None], self._teacher_rows
        if head.fuses(rows):
            compute = partial(self._sums_and_grad, teacher, head.softcap, on_cpu)
            return head.summed(compute, rows, *columns)
        return head.in_pieces(partial(self._by_autograd, teacher), rows, *columns).sum(0)

    def _sums_and_grad(
        self,
        teacher: Callable[[Tensor], Tensor],
        softcap: float | None,
        on_cpu: bool,
        logits: Tensor,
        wanted: Tensor,
        weights: Tensor,
        teacher_rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        compute = partial(
            divergence_and_grad,
            softcap=softcap,
            teacher_softcap=self._teacher.softcap,
            direction=self._direction,
            temperature=self._temperature,
            cross_entropy_weight=self._cross_entropy_weight,
            divergence_weight=self._divergence_weight,
            token_weight=self._token_weight,
        )
        columns = wanted, weights, teacher(teacher_rows)
        return in_cache(compute, logits, *columns) if on_cpu else compute(logits, *columns)

    def _by_autograd(
        self,
        teacher: Callable[[Tensor], Tensor],
        logits: Tensor,
        wanted: Tensor,
        weights: Tensor,
        teacher_rows: Tensor,
    ) -> Tensor:
        temperature = self._temperature
        own = log_probabilities(logits, None, temperature)  # the head has capped them
        other = log_probabilities(teacher(teacher_rows), self._teacher.softcap, temperature)
        under, over = (own, other) if self._direction == "forward" else (other, own)
        divergence = F.kl_div(under, over, reduction="none", log_target=True).sum(1)
        divergence = divergence * temperature**2
        cross_entropy = F.cross_entropy(logits, wanted.squeeze(1), reduction="none")
        factor: float | Tensor = self._cross_entropy_weight
        if self._token_weight is not None:
            plain = log_probabilities(logits.detach(), None)
            factor = factor * self._token_weight(plain, wanted).squeeze(1)
        loss = self._divergence_weight * divergence + factor * cross_entropy
        return torch.stack([loss, divergence, cross_entropy], dim=1) * weights


def divergence_and_grad(
    logits: Tensor,
    wanted: Tensor,
    weights: Tensor,
    teacher: Tensor,
    *,
    softcap: float | None,
    teacher_softcap: float | None,
    direction: Direction,
    temperature: float,
    cross_entropy_weight: float,
    divergence_weight: float = 1.0,
    token_weight: TokenWeight | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums as `Divergence` has them, and the gradient of the first in the dtype of the logits.

    Args:
        logits: [n, vocabulary]; overwritten.
        wanted: [n, 1], the labels.
        weights: [n, 1] float32, of the labels.
        teacher: [n, vocabulary], logits of the other model.
        softcap: bound of the logits; None: they have none.
        teacher_softcap: the same of the other model.
        direction: see `Divergence`.
        temperature: see `Divergence`.
        cross_entropy_weight: see `Divergence`.
        divergence_weight: see `Divergence`.
        token_weight: see `Divergence`.
    """
    own = log_probabilities(logits, softcap, temperature)
    plain = own if temperature == 1 else log_probabilities(logits, softcap)
    cross_entropy = -plain.gather(1, wanted)
    factor: float | Tensor = cross_entropy_weight
    if token_weight is not None:
        factor = factor * token_weight(plain, wanted)
    del plain
    other = log_probabilities(teacher, teacher_softcap, temperature)
    # Differences of logarithms, in place from here on: a small divergence would be lost in the
    # rounding of two large entropies.
    if direction == "forward":
        difference = other - own
        divergence = difference.mul_(other.exp_()).sum(1, keepdim=True)
        del difference
        grad = own.exp_().sub_(other)  # own probabilities less those of the teacher
    else:
        difference = other.neg_().add_(own)
        divergence = (difference * own.exp_()).sum(1, keepdim=True)
        # Own probability x (difference - its mean): the mean is the divergence.
        grad = difference.sub_(divergence).mul_(own)
    del own, other
    divergence *= temperature**2
    # The other factor of the temperature went with the derivative of logits / temperature.
    grad *= temperature * divergence_weight
    if cross_entropy_weight:
        grad.add_(log_probabilities(logits, softcap).exp_().mul_(factor))
        grad.scatter_add_(1, wanted, -factor * torch.ones_like(wanted, dtype=grad.dtype))
    grad *= weights
    if softcap:
        # Derivative of softcap * tanh(x / softcap).
        grad *= 1 - torch.tanh(logits.float() / softcap).square_()
    loss = divergence_weight * divergence + factor * cross_entropy
    sums = (torch.cat([loss, divergence, cross_entropy], dim=1) * weights).sum(0)
    return sums, grad if logits.dtype == grad.dtype else logits.copy_(grad)
