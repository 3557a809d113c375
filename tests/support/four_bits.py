"""Weights that bitsandbytes packed in 4 bits, unpacked by the definition of their format."""

from typing import Any

import torch
from bitsandbytes.functional import dequantize_blockwise
from torch import Tensor


def numbers_of(packed: Tensor, state: Any) -> Tensor:
    """The value of each code times the scale of its block, in the shape and dtype of the state.

    Not by bitsandbytes, whose function is wrong on CPUs with AVX512 where rows end within a block.
    """
    bytes_ = packed.flatten()
    codes = torch.stack([bytes_ >> 4, bytes_ & 15], dim=1).flatten().long()
    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(scales, state.state2) + state.offset
    of_numbers = scales.repeat_interleave(state.blocksize)[: len(codes)]
    return (state.code[codes] * of_numbers).view(state.shape).to(state.dtype)
