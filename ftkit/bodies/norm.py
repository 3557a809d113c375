"""RMSNorm, which keeps its input for the backward pass and nothing else of that size.

Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class RMSNorm(nn.Module):
    """LitGPT's RMSNorm: the same numbers, in fewer passes over them."""

    def __init__(self, size: int, eps: float, *, add_unit_offset: bool) -> None:
        """Outline.

        Args:
            size: of the last dimension, which is normalised.
            eps: added to the mean of the squares.
            add_unit_offset: whether what multiplies is 1 + weight, as in Gemma.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 0.0 if add_unit_offset else 1.0))
        self.eps = eps
        self.add_unit_offset = add_unit_offset

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight if self.add_unit_offset else self.weight
        if x.device.type == "cpu":  # where torch has no kernel of its own for it
            normed: Tensor = _Normed.apply(x, weight, self.eps)
            return normed
        dtype = torch.promote_types(x.dtype, weight.dtype)  # the kernel is for one number format
        return F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), self.eps).to(x.dtype)


class _Normed(torch.autograd.Function):
    """RMSNorm in float32, which keeps the input and one number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        numbers = x.float()
        length = torch.linalg.vector_norm(numbers, dim=-1, keepdim=True)
        factor = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, factor)
        return (numbers * factor).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, factor = ctx.saved_tensors
        numbers, gradient = x.float(), gradients[0].float()
        product = gradient * numbers
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            mean = (product @ weight.float()).unsqueeze(-1) / x.shape[-1]
            of_x = (gradient * weight).mul_(factor).addcmul_(numbers, mean * factor**3, value=-1)
            of_x = of_x.to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = product.mul_(factor).flatten(0, -2).sum(0).to(weight.dtype)
        return of_x, of_weight, None
