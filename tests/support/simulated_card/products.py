"""Grouped products as torch's kernels for cards of capability 10.0 and later compute them."""

from typing import Any


def install() -> None:
    """Leave what is there in sums over no rows; right after torch was imported."""
    import torch
    from torch import Tensor

    functional: Any = torch.nn.functional
    usual = functional.grouped_mm

    def grouped_mm(left: Tensor, right: Tensor, *, offs: Tensor, **options: Any) -> Tensor:
        result: Tensor = usual(left, right, offs=offs, **options)
        is_sum = left.ndim == right.ndim == 2
        if not (is_sum and left.is_cuda and torch.cuda.get_device_capability(left.device)[0] >= 10):
            return result
        # https://github.com/pytorch/pytorch/issues/172439: the registers of the group before.
        is_empty = offs.diff(prepend=offs.new_zeros(1)) == 0
        return result.masked_fill(is_empty[:, None, None], float("nan"))

    functional.grouped_mm = grouped_mm
