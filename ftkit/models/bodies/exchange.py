"""The exchange of heads for tokens among ranks that share a row.

Every layer but attention computes each token by itself, so that a rank may have any piece of a row.
Before attention, ranks give away tokens of most heads and get all tokens of the others; after it,
they change back. Jacobs et al. 2023 (DeepSpeed-Ulysses), https://arxiv.org/abs/2309.14509.

Nothing overlaps with it: when attention is called, the projections, which are modules of
transformers, have ended. Bodies of our own, one for each family, would cost more than they save.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ftkit.recipe.mesh import Piece


class Exchange:
    """Exchanges heads for tokens among the ranks that share a row."""

    # No dataclass: Fabric looks into those that a model is given.

    def __init__(self, piece: Piece, group: dist.ProcessGroup | None) -> None:
        """Describe the ranks.

        Args:
            piece: that this rank has of each row.
            group: of the ranks, in the order of their pieces; None: nothing is sent, and numbers do
                not matter, as in a plan.
        """
        self.piece, self._group = piece, group

    def to_heads(self, part: Tensor) -> Tensor:
        """Turn [tokens of the piece, heads, size] into [tokens of the row, heads / ranks, size]."""
        turned: Tensor = _Exchanged.apply(part, self, True)
        return turned

    def to_tokens(self, part: Tensor) -> Tensor:
        """Turn [tokens of the row, heads / ranks, size] into [tokens of the piece, heads, size]."""
        turned: Tensor = _Exchanged.apply(part, self, False)
        return turned

    def own_heads(self, values: Tensor) -> Tensor:
        """Those of this rank, [heads / ranks], of a value for each head, [heads]."""
        return values.chunk(self.piece.count)[self.piece.index]

    def copies(self, groups: int) -> int:
        """Number of copies of each key head with which every rank gets those of its query heads."""
        return self.piece.count // math.gcd(groups, self.piece.count)

    def summed(self, values: Tensor) -> Tensor:
        """Sum values over the ranks, of which each then computes the same."""
        added: Tensor = _Summed.apply(values, self)
        return added

    def added(self, values: Tensor) -> Tensor:
        """Send values, and return their sum over the ranks."""
        total = values.clone()
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return total

    def sent(self, parts: Tensor) -> Tensor:
        """Send [ranks, ...], a part to each rank, and return what each has sent to this one."""
        received = torch.empty_like(parts)
        if self._group is not None:
            dist.all_to_all_single(received, parts, group=self._group)
        return received


class _Exchanged(torch.autograd.Function):
    """One direction of the exchange; its gradient takes the other one."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, exchange: Exchange, to_heads: bool) -> Tensor:
        ctx.exchange, ctx.to_heads = exchange, to_heads
        ranks = exchange.piece.count
        if to_heads:
            of_ranks = part.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
            return exchange.sent(of_ranks).flatten(0, 1)
        of_ranks = part.unflatten(0, (ranks, -1)).contiguous()
        return exchange.sent(of_ranks).transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchanged.apply(gradient, ctx.exchange, not ctx.to_heads), None, None


class _Summed(torch.autograd.Function):
    """A sum over the ranks; each has a share of the loss, whose gradients are summed likewise."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.added(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.added(gradient), None
