"""Experts of transformers' models: the tokens of each expert in a row, through weights of all.

Transformers calls what a model's settings name for the matrices of experts, which are one parameter
of three dimensions. Its own way computes products that predictions on fake tensors do not know in
float32, and knows nothing of weights in a few bits.
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS = "ftkit"
"""By which name transformers finds what computes experts below."""


def compute_experts(model: nn.Module) -> None:
    """Have a model compute its experts as below.

    Args:
        model: of transformers.
    """
    for module in model.modules():
        if hasattr(module, "is_transposed") and hasattr(module, "num_experts"):
            module.config._experts_implementation = EXPERTS  # type: ignore[union-attr]


def _experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What transformers calls.

    Args:
        module: has the matrices.
        hidden: [tokens, width].
        chosen: [tokens, experts of each] int64, which experts a token passes.
        weights: likewise, of their results.

    Returns:
        [tokens, width].
    """
    of_each = chosen.size(-1)
    experts = chosen.flatten()
    order = experts.argsort(stable=True)
    counts = torch.zeros(module.num_experts, dtype=torch.int32, device=hidden.device)
    counts = counts.scatter_add_(0, experts, torch.ones_like(experts, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)

    def product(x: Tensor, name: str) -> Tensor:
        result = grouped_product(x, getattr(module, name), ends, module.is_transposed)
        if module.has_bias:
            result = result + getattr(module, f"{name}_bias")[experts[order]]
        return result

    x = hidden[order // of_each]
    if module.has_gate:
        x = module._apply_gate(product(x, "gate_up_proj"))
    else:
        x = module.act_fn(product(x, "up_proj"))
    x = product(x, "down_proj") * weights.flatten()[order, None]
    x = x[order.argsort()].unflatten(0, (-1, of_each)).sum(1)
    return x.to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """The product of each row with the matrix of its expert.

    Args:
        x: [rows, in], those of the first expert first.
        weight: [experts, out, in]; [experts, in, out] if it is transposed.
        ends: [experts] int32, where the rows of each end.
        transposed: which of the two.
    """
    result: Tensor = _GroupedProduct.apply(x, weight, ends, transposed)
    return result


class _GroupedProduct(torch.autograd.Function):
    """The product of each row with the matrix of its expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
        """Compute it.

        Args:
            ctx: of the function.
            x: [rows, in], those of the first expert first.
            weight: [experts, out, in]; [experts, in, out] if it is transposed.
            ends: [experts] int32, where the rows of each end.
            transposed: which of the two.
        """
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = x.to(dtype), weight.to(dtype)
        else:
            x = x.to(weight.dtype)
        ctx.save_for_backward(x, weight, ends)
        ctx.transposed = transposed
        return _products(x, weight if transposed else weight.mT, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        gradient = gradients[0].to(weight.dtype)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _products(gradient, weight.mT if ctx.transposed else weight, ends)
        if ctx.needs_input_grad[1]:
            left, right = (x, gradient) if ctx.transposed else (gradient, x)
            of_weight = _sums(left, right, ends)
        return of_x, of_weight, None, None


def _products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[rows, out] of [rows, in] and [experts, in, out]."""
    if is_fake(x):  # torch knows their shape for bfloat16 alone
        return x.new_empty(x.size(0), weight.size(-1))
    return F.grouped_mm(x, weight, offs=ends)


def _sums(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """[experts, a, b] of [rows, a] and [rows, b]: the sum over the rows of each."""
    if is_fake(left):
        return left.new_empty(len(ends), left.size(-1), right.size(-1))
    return F.grouped_mm(left.mT, right, offs=ends)
