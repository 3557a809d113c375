"""Rotary embeddings in few kernels, for devices on which each launch takes time.

Su et al. 2021, https://arxiv.org/abs/2104.09864.
"""

from typing import Any

import torch
from torch import Tensor


def rotated_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate pairs of numbers of each head that lie half a head apart.

    Args:
        q: [..., heads, size].
        k: [..., groups, size], of the same dtype.
        cos: [..., 1, size], float32, whose halves are equal.
        sin: likewise.

    Returns:
        q and k, rotated, in their dtype; rounded once. They share their memory.
    """
    result: tuple[Tensor, Tensor] = _Rotated.apply(q, k, cos, sin)
    return result


class _Rotated(torch.autograd.Function):
    """Four kernels forwards and four backwards; written with operators, it is 12 and 20."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turned(q, k, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (of_q, of_k), (cos, sin) = gradients, ctx.saved_tensors
        return *_turned(of_q, of_k, cos, sin, -1.0), None, None


def _turned(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, direction: float
) -> tuple[Tensor, Tensor]:
    """Rotate by the angles of the tables; direction -1: back."""
    # Joined, which costs a copy but half of the launches: where attention is large enough to keep
    # a GPU busy, its products take far longer.
    joined = torch.cat((q, k), dim=-2)
    half = joined.size(-1) // 2
    (first, second), sin = joined.split(half, -1), sin[..., :half]
    result = torch.empty_like(joined)
    # In the precision of the tables; what is added is rounded to that of q while it is written.
    sums, results = (joined * cos).split(half, -1), result.split(half, -1)
    torch.addcmul(sums[0], second, sin, value=-direction, out=results[0])
    torch.addcmul(sums[1], first, sin, value=direction, out=results[1])
    of_q, of_k = result.split((q.size(-2), k.size(-2)), dim=-2)
    return of_q, of_k
