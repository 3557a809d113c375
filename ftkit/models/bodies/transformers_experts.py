"""Experts of transformers' models: the tokens of each expert in a row.

For experts whose matrices are one parameter of three dimensions, transformers calls the function
that a model's settings name; older models have modules of their own. The code of transformers uses
products that fake tensors do not support in float32, or reads values of tensors, and cannot use
quantised matrices. Here these are unpacked one by one for their product, and nothing unpacked is
kept.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ftkit.models.bodies.experts import (
    PAIRS,
    FusedExperts,
    PackedMatrices,
    count_of_each,
    grouped_product,
    packed_in,
    rows_of_each,
)

EXPERTS = "ftkit"
"""Name by which transformers finds the function for experts below."""


def compute_experts(model: nn.Module) -> None:
    """Make a model compute its experts with the functions below.

    Args:
        model: of transformers.
    """
    for experts in fused_experts(model):
        module: Any = experts.module
        if experts.takes_pairs:
            module.config._experts_implementation = EXPERTS
        elif _stands_alone(module):
            module.forward = _RowsOfEach(module, transposed=experts.transposed)
        else:
            module.forward = _AllRows(module)


def fused_experts(model: nn.Module) -> Iterator[FusedExperts]:
    """Yield experts whose matrices are one parameter: all of a layer, or one of its products.

    Args:
        model: of transformers.
    """
    for module in model.modules():
        if hasattr(module, "is_transposed") and hasattr(module, "num_experts"):
            own, packed = module.named_parameters(recurse=False), packed_in(module)
            matrices = tuple(name for name, p in own if p.ndim == 3 or name in packed)
            yield FusedExperts(module, matrices, transposed=bool(module.is_transposed))
        elif _stands_alone(module):
            transposed = type(module).__name__.endswith("Gemm")
            yield FusedExperts(module, ("weight",), transposed, takes_pairs=False)
        elif type(module).__name__ == "Llama4TextExperts":
            names = ("gate_up_proj", "down_proj")
            yield FusedExperts(module, names, transposed=True, takes_pairs=False)


def _stands_alone(module: nn.Module) -> bool:
    """Whether a module is one product of all experts, within a layer that computes the rest."""
    return type(module).__name__.endswith(("ParallelExperts", "GroupedExpertsGemm"))


class _RowsOfEach:
    """Product of each row with the matrix of its expert."""

    def __init__(self, module: Any, *, transposed: bool) -> None:
        self._module, self._transposed = module, transposed

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Multiply [rows, in], sorted by expert, given the number of rows of each expert."""
        counts = counts.to(rows.device)
        if matrices := packed_in(self._module).get("weight"):
            return _packed_product(
                rows, self._module.weight, matrices, rows_of_each(counts, len(rows))
            )
        ends = counts.cumsum(0).to(torch.int32)
        return grouped_product(rows, self._module.weight, ends, transposed=self._transposed)


class _AllRows:
    """Llama 4's experts: each computes all tokens, multiplied by 0 where it was not chosen."""

    def __init__(self, module: Any) -> None:
        self._module, self._theirs = module, module.forward

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute [experts * tokens, width], sorted by expert."""
        module, packed = self._module, packed_in(self._module)
        if not packed:
            result: Tensor = self._theirs(hidden)
            return result
        tokens = len(hidden) // module.num_experts
        rows = [slice(i * tokens, (i + 1) * tokens) for i in range(module.num_experts)]
        both = _packed_product(hidden, module.gate_up_proj, packed["gate_up_proj"], rows)
        gate, up = both.chunk(2, dim=-1)
        x = up * module.act_fn(gate)
        return _packed_product(x, module.down_proj, packed["down_proj"], rows)


def _experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Function of experts for transformers; it returns [tokens, width].

    hidden is [tokens, width]; chosen, int64, and weights are [tokens, experts per token].
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
        if matrices := packed.get(name):
            result = _packed_product(given, weight, matrices, rows)
        else:
            result = grouped_product(given, weight, ends, transposed=module.is_transposed)
        if module.has_bias:
            result = result + getattr(module, f"{name}_bias")[experts[order]]
        pairs = getattr(module, f"{name}{PAIRS}", None)
        # In the memory of the result, as LoRA of linear layers does.
        return result if pairs is None else result.add_(pairs(given, ends))

    x = hidden[order // of_each]
    if module.has_gate:
        x = module._apply_gate(product(x, "gate_up_proj"))
    else:
        x = module.act_fn(product(x, "up_proj"))
    x = product(x, "down_proj") * weights.flatten()[order, None]
    # Back in the order of tokens: index_add_ would sum in an order of its own on a GPU.
    x = x[order.argsort()].unflatten(0, (-1, of_each)).sum(1)
    return x.to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


def _packed_product(
    x: Tensor, weight: Tensor, matrices: PackedMatrices, rows: list[slice]
) -> Tensor:
    """Multiply each row by the quantised matrix of its expert: [rows, in] to [rows, out]."""
    x = x.to(matrices.compute_dtype)
    result: Tensor = _PackedProduct.apply(x, weight, matrices, rows)
    return result


class _PackedProduct(torch.autograd.Function):
    """Product of each row with the quantised matrix of its expert, with a gradient for the row."""

    # The parameter itself is saved for the backward pass: a view would keep alive what strategies
    # gather.

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, matrices: PackedMatrices, rows: list[slice]
    ) -> Tensor:
        if is_fake(x):
            rows = [slice(0, len(x))]  # matrices are unpacked one by one: the memory is that of one
        ctx.matrices, ctx.rows = matrices, rows
        ctx.save_for_backward(weight)
        result = x.new_empty(len(x), matrices.rows)
        # One matrix at a time: in bf16 all experts of a layer of Mixtral-8x7B take 2.6 GiB
        # unpacked, one matrix 0.2.
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
