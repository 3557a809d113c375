"""Quantised linear layers and experts of bitsandbytes, frozen, in 4 bits (QLoRA) or 8 (LLM.int8).

QLoRA: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314. LLM.int8: Dettmers et al. 2022,
https://arxiv.org/abs/2208.07339.

The packed weight is a parameter. The scales that unpack it, about 0.016 to 0.06 bytes per weight,
are whole on every rank.
"""

from collections.abc import Container
from copy import copy
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]
from bitsandbytes.functional import (
    QuantState,
    create_dynamic_map,
    dequantize_4bit,
    dequantize_blockwise,
    int8_vectorwise_quant,
    name2qmap,
    quantize_4bit,
    quantize_blockwise,
)
from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt
from torch import Tensor

from ftkit.models.bodies.experts import FusedExperts, PackedMatrices, hold_packed
from ftkit.models.unpacking import UnpackedPerUse
from ftkit.recipe.recipe import Quantization

WEIGHT_BLOCK = 64
"""Weights that share a scale in 4 bits, as in bitsandbytes."""
NESTED_BLOCK = 256
"""Scales that share a scale of their own, if scales are quantised too."""
VALUES_AT_ONCE = 2**18
"""Weights that are quantised at once; a multiple of WEIGHT_BLOCK. The temporaries of whole weights,
several times their size, left holes in the heap."""


