"""Fused experts: those of a layer whose matrices are one parameter of three dimensions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

_PACKED = "packed_matrices"
"""The attribute of a module with what unpacks its matrices, by the names of its parameters."""


PAIRS = "_pairs"
"""What the name of a parameter ends with to be that of the module of its low-rank pairs."""


@dataclass(frozen=True)
class FusedExperts:
    """The experts of a layer."""

    module: nn.Module
    matrices: tuple[str, ...]
    """Names of its parameters that hold a matrix of each expert."""
    transposed: bool
    """Whether these are [experts, in, out]; else [experts, out, in]."""
    takes_pairs: bool = True
    """Whether low-rank pairs may stand beside the matrices."""

    def sizes(self, name: str) -> tuple[int, int, int]:
        """Experts, out and in of a parameter."""
        if packed := packed_in(self.module).get(name):
            return packed.experts, packed.rows, packed.columns
        experts, first, second = self.module.get_parameter(name).shape
        return (experts, second, first) if self.transposed else (experts, first, second)


class PackedMatrices(ABC):
    """A matrix of each expert in a few bits: what turns the packed parameter into numbers.

    Each is packed as the weight of a linear layer: by rows of [out, in], in whatever layout the
    model has them.
    """

    def __init__(self, shape: torch.Size, *, transposed: bool, compute_dtype: torch.dtype) -> None:
        """Outline; no memory is taken.

        Args:
            shape: of the parameter in full numbers.
            transposed: whether that is [experts, in, out]; else [experts, out, in].
            compute_dtype: number format of the arithmetic.
        """
        self.transposed, self.compute_dtype = transposed, compute_dtype
        of_one = shape[:0:-1] if transposed else shape[1:]
        self.experts, self.rows, self.columns = shape[0], *of_one
        self._scales: Tensor | None = None

    @property
    def numbers(self) -> int:
        """In all matrices."""
        return self.experts * self.rows * self.columns

    @abstractmethod
    def outline(self) -> Tensor:
        """On the meta device, what the parameter holds; its first dimension is the experts."""

    @abstractmethod
    def allocate(self, device: torch.device) -> None:
        """Take memory for the scales."""

    def pack(self, value: Tensor, device: torch.device | None = None) -> Tensor:
        """Quantise one matrix after the other: keep scales and return what the parameter holds.

        Args:
            value: the parameter in full numbers.
            device: of the computation; None: of the value.
        """
        device = value.device if device is None else device
        if self._scales is None:
            self.allocate(device)
        packed = torch.empty_like(self.outline(), device=device)
        for expert, matrix in enumerate(value):
            matrix = matrix.to(device)
            packed[expert] = self._pack_one(matrix.t() if self.transposed else matrix, expert)
        return packed

    @abstractmethod
    def _pack_one(self, matrix: Tensor, expert: int) -> Tensor:
        """Quantise an expert's matrix, [out, in]; keep its scales and return the rest."""

    @abstractmethod
    def unpacked(self, packed: Tensor, expert: int) -> Tensor:
        """[out, in] of an expert, in the number format of the computation."""


def count_of_each(chosen: Tensor, experts: int) -> Tensor:
    """[experts] int32, how often each is chosen."""
    counts = torch.zeros(experts, dtype=torch.int32, device=chosen.device)
    return counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))


def rows_of_each(counts: Tensor, rows: int) -> list[slice]:
    """Where the rows of each expert lie, those of the first one first.

    Args:
        counts: [experts], how many each has; of fake tensors, they are taken to be equal.
        rows: of all.
    """
    if is_fake(counts):
        ends = [rows * (expert + 1) // len(counts) for expert in range(len(counts))]
    else:
        ends = counts.cumsum(0).tolist()
    return [slice(start, end) for start, end in pairwise((0, *ends))]


def packed_in(module: nn.Module) -> Mapping[str, PackedMatrices]:
    """What unpacks the quantised matrices of experts in a module, by the name of the parameter."""
    found: Mapping[str, PackedMatrices] = getattr(module, _PACKED, {})
    return found


def hold_packed(module: nn.Module, name: str, matrices: PackedMatrices) -> None:
    """Let a parameter hold packed matrices from now on, frozen and on the meta device."""
    setattr(module, _PACKED, {**packed_in(module), name: matrices})
    setattr(module, name, nn.Parameter(matrices.outline(), requires_grad=False))


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool) -> Tensor:
    """[rows, out], the product of each row with the matrix of its expert.

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
