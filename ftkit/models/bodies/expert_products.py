"""Products of rows with the matrices of experts, in few kernels."""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from ftkit.models.bodies.experts import PackedMatrices
from ftkit.utils.accelerators.kinds import USUAL_KIND


def count_of_each(chosen: Tensor, experts: int) -> Tensor:
    """Return [experts] int32: how often each expert is chosen."""
    # Not bincount, which waits for the device to learn the size of its result.
    counts = torch.zeros(experts, dtype=torch.int32, device=chosen.device)
    return counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))


def rows_of_each(ends: Tensor, rows: int) -> list[slice]:
    """Return the slice of the rows of each expert, if rows are sorted by expert.

    The host waits for the device.

    Args:
        ends: [experts], the end of each expert's rows; of fake tensors, all have as many rows.
        rows: of all experts.
    """
    # Fake tensors have no values: equal counts stand for all others.
    if is_fake(ends):
        of_each = [rows * (expert + 1) // len(ends) for expert in range(len(ends))]
    else:
        of_each = ends.tolist()
    return [slice(start, end) for start, end in pairwise((0, *of_each))]


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool) -> Tensor:
    """Multiply each row by the matrix of its expert: [rows, out].

    Args:
        x: [rows, in], sorted by expert.
        weight: [experts, out, in]; [experts, in, out] if it is transposed.
        ends: [experts] int32, the end of each expert's rows.
        transposed: whether the weight is [experts, in, out].
    """
    result: Tensor = _GroupedProduct.apply(x, weight, ends, transposed)
    return result


class _GroupedProduct(torch.autograd.Function):
    """Product of each row with the matrix of its expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
        kind = x.device.type
        # Autocast does not know custom functions: what it would do to a linear layer is done here.
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
            # The gradient has the layout of the parameter.
            left, right = (x, gradient) if ctx.transposed else (gradient, x)
            of_weight = _sums(left, right, ends)
        return of_x, of_weight, None, None


def _products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return [rows, out], given [rows, in] and [experts, in, out]."""
    if is_fake(x):  # torch computes this shape for bfloat16 alone
        # Shapes are all that fake tensors need.
        return x.new_empty(x.size(0), weight.size(-1))
    return F.grouped_mm(x, weight, offs=ends)


def _sums(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return [experts, a, b]: sums over each expert's rows, given [rows, a] and [rows, b]."""
    if is_fake(left):  # as in `_products`
        return left.new_empty(len(ends), left.size(-1), right.size(-1))
    sums: Tensor = F.grouped_mm(left.mT, right, offs=ends)
    if _forgets_empty_sums(left.device):
        is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        # Not a product: what is there may be NaN. The host need not know which experts they are.
        sums.masked_fill_(is_empty[:, None, None], 0)
    return sums


def packed_product(
    x: Tensor, weight: Tensor, matrices: PackedMatrices, ends: Tensor, rows: list[slice]
) -> Tensor:
    """Multiply each row by the quantised matrix of its expert: [rows, out].

    Args:
        x: [rows, in], sorted by expert.
        weight: the packed parameter.
        matrices: unpack it.
        ends: [experts] int32, the end of each expert's rows.
        rows: of each expert, as `rows_of_each` returns them.
    """
    x = x.to(matrices.compute_dtype)
    result: Tensor = _PackedProduct.apply(x, weight, matrices, ends, rows)
    return result


class _PackedProduct(torch.autograd.Function):
    """Product of each row with the quantised matrix of its expert, with a gradient for the row."""

    # The parameter itself is saved for the backward pass: a view would keep alive what strategies
    # gather.

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        matrices: PackedMatrices,
        ends: Tensor,
        rows: list[slice],
    ) -> Tensor:
        # No gradient for the frozen matrices, so the input need not be kept.
        ctx.matrices, ctx.rows = matrices, rows
        ctx.save_for_backward(weight, ends)
        return _product_in_groups(x, weight, matrices, ends, rows, transposed=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, ends = ctx.saved_tensors
        gradient = gradients[0].to(ctx.matrices.compute_dtype)
        of_x = _product_in_groups(gradient, weight, ctx.matrices, ends, ctx.rows, transposed=False)
        return of_x, None, None, None, None


def _product_in_groups(
    x: Tensor,
    weight: Tensor,
    matrices: PackedMatrices,
    ends: Tensor,
    rows: list[slice],
    *,
    transposed: bool,
) -> Tensor:
    """Multiply each row by the matrix of its expert, unpacked, or by that transposed."""

    def factors(experts: slice) -> Tensor:
        unpacked = matrices.unpacked(weight, experts)
        return unpacked.mT if transposed else unpacked

    def product(experts: slice, own: slice) -> Tensor:
        return _products(x[own], factors(experts), ends[experts] - own.start)

    def multiply_each(experts: slice) -> None:
        # A function, so that its numbers are forgotten before the next ones are unpacked.
        for matrix, own in zip(factors(experts), rows[experts], strict=True):
            torch.mm(x[own], matrix, out=result[own])  # needs no memory beside

    # The host knows the rows, for which it waits once in a layer. A grouped product begins at the
    # first row, so without that knowledge each group would multiply the rows of all groups before
    # it, too: several times the work.
    groups = list(_groups(rows, matrices.at_once(x.device.type)))
    in_one_kernel = _has_grouped_kernel(x)
    if len(groups) == 1 and in_one_kernel:
        return product(*groups[0])
    result = x.new_empty(len(x), matrices.rows if transposed else matrices.columns)
    # Fake tensors are for shapes alone, and their groups are equal: the first one stands for all.
    for experts, own in groups[:1] if is_fake(x) else groups:
        if in_one_kernel and experts.stop - experts.start > 1:
            result[own] = product(experts, own)
        else:  # without a kernel, torch would read the ends of the rows again, and wait for them
            multiply_each(experts)
    return result


def _has_grouped_kernel(x: Tensor) -> bool:
    """Return whether torch multiplies groups of such numbers in one kernel."""
    # As in torch 2.11 to 2.14: kernels of CUTLASS for two generations of cards, and a loop for all
    # others. Fake tensors stand for a card that has it, where a product needs memory of its own.
    if is_fake(x):
        return True
    of_card = x.device.type == USUAL_KIND and torch.cuda.get_device_capability(x.device)[0]
    return x.dtype == torch.bfloat16 and of_card in (9, 10)


def _groups(rows: list[slice], at_once: int) -> Iterator[tuple[slice, slice]]:
    """Yield experts that are unpacked at once, with their rows, given the rows of each expert."""
    start = 0
    for expert, own in enumerate(rows):
        is_empty = own.start == own.stop
        # An expert without rows need not be unpacked, so a group ends before it.
        if start < expert and (is_empty or expert - start == at_once):
            yield slice(start, expert), slice(rows[start].start, own.start)
            start = expert
        if is_empty:
            start = expert + 1
    if start < len(rows):
        yield slice(start, len(rows)), slice(rows[start].start, rows[-1].stop)


@cache
def _forgets_empty_sums(device: torch.device) -> bool:
    """Return whether sums over no rows have the values of other sums, or any, instead of zeros."""
    # CUTLASS's kernels for compute capability 10.0 and later write what the registers hold
    # (https://github.com/NVIDIA/cutlass/issues/2674): a wrong gradient of experts that no token has
    # chosen (https://github.com/pytorch/pytorch/issues/172439, open with torch 2.13).
    return device.type == USUAL_KIND and torch.cuda.get_device_capability(device) >= (10, 0)
