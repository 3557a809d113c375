"""Weights that a model holds as the files of its base do, in FP8 or MXFP4: quantize: stored.

They are frozen, and unpacked for each use to the numbers that are read where they are not kept.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.errors import UserError
from ftkit.extensions.packed_weights.reading import (
    E2M1,
    ScaledFloats,
    dtype_before,
    e2m1,
    scaled_floats,
    scales_in_row,
    times_scales,
    unpacked,
)
from ftkit.extensions.packed_weights.stored_forms import PackedForm
from ftkit.models.bodies.body import Body
from ftkit.models.bodies.experts import PackedMatrices, hold_packed
from ftkit.models.kept_weights import StoredWeights, cannot_stay
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.models.pretrained.weight_files import HeldParameter, WeightStorage, WeightTensor
from ftkit.models.unpacking import UnpackedPerUse

MXFP4_BLOCK = 32
"""Weights that share a scale in MXFP4."""


class PackedWeights(StoredWeights):
    """Weights in one of the forms that `reading` unpacks; they can stay in FP8 and MXFP4."""

    def __init__(self, form: PackedForm) -> None:
        self._form = form

    def unpacked(self, stored: Mapping[str, WeightTensor]) -> dict[str, WeightTensor]:
        return unpacked(stored, self._form, dtype_before(self._form))

    def as_stored(
        self, stored: Mapping[str, WeightTensor], storage: WeightStorage
    ) -> dict[str, Callable[[], ScaledFloats]]:
        if not self._form.is_fp8:
            return {}
        floats, scales = map(storage.holders, scaled_floats(stored, self._form))
        whole = storage.holders(self.unpacked(stored))
        # Experts may be partly in another form, and are one parameter.
        return {
            name: partial(_read_both, holder, scales[name])
            for name, holder in floats.items()
            if holder.names == whole[name].names
        }

    def keep(self, body: Body, base: BaseModel, compute_dtype: torch.dtype) -> None:
        if self._form.is_fp8:
            _keep_fp8(self._form, body, base, compute_dtype)
        else:
            _keep_mxfp4(body, compute_dtype)


def _read_both(floats: HeldParameter, scales: HeldParameter) -> ScaledFloats:
    return ScaledFloats(floats.read(), scales.read())


def _keep_mxfp4(body: Body, compute_dtype: torch.dtype) -> None:
    for experts in body.fused_experts():
        for name in experts.matrices:
            shape = experts.module.get_parameter(name).shape
            matrices = Mxfp4Matrices(
                shape, transposed=experts.transposed, compute_dtype=compute_dtype
            )
            hold_packed(experts.module, name, matrices)


def _keep_fp8(form: PackedForm, body: Body, base: BaseModel, compute_dtype: torch.dtype) -> None:
    in_fp8, found = _is_in_fp8(form, base), False
    names = {module: name for name, module in body.named_modules()}
    for name, layer in list(body.blocks.named_modules()):
        # Exactly nn.Linear: subclasses compute something else, too.
        is_free = type(layer) is nn.Linear and name not in body.kept_in_full
        if is_free and in_fp8(f"{names[layer]}.weight"):
            body.blocks.set_submodule(name, Fp8(layer, form, compute_dtype))
            found = True
    for experts in body.fused_experts():
        # All matrices of a layer or none: they are computed together.
        if not all(in_fp8(f"{names[experts.module]}.{name}") for name in experts.matrices):
            continue
        if experts.transposed:
            raise cannot_stay(base, "experts whose scales lie along the rows of transformers")
        for name in experts.matrices:
            shape = experts.module.get_parameter(name).shape
            hold_packed(experts.module, name, Fp8Matrices(shape, form, compute_dtype))
        found = True
    if not found:
        raise cannot_stay(base, "plain numbers in its blocks")


def _is_in_fp8(form: PackedForm, base: BaseModel) -> Callable[[str], bool]:
    """Return a function that tells by our name whether a parameter is stored in FP8.

    Its files decide; without weights its settings, of the layers that hold a matrix.
    """
    if base.has_weights:
        return base.as_stored.__contains__
    naming = base.naming

    def by_settings(name: str) -> bool:
        module, _, _ = naming.stored_in(name)[0].rpartition(".weight")
        return not form.keeps(module or name)

    return by_settings


class Fp8(UnpackedPerUse):
    """A linear layer of 8-bit floats, with a scale for each block of columns in each row."""

    takes_stored = True

    def __init__(self, layer: nn.Linear, form: PackedForm, compute_dtype: torch.dtype) -> None:
        """Make the layer on the meta device.

        Args:
            layer: the layer that it replaces.
            form: how the files store it.
            compute_dtype: of the arithmetic.
        """
        has_bias = layer.bias is not None
        super().__init__(layer.in_features, layer.out_features, bias=has_bias, device="meta")
        self.compute_dtype = compute_dtype
        self._form, self._floats = form, torch.float8_e4m3fn
        self._scales: Tensor | None = None
        # Plain integers, which every strategy replicates, shards and gathers like any parameter.
        weight = torch.empty(layer.weight.shape, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)

    def allocate(self, device: torch.device) -> None:
        size = (self.out_features, scales_in_row(self.in_features, self._form))
        self._scales = torch.empty(size, device=device)

    def pack(self, value: Tensor | ScaledFloats) -> Tensor:
        if isinstance(value, Tensor):
            raise _not_of_files()
        self._floats, self._scales = value.floats.dtype, _held(self._scales, value.scales)
        return value.floats.view(torch.uint8)

    def unpacked(self, weight: Tensor) -> Tensor:
        assert self._scales is not None, "pack comes first"
        floats, kind = weight.view(self._floats), self.device_kind
        return _unpacked(floats, self._scales, self._form, self.compute_dtype, kind)


class Fp8Matrices(PackedMatrices):
    """Matrices of experts in 8-bit floats, with a scale for each block of columns in each row."""

    takes_stored = True

    def __init__(self, shape: torch.Size, form: PackedForm, compute_dtype: torch.dtype) -> None:
        """Describe the matrices; no memory is taken.

        Args:
            shape: of the unpacked parameter, [experts, out, in].
            form: how the files store it.
            compute_dtype: of the arithmetic.
        """
        super().__init__(shape, transposed=False, compute_dtype=compute_dtype)
        self._form, self._floats = form, torch.float8_e4m3fn

    def outline(self) -> Tensor:
        size = (self.experts, self.rows, self.columns)
        return torch.empty(size, dtype=torch.uint8, device="meta")

    def allocate(self, device: torch.device) -> None:
        size = (self.experts, self.rows, scales_in_row(self.columns, self._form))
        self._scales = torch.empty(size, device=device)

    def pack(self, value: Tensor | ScaledFloats, device: torch.device | None = None) -> Tensor:
        if isinstance(value, Tensor):
            raise _not_of_files()
        self._floats = value.floats.dtype
        self._scales = _held(self._scales, value.scales.to(device))
        return value.floats.view(torch.uint8)

    def _pack_one(self, matrix: Tensor, expert: int) -> Tensor:
        raise _not_of_files()

    def unpacked(self, packed: Tensor, experts: slice) -> Tensor:
        assert self._scales is not None, "pack comes first"
        floats, scales = packed[experts].view(self._floats), self._scales[experts]
        return _unpacked(floats, scales, self._form, self.compute_dtype, self.device_kind)


def _held(allocated: Tensor | None, scales: Tensor) -> Tensor:
    """Keep scales in the memory that was allocated for them, if the settings said how many."""
    if allocated is None or allocated.shape != scales.shape:
        return scales.contiguous()
    return allocated.copy_(scales)


def _unpacked(
    floats: Tensor, scales: Tensor, form: PackedForm, dtype: torch.dtype, kind: str | None
) -> Tensor:
    # First as they are read where they are not kept: in the number format of the files.
    return times_scales(floats, scales, dtype_before(form), form, kind=kind).to(dtype)


def _not_of_files() -> UserError:
    return UserError(
        "quantize is stored, which keeps the FP8 weights of the base model's files, but other "
        "weights are to be loaded. Leave quantize out, or try --quantize bnb.nf4-dq."
    )


class Mxfp4Matrices(PackedMatrices):
    """Matrices of experts as MXFP4 stores them: blocks of 32 floats of 4 bits with a power of two.

    Packing finds exactly the numbers of a weight that was stored so: their largest one decides a
    power of two with which all of them are among the 16 floats.
    Open Compute Project, Microscaling Formats (MX) Specification 1.0.
    """

    def outline(self) -> Tensor:
        size = (self.experts, self.rows * self.columns // 2)
        return torch.empty(size, dtype=torch.uint8, device="meta")

    def allocate(self, device: torch.device) -> None:
        size = (self.experts, self.rows * self.columns // MXFP4_BLOCK)
        self._scales = torch.empty(size, dtype=torch.uint8, device=device)

    def _pack_one(self, matrix: Tensor, expert: int) -> Tensor:
        assert self._scales is not None, "allocate comes first"
        if self.columns % MXFP4_BLOCK:
            raise _not_in_mxfp4()
        blocks = matrix.float().contiguous().view(-1, MXFP4_BLOCK)
        # frexp gives a fraction in [0.5, 1): the largest number becomes at least 4 and less than 8.
        exponents = blocks.abs().amax(-1).frexp().exponent.clamp(-124, 127) - 3
        numbers = torch.ldexp(blocks, -exponents.unsqueeze(-1))
        levels = torch.tensor(E2M1, device=matrix.device)
        codes = torch.searchsorted(levels, numbers.abs(), out_int32=True).to(torch.uint8)
        codes = codes.add_(numbers.signbit(), alpha=8).view(-1)
        packed = codes[::2] | (codes[1::2] << 4)
        if not _floats_of(packed, torch.float32).view_as(numbers).equal(numbers):
            raise _not_in_mxfp4()
        self._scales[expert] = (exponents + 127).to(torch.uint8)
        return packed

    def unpacked(self, packed: Tensor, experts: slice) -> Tensor:
        assert self._scales is not None, "pack comes first"
        numbers = _floats_of(packed[experts], self.compute_dtype).view(-1, MXFP4_BLOCK)
        # In float32: in float16 the smallest powers would be 0 though products are not.
        factors = (self._scales[experts].float() - 127).exp2()
        return numbers.mul_(factors.view(-1, 1)).view(-1, self.rows, self.columns)


def _floats_of(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [..., 2] floats of bytes, that of their lower 4 bits first."""
    # By byte: half as many look-ups, whose indices take more memory than the result.
    every = torch.arange(256, dtype=torch.uint8, device=packed.device)
    return e2m1(every[:, None]).to(dtype)[packed.int()]


def _not_in_mxfp4() -> UserError:
    return UserError(
        "quantize is stored, which keeps weights in MXFP4, but the files have experts in another "
        "form than their config.json says. Try --quantize bnb.nf4-dq."
    )
