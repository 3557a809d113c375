"""Rotary embeddings in few kernels, for devices on which each launch takes time.

Su et al. 2021, https://arxiv.org/abs/2104.09864.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ftkit.utils.accelerators.kinds import USUAL_KIND

_NAME = "apply_rotary_pos_emb"


def rotated_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate pairs of numbers of each head that lie half a head apart.

    Args:
        q: [..., heads, size].
        k: [..., groups, size], of the same dtype.
        cos: [..., 1, size].
        sin: likewise.

    Returns:
        q and k, rotated, in their dtype; rounded once. They share their memory.
    """
    result: tuple[Tensor, Tensor] = _Rotated.apply(q, k, cos, sin)
    return result


def saves_launches(q: Tensor) -> bool:
    """Return whether `rotated_halves` is the better way to rotate such heads."""
    # Launches cost nothing on CPUs, and compilers fuse the operations of a model's own code. Other
    # devices need not have kernels that add numbers of two types.
    return q.device.type == USUAL_KIND and not torch.compiler.is_compiling()


def rotate_in_few_kernels(model: nn.Module) -> None:
    """Make a model of transformers rotate by `rotated_halves` where that saves launches.

    Nothing happens to models whose code is not the usual one, which two thirds have.
    """
    for module in {type(part).__module__ for part in model.modules()}:
        names = vars(sys.modules[module])
        if _is_usual(names.get(_NAME), names.get("rotate_half")):
            # In the model's code, which calls it by this name.
            names[_NAME] = _in_few_kernels(names[_NAME])


def _is_usual(rotate: object, rotate_half: object) -> bool:
    """Whether two functions are those of Llama's code, which other models have copies of."""
    from transformers.models.llama import modeling_llama

    usual = (inspect.unwrap(getattr(modeling_llama, _NAME)), modeling_llama.rotate_half)
    return all(
        isinstance(found, FunctionType) and _operations(found) == _operations(theirs)
        for found, theirs in zip((rotate, rotate_half), usual, strict=True)
    )


def _operations(function: Any) -> tuple[Any, ...]:
    """What a function does, without its documentation."""
    code = function.__code__
    numbers = [constant for constant in code.co_consts if not isinstance(constant, str)]
    return code.co_code, code.co_names, numbers, code.co_varnames


def _in_few_kernels(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def rotate(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        size = q.size(-1)
        fits = unsqueeze_dim == 1 and q.dtype == k.dtype and size % 2 == 0 and cos.size(-1) == size
        if not (fits and saves_launches(q)):
            result: tuple[Tensor, Tensor] = theirs(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
            return result
        # [batch, heads, tokens, size] is a view of what the layers compute, in which the heads of a
        # token lie side by side.
        heads = (q.transpose(1, 2), k.transpose(1, 2))
        turned = rotated_halves(*heads, cos[..., None, :], sin[..., None, :])
        return turned[0].transpose(1, 2), turned[1].transpose(1, 2)

    return rotate


class _Rotated(torch.autograd.Function):
    """Four kernels forwards and four backwards; written with operators, it is 12 and 20."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turned(q, k, cos, sin.chunk(2, dim=-1), 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (of_q, of_k), (cos, sin) = gradients, ctx.saved_tensors
        # Back: each half by the sine with which the other one was added to it.
        sines = sin.chunk(2, dim=-1)
        return *_turned(of_q, of_k, cos, sines[::-1], -1.0), None, None


def _turned(
    q: Tensor, k: Tensor, cos: Tensor, sines: Sequence[Tensor], direction: float
) -> tuple[Tensor, Tensor]:
    """Rotate by the angles of the tables, with the sines of each half; direction -1: back."""
    # Joined, which costs a copy but half of the launches: where attention is large enough to keep
    # a GPU busy, its products take far longer.
    joined = torch.cat((q, k), dim=-2)
    half = joined.size(-1) // 2
    first, second = joined.split(half, -1)
    result = torch.empty_like(joined)
    # In the precision of the tables; what is added is rounded to that of q while it is written.
    sums, results = (joined * cos).split(half, -1), result.split(half, -1)
    torch.addcmul(sums[0], second, sines[0], value=-direction, out=results[0])
    torch.addcmul(sums[1], first, sines[1], value=direction, out=results[1])
    of_q, of_k = result.split((q.size(-2), k.size(-2)), dim=-2)
    return of_q, of_k
