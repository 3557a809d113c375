"""Gradient clipping by the global norm, also of sharded gradients."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.tensor import DTensor

# 256 KiB in float32: a piece stays in the cache of a core between conversion and sum.
PIECE = 2**16
"""16-bit numbers that are converted to float32 at once on a CPU, to sum their squares."""


def norms_of(gradients: list[Tensor]) -> Sequence[Tensor]:
    """Norm of each gradient, in float32."""
    if gradients and gradients[0].device.type == "cpu":
        return [_norm_on_cpu(gradient) for gradient in gradients]
    # One kernel for many gradients; torch.nn.utils calls the same one, but in their dtype.
    norms: Sequence[Tensor] = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    return norms


def _norm_on_cpu(gradient: Tensor) -> Tensor:
    # By rows: a CPU adds squares one by one, and over many millions the error reaches 1e-3. It
    # also takes half the time in float32, and a quarter in 16 bits if these are converted first.
    of_rows = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float32)
    is_plain = not (isinstance(gradient, DTensor) or is_fake(gradient))
    if is_plain and gradient.ndim > 1 and gradient.itemsize == 2:
        pieces = gradient.flatten(0, -2).split(max(1, PIECE // gradient.size(-1)))
        return torch.linalg.vector_norm(torch.cat([of_rows(piece.float()) for piece in pieces]))
    return torch.linalg.vector_norm(of_rows(gradient))


def global_norm(norms: Sequence[Tensor]) -> Tensor:
    """Norm of all gradients together, a scalar."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm


def clip_gradients(parameters: Sequence[torch.nn.Parameter], limit: float | None) -> Tensor:
    """Measure the global norm of the gradients, and scale them so that it is at most `limit`.

    Args:
        parameters: of one dtype, on one device.
        limit: None: the norm is only measured.

    Returns:
        Norm before clipping, a scalar in float32; a DTensor if the gradients are.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = global_norm(norms_of(gradients))
    if limit is None:
        return norm
    if gradients[0].dtype == torch.float32:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm
    # torch's function would round norm and factor to the dtype of the gradients: bfloat16 has 8
    # bits of precision.
    known = norm.full_tensor() if isinstance(norm, DTensor) else norm
    # The same 1e-6 as in torch.nn.utils.clip_grad_norm_.
    factor = (limit / (known + 1e-6)).clamp(max=1.0)
    if factor.device.type != "cpu":  # a GPU rounds a scalar to the dtype of the other operand
        factor = factor[None]
    for gradient in gradients:
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)
    return norm
