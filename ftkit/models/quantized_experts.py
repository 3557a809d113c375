"""Quantised matrices of experts: each as the weight of a quantised linear layer, in one parameter.

The packed parameter has the experts as its first dimension, and is sharded as any other; the scales
are whole on every rank.
"""

import torch
from bitsandbytes.functional import (
    QuantState,
    create_dynamic_map,
    dequantize_4bit,
    int8_vectorwise_quant,
    name2qmap,
)
from torch import Tensor

from ftkit.models.bodies.experts import FusedExperts, PackedMatrices, hold_packed
from ftkit.models.quantization import NESTED_BLOCK, VALUES_AT_ONCE, WEIGHT_BLOCK, quantize_in_pieces
from ftkit.recipe.recipe import Quantization


class FourBitMatrices(PackedMatrices):
    """In blocks of 64 weights of 4 bits."""

    def __init__(
        self, shape: torch.Size, kind: str, *, transposed: bool, compute_dtype: torch.dtype
    ) -> None:
        """Outline; no memory is taken.

        Args:
            shape: of the parameter in full numbers.
            kind: nf4 or fp4, with -dq if the scales are quantised too.
            transposed: whether that is [experts, in, out]; else [experts, out, in].
            compute_dtype: number format of the arithmetic.
        """
        super().__init__(shape, transposed=transposed, compute_dtype=compute_dtype)
        self._quant_type, _, nested = kind.partition("-")
        self._nested = bool(nested)

    def outline(self) -> Tensor:
        size = (self.experts, -(-self.rows * self.columns // 2))
        return torch.empty(size, dtype=torch.uint8, device="meta")

    def allocate(self, device: torch.device) -> None:
        blocks = -(-self.rows * self.columns // WEIGHT_BLOCK)
        dtype = torch.uint8 if self._nested else torch.float32
        self._scales = torch.empty(self.experts, blocks, dtype=dtype, device=device)
        if self._nested:
            above = -(-blocks // NESTED_BLOCK)
            self._scales_of_scales = torch.empty(self.experts, above, device=device)
            self._offsets = torch.empty(self.experts, device=device)
            if "dynamic" not in name2qmap:  # it cannot be computed while memory is simulated
                name2qmap["dynamic"] = create_dynamic_map()
            self._code_of_scales = name2qmap["dynamic"].to(device, copy=True)

    def _pack_one(self, matrix: Tensor, expert: int) -> Tensor:
        packed, state = quantize_in_pieces(matrix, self._quant_type, self._nested, VALUES_AT_ONCE)
        assert self._scales is not None, "allocate comes first"
        self._scales[expert] = state.absmax
        if self._nested:
            self._scales_of_scales[expert] = state.state2.absmax
            self._offsets[expert] = state.offset
        return packed.flatten()

    def unpacked(self, packed: Tensor, expert: int) -> Tensor:
        assert self._scales is not None, "pack comes first"
        state = QuantState(
            absmax=self._scales[expert],
            shape=torch.Size((self.rows, self.columns)),
            blocksize=WEIGHT_BLOCK,
            quant_type=self._quant_type,
            dtype=self.compute_dtype,
        )
        if self._nested:
            state.nested, state.offset = True, self._offsets[expert]
            state.state2 = QuantState(
                absmax=self._scales_of_scales[expert],
                code=self._code_of_scales,
                blocksize=NESTED_BLOCK,
                dtype=torch.float32,
            )
        return dequantize_4bit(packed[expert].unsqueeze(1), state)


class EightBitMatrices(PackedMatrices):
    """In 8-bit integers with one scale per row."""

    def outline(self) -> Tensor:
        size = (self.experts, self.rows, self.columns)
        return torch.empty(size, dtype=torch.int8, device="meta")

    def allocate(self, device: torch.device) -> None:
        self._scales = torch.empty(self.experts, self.rows, device=device)

    def _pack_one(self, matrix: Tensor, expert: int) -> Tensor:
        assert self._scales is not None, "allocate comes first"
        packed, self._scales[expert], _ = int8_vectorwise_quant(
            matrix.to(torch.float16).contiguous()
        )
        return packed

    def unpacked(self, packed: Tensor, expert: int) -> Tensor:
        assert self._scales is not None, "pack comes first"
        scales = (self._scales[expert] / 127).unsqueeze(1)
        return packed[expert].to(self.compute_dtype).mul_(scales)


def quantize_experts(experts: FusedExperts, kind: Quantization, compute_dtype: torch.dtype) -> None:
    """Let a layer's experts hold their matrices packed; no memory is taken.

    Args:
        experts: on the meta device.
        kind: as in recipes.
        compute_dtype: number format of their arithmetic.
    """
    for name in experts.matrices:
        shape, transposed = experts.module.get_parameter(name).shape, experts.transposed
        matrices: PackedMatrices
        if kind == "bnb.int8":
            matrices = EightBitMatrices(shape, transposed=transposed, compute_dtype=compute_dtype)
        else:
            matrices = FourBitMatrices(
                shape,
                kind.removeprefix("bnb."),
                transposed=transposed,
                compute_dtype=compute_dtype,
            )
        hold_packed(experts.module, name, matrices)