def unpacked_4bit(packed: Tensor, state: Any) -> Tensor:
    """Unpack weights that bitsandbytes has packed in 4 bits.

    Args:
        packed: [bytes, 1].
        state: bitsandbytes' QuantState, with the shape of the result.
    """
    shape, block = state.shape, state.blocksize
    if shape[-1] % block:
        # On CPUs with AVX512, bitsandbytes 0.50 takes the scales of other blocks where a row ends
        # within a block. So each block is a row or, if the last one is shorter, all are one.
        numbers = shape.numel()
        state = copy(state)
        state.shape = torch.Size((1, numbers) if numbers % block else (numbers // block, block))
    weight: Tensor = dequantize_4bit(packed, state)
    return weight.view(shape)


class FourBit(UnpackedPerUse, Linear4bit):
    """A linear layer in blocks of 64 weights of 4 bits.

    Its result has the dtype of the computation, like that of a layer under autocast.
    """

    # PEFT must not see `is_loaded_in_4bit`: its own layers for bitsandbytes copy the result.

    def __init__(self, layer: nn.Linear, kind: str, compute_dtype: torch.dtype) -> None:
        """Make the layer on the meta device.

        Args:
            layer: the layer that it replaces.
            kind: nf4 or fp4, with -dq if the scales are quantised too.
            compute_dtype: of the arithmetic.
        """
        self._quant_type, _, nested = kind.partition("-")
        self._nested = bool(nested)
        super().__init__(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=compute_dtype,
            compress_statistics=self._nested,
            quant_type=self._quant_type,
            device="meta",
        )
        self._scales: Tensor | None = None
        # On CPUs with AVX512-BF16, bitsandbytes' forward in eval mode repacks the weight for good,
        # and training would continue with wrong gradients.
        self.support_avx512bf16_for_cpu = False
        bytes_ = (layer.in_features * layer.out_features + 1) // 2
        # Plain integers, which every strategy replicates, shards and gathers like any parameter.
        weight = torch.empty((bytes_, 1), dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)

    def allocate(self, device: torch.device) -> None:
        """Allocate the scales."""
        # Allocated while weights are quantised, they would lie between temporaries and leave holes.
        blocks = -(-self.in_features * self.out_features // WEIGHT_BLOCK)
        dtype = torch.uint8 if self._nested else torch.float32
        self._scales = torch.empty(blocks, dtype=dtype, device=device)

    def pack(self, value: Tensor, *, at_once: int = VALUES_AT_ONCE) -> Tensor:
        """Quantise a weight: keep its scales and return the packed tensor.

        Args:
            value: [out, in] on the device of the computation.
            at_once: weights quantised at once; the result is the same.
        """
        packed, self.quant_state = _quantize_in_pieces(
            value, self._quant_type, self._nested, at_once
        )
        if self._scales is None:
            self.allocate(value.device)
        assert self._scales is not None
        # Into the memory that was allocated before; the new scales are freed.
        self.quant_state.absmax = self._scales.copy_(self.quant_state.absmax)
        self.quant_state.dtype = self.compute_dtype
        return packed

    def unpacked(self, weight: Tensor) -> Tensor:
        """Unpack a weight to [out, in], in the dtype of the computation."""
        return unpacked_4bit(weight, self.quant_state)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert self.quant_state is not None, "pack comes first"
        if self.in_features % WEIGHT_BLOCK:  # see unpacked_4bit
            return F.linear(x, self.unpacked(weight), bias)
        # Transposed, as bitsandbytes below 0.50 needs it; later versions take both.
        return matmul_4bit(x, weight.t(), bias=bias, quant_state=self.quant_state)


class EightBit(UnpackedPerUse, Linear8bitLt):
    """A linear layer of 8-bit integers with one scale per row; activations are not rounded."""

    # bitsandbytes' own product rounds the activations to 8 bits too, on CUDA alone and without the
    # outlier columns of LLM.int8: with the few large features of 7B models, results are 5 % off.

    def __init__(self, layer: nn.Linear, compute_dtype: torch.dtype) -> None:
        super().__init__(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            has_fp16_weights=False,
            device="meta",
        )
        self.compute_dtype = compute_dtype
        weight = torch.empty(layer.weight.shape, dtype=torch.int8, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)

    def pack(self, value: Tensor) -> Tensor:
        """Quantise a weight: keep its scales and return the packed tensor.

        Args:
            value: [out, in] on the device of the computation.
        """
        # The kernel of bitsandbytes takes float16 only; its scale of a row is the largest absolute
        # value.
        half = value.to(torch.float16).contiguous()
        packed, self.state.SCB, _ = int8_vectorwise_quant(half)
        return packed

    def unpacked(self, weight: Tensor) -> Tensor:
        """Unpack a weight to [out, in], in the dtype of the computation."""
        assert self.state.SCB is not None, "pack comes first"
        # 127 stands for the largest absolute value of a row, which is its scale.
        return weight.to(self.compute_dtype).mul_((self.state.SCB / 127).unsqueeze(1))


def _quantize_in_pieces(
    value: Tensor, quant_type: str, nested: bool, at_once: int
) -> tuple[Tensor, QuantState]:
    """Quantise a weight as bitsandbytes' quantize_4bit does, piece by piece.

    Args:
        value: [out, in].
        quant_type: nf4 or fp4.
        nested: whether the scales are quantised too.
        at_once: weights of a piece; the result is the same.
    """
    # In pieces because quantize_4bit takes several times the memory of its input.
    numbers = value.flatten()
    count = numbers.numel()
    scales = torch.empty(-(-count // WEIGHT_BLOCK), device=value.device)
    packed = torch.empty((-(-count // 2), 1), dtype=torch.uint8, device=value.device)
    # Pieces begin at whole blocks, so that scales are those of one call.
    for start in range(0, count, at_once):
        piece = numbers[start : start + at_once].float()
        part, state = quantize_4bit(piece, blocksize=WEIGHT_BLOCK, quant_type=quant_type)
        packed[start // 2 : start // 2 + len(part)] = part
        scales[start // WEIGHT_BLOCK : start // WEIGHT_BLOCK + len(state.absmax)] = state.absmax
    # The state of the last piece has code and block size of all; the rest is replaced.
    state.shape, state.absmax = value.shape, scales
    if nested:
        # Scales are positive: without their mean, the signed code would use half of its values.
        state.nested, state.offset = True, scales.mean()
        state.absmax, state.state2 = quantize_blockwise(
            scales - state.offset, blocksize=NESTED_BLOCK
        )
    return packed, state


def quantize(
    model: nn.Module,
    kind: Quantization,
    compute_dtype: torch.dtype,
    kept: Container[str] = (),
) -> None:
    """Replace linear layers by quantised ones; no memory is taken.

    Args:
        model: on the meta device, before its layers are adapted.
        kind: as in recipes.
        compute_dtype: of their arithmetic.
        kept: names of layers that stay as they are.
    """
    for name, layer in list(model.named_modules()):
        # Exactly nn.Linear: subclasses compute something else, too.
        if type(layer) is nn.Linear and name not in kept:
            model.set_submodule(name, _quantized(layer, kind, compute_dtype))


def _quantized(
    layer: nn.Linear, kind: Quantization, compute_dtype: torch.dtype
) -> FourBit | EightBit:
    if kind == "bnb.int8":
        return EightBit(layer, compute_dtype)
    return FourBit(layer, kind.removeprefix("bnb."), compute_dtype)


def rounded(weight: Tensor, kind: Quantization) -> Tensor:
    """Return the [out, in] float32 weight that a quantised layer computes with.

    Args:
        weight: [out, in].
        kind: as in recipes.
    """
    rows, columns = weight.shape
    outline = nn.Linear(columns, rows, bias=False, device="meta")
    layer = _quantized(outline, kind, torch.float32)
    return layer.unpacked(layer.pack(weight))


def rounded_of_each(weight: Tensor, kind: Quantization, *, transposed: bool) -> Tensor:
    """Return `rounded` matrices of experts, float32, in their layout.

    Args:
        weight: [experts, out, in]; [experts, in, out] if they are transposed.
        kind: as in recipes.
        transposed: whether each matrix is [in, out].
    """
    found = torch.empty(weight.shape, dtype=torch.float32)
    for result, matrix in zip(found, weight, strict=True):
        if transposed:
            result.copy_(rounded(matrix.t(), kind).t())
        else:
            result.copy_(rounded(matrix, kind))
    return found


class FourBitMatrices(PackedMatrices):
    """Matrices of experts in blocks of 64 weights of 4 bits."""

    def __init__(
        self, shape: torch.Size, kind: str, *, transposed: bool, compute_dtype: torch.dtype
    ) -> None:
        """Describe the matrices; no memory is taken.

        Args:
            shape: of the unpacked parameter.
            kind: nf4 or fp4, with -dq if the scales are quantised too.
            transposed: whether the shape is [experts, in, out]; else [experts, out, in].
            compute_dtype: of the arithmetic.
        """
        super().__init__(shape, transposed=transposed, compute_dtype=compute_dtype)
        self._quant_type, _, nested = kind.partition("-")
        self._nested = bool(nested)

    def outline(self) -> Tensor:
        size = (self.experts, -(-self.rows * self.columns // 2))
        return torch.empty(size, dtype=torch.uint8, device="meta")

    def at_once(self, kind: str) -> int:
        # A block of scaled weights would belong to two matrices.
        has_part_of_block = self.rows * self.columns % WEIGHT_BLOCK != 0
        return 1 if has_part_of_block else super().at_once(kind)

    @property
    def _blocks(self) -> int:
        """Number of blocks of a matrix."""
        return -(-self.rows * self.columns // WEIGHT_BLOCK)

    def allocate(self, device: torch.device) -> None:
        if not self._nested:
            self._scales = torch.empty(self.experts, self._blocks, device=device)
            return
        # In whole blocks of their own, so that scales of several matrices are unpacked at once.
        above = -(-self._blocks // NESTED_BLOCK)
        size = (self.experts, above * NESTED_BLOCK)
        self._scales = torch.empty(size, dtype=torch.uint8, device=device)
        self._scales_of_scales = torch.empty(self.experts, above, device=device)
        self._offsets = torch.empty(self.experts, 1, device=device)
        if "dynamic" not in name2qmap:  # which cannot be computed while memory is simulated
            name2qmap["dynamic"] = create_dynamic_map()
        self._code_of_scales = name2qmap["dynamic"].to(device, copy=True)

    def _pack_one(self, matrix: Tensor, expert: int) -> Tensor:
        packed, state = _quantize_in_pieces(matrix, self._quant_type, self._nested, VALUES_AT_ONCE)
        assert self._scales is not None, "allocate comes first"
        self._scales[expert, : self._blocks] = state.absmax
        if self._nested:
            self._scales_of_scales[expert] = state.state2.absmax
            self._offsets[expert] = state.offset
        return packed.flatten()

    def unpacked(self, packed: Tensor, experts: slice) -> Tensor:
        of_some = packed[experts]
        # The state of one weight whose rows are those of all these matrices.
        state = QuantState(
            absmax=self._unpacked_scales(experts),
            shape=torch.Size((len(of_some), self.rows, self.columns)),
            blocksize=WEIGHT_BLOCK,
            quant_type=self._quant_type,
            dtype=self.compute_dtype,
        )
        return unpacked_4bit(of_some.view(-1, 1), state)

    def _unpacked_scales(self, experts: slice) -> Tensor:
        """Return the scales of some experts' matrices, in a row; float32."""
        assert self._scales is not None, "pack comes first"
        scales = self._scales[experts]
        if self._nested:
            state = QuantState(
                absmax=self._scales_of_scales[experts],
                code=self._code_of_scales,
                blocksize=NESTED_BLOCK,
                dtype=torch.float32,
            )
            scales = dequantize_blockwise(scales, state).add_(self._offsets[experts])
        return scales[:, : self._blocks].flatten()


class EightBitMatrices(PackedMatrices):
    """Matrices of experts in 8-bit integers with one scale per row."""

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

    def unpacked(self, packed: Tensor, experts: slice) -> Tensor:
        assert self._scales is not None, "pack comes first"
        scales = (self._scales[experts] / 127).unsqueeze(-1)
        return packed[experts].to(self.compute_dtype).mul_(scales)


def quantize_experts(experts: FusedExperts, kind: Quantization, compute_dtype: torch.dtype) -> None:
    """Pack the matrices of a layer's experts; no memory is taken.

    Args:
        experts: on the meta device.
        kind: as in recipes.
        compute_dtype: of their arithmetic.
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
