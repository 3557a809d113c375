"""Experts of transformers' models: the tokens of each expert in a row, through weights of all.

Transformers calls what a model's settings name for the matrices of experts, which are one parameter
of three dimensions. Its own way computes products that predictions on fake tensors do not know in
float32, and knows nothing of weights in a few bits: these are turned into numbers one matrix after
the other, where its product is computed, and nothing is kept of that.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ftkit.bodies.experts import (
    PAIRS,
    FusedExperts,
    PackedMatrices,
    count_of_each,
    grouped_product,
    packed_in,
    rows_of_each,
)

EXPERTS = "ftkit"
"""By which name transformers finds what computes experts below."""


def compute_experts(model: nn.Module) -> None:
    """Have a model compute its experts as below.

    Args:
        model: of transformers.
    """
    for experts in fused_experts(model):
        experts.module.config._experts_implementation = EXPERTS  # type: ignore[union-attr]


def fused_experts(model: nn.Module) -> Iterator[FusedExperts]:
    """Those of each layer that transformers leaves to a function of its settings.

    Args:
        model: of transformers.
    """
    for module in model.modules():
        if hasattr(module, "is_transposed") and hasattr(module, "num_experts"):
            own, packed = module.named_parameters(recurse=False), packed_in(module)
            matrices = tuple(name for name, p in own if p.ndim == 3 or name in packed)
            yield FusedExperts(module, matrices, transposed=bool(module.is_transposed))


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
    counts = count_of_each(experts, module.num_experts)
    ends = counts.cumsum(0, dtype=torch.int32)
    packed = packed_in(module)
    rows = rows_of_each(counts, len(experts)) if packed else []

    def product(given: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        result: Tensor
        if matrices := packed.get(name):
            x = given.to(matrices.compute_dtype)
            result = _PackedProduct.apply(x, weight, matrices, rows)
        else:
            result = grouped_product(given, weight, ends, transposed=module.is_transposed)
        if module.has_bias:
            result = result + getattr(module, f"{name}_bias")[experts[order]]
        pairs = getattr(module, f"{name}{PAIRS}", None)
        return result if pairs is None else result.add_(pairs(given, ends))

    x = hidden[order // of_each]
    if module.has_gate:
        x = module._apply_gate(product(x, "gate_up_proj"))
    else:
        x = module.act_fn(product(x, "up_proj"))
    x = product(x, "down_proj") * weights.flatten()[order, None]
    x = x[order.argsort()].unflatten(0, (-1, of_each)).sum(1)
    return x.to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


class _PackedProduct(torch.autograd.Function):
    """The product of each row with the quantised matrix of its expert; a gradient for it alone.

    Kept for the backward pass is the parameter, and no view of it, which would keep what strategies
    gather of it alive.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, matrices: PackedMatrices, rows: list[slice]
    ) -> Tensor:
        """Compute it.

        Args:
            ctx: of the function.
            x: [rows, in], those of the first expert first.
            weight: what the parameter holds.
            matrices: unpack it.
            rows: of each expert.
        """
        if is_fake(x):
            rows = [slice(0, len(x))]  # one after the other, they take what one takes
        ctx.matrices, ctx.rows = matrices, rows
        ctx.save_for_backward(weight)
        result = x.new_empty(len(x), matrices.rows)
        for expert, own in enumerate(rows):
            if own.start < own.stop:
                torch.mm(x[own], matrices.unpacked(weight, expert).t(), out=result[own])
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        matrices: PackedMatrices = ctx.matrices
        gradient = gradients[0].to(matrices.compute_dtype)
        of_x = gradient.new_empty(len(gradient), matrices.columns)
        for expert, own in enumerate(ctx.rows):
            if own.start < own.stop:
                torch.mm(gradient[own], matrices.unpacked(weight, expert), out=of_x[own])
        return of_x, None, None, None
