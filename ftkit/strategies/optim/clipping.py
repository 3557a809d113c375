"""Gradient clipping by the norm of all gradients, wherever they are sharded."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.tensor import DTensor

PIECE = 2**16
"""Numbers of 16 bits that a CPU widens at once, for sums of their squares."""


def norms_of(gradients: list[Tensor]) -> Sequence[Tensor]:
    """The norm of each gradient, in float32."""
    if gradients and gradients[0].device.type == "cpu":
        return [_norm_on_cpu(gradient) for gradient in gradients]
    norms: Sequence[Tensor] = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    return norms


def _norm_on_cpu(gradient: Tensor) -> Tensor:
    """By rows: a CPU adds squares up one by one, and many millions leave an error of 1e-3.

    It takes half of the time in float32, and a quarter in 16 bits where these are widened first.
    """
    of_rows = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float32)
    is_plain = not (isinstance(gradient, DTensor) or is_fake(gradient))
    if is_plain and gradient.ndim > 1 and gradient.itemsize == 2:
        pieces = gradient.flatten(0, -2).split(max(1, PIECE // gradient.size(-1)))
        return torch.linalg.vector_norm(torch.cat([of_rows(piece.float()) for piece in pieces]))
    return torch.linalg.vector_norm(of_rows(gradient))


def global_norm(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together, a scalar."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm


def clip_gradients(parameters: Sequence[torch.nn.Parameter], limit: float | None) -> Tensor:
    """Measure the global norm of the gradients, and scale them so that it is at most `limit`.

    Norm and factor are float32 in every number format: in bfloat16 they would have 8 bits.

    Args:
        parameters: of one number format, on one device.
        limit: None: they are only measured.

    Returns:
        The norm before clipping, a scalar in float32; a DTensor if the gradients are.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = global_norm(norms_of(gradients))
    if limit is None:
        return norm
    if gradients[0].dtype == torch.float32:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm
    known = norm.full_tensor() if isinstance(norm, DTensor) else norm
    factor = (limit / (known + 1e-6)).clamp(max=1.0)
    if factor.device.type != "cpu":  # there a scalar is rounded to the format of what it scales
        factor = factor[None]
    for gradient in gradients:
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)
    return norm
