"""Weights that are published in 4 or 8 bits, read as plain ones.

What a quantiser wrote as several tensors, numbers and their scales, appears as one tensor of its
original name, shape and number format, which is unpacked when it is read. Each reader follows the
published layout and gives the numbers that the library of that layout computes with.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ftkit.errors import UserError
from ftkit.extensions.packed_weights.stored_forms import PackedForm
from ftkit.models.pretrained.weight_files import WeightTensor
from ftkit.utils.accelerators.kinds import HOST_KIND

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_PIECE = 2**24
"""Numbers that are unpacked at once: float32 copies stay at 64 MiB."""
_PIECE_ON_HOST = 2**19
"""The same of 8 bits on a CPU, whose caches hold such copies: all at once takes half as long again.
"""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of 4-bit floats by their lower three bits (Open Compute's microscaling formats)."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns that AWQ packs into one word, from its lowest bits."""
_UNUSED = (
    *("input_scale", "activation_scale", ".input_global_scale", ".input_zero_point"),
    *(".k_scale", ".v_scale", ".output_scale", ".weight_format"),
)
"""Ends of tensors that only matter where activations or the cache are quantised too."""

Parts = Mapping[str, WeightTensor]
"""Tensors of one weight, by the end of their names."""


@dataclass(frozen=True)
class _Layout:
    """How a weight is divided into tensors; ends of names follow its own."""

    packed: str
    """End of the tensor that holds its numbers, in place of `plain`."""
    needed: tuple[str, ...]
    """Ends of the tensors that must lie beside it."""
    shape: Callable[[Parts, PackedForm], torch.Size]
    read: Callable[[Parts, torch.dtype, PackedForm], Tensor]
    plain: str = ""
    """End of the weight's own name."""
    dtypes: tuple[torch.dtype, ...] = (torch.uint8, torch.int8, torch.int32, *_FP8)
    """Number formats of the packed tensor."""
    further: tuple[str, ...] = ()
    """Ends of tensors that may lie beside it."""

    def parts(self, name: str, stored: Mapping[str, WeightTensor]) -> tuple[str, Parts] | None:
        """Return the name of the weight that a tensor belongs to, and its tensors; or None."""
        if not name.endswith(self.packed) or stored[name].dtype not in self.dtypes:
            return None
        stem = name.removesuffix(self.packed)
        ends = (self.packed, *self.needed, *self.further)
        parts = {end: stored[stem + end] for end in ends if stem + end in stored}
        if not all(end in parts for end in self.needed):
            return None
        return stem + self.plain, parts


def unpacked(
    stored: Mapping[str, WeightTensor], form: PackedForm, dtype: torch.dtype
) -> dict[str, WeightTensor]:
    """Return stored tensors with one plain tensor in place of those of each packed weight.

    Args:
        stored: all tensors of the files, by name.
        form: how the weights are stored, from the settings.
        dtype: number format of the weights before they were quantised.
    """
    plain: dict[str, WeightTensor] = {}
    used: set[str] = set()
    for name in stored:
        for layout in _layouts(form):
            found = layout.parts(name, stored)
            if found is None:
                continue
            ours, parts = found
            read = partial(layout.read, parts, _dtype_of(parts, dtype), form)
            plain[ours] = WeightTensor(layout.shape(parts, form), _dtype_of(parts, dtype), read)
            used |= {ours.removesuffix(layout.plain) + end for end in parts}
            break
    rest = {
        name: tensor
        for name, tensor in stored.items()
        if name not in used and not name.endswith(_UNUSED)
    }
    return rest | plain


def dtype_before(form: PackedForm) -> torch.dtype:
    """Return the number format of the weights before they were stored."""
    found = getattr(torch, form.dtype, None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


@dataclass(frozen=True)
class ScaledFloats:
    """A weight in floats of 8 bits with scales, as files hold it."""

    floats: Tensor
    """[..., out, in] in one of torch's formats of 8 bits."""
    scales: Tensor
    """[..., out, blocks] float32: the scale of each block of columns in each row."""

    def to(self, device: torch.device) -> "ScaledFloats":
        """Copy to a device."""
        return ScaledFloats(self.floats.to(device), self.scales.to(device))


def scaled_floats(
    stored: Mapping[str, WeightTensor], form: PackedForm
) -> tuple[dict[str, WeightTensor], dict[str, WeightTensor]]:
    """Return the FP8 weights among stored tensors, and their scales for each row, by name.

    Both are divided, stacked and joined by rows like the weight.

    Args:
        stored: all tensors of the files, by name.
        form: how the weights are stored, from the settings.
    """
    floats, scales = {}, {}
    for name in stored:
        for layout in _layouts(form):
            found = layout.parts(name, stored)
            if found is None or stored[name].dtype not in _FP8:
                continue
            ours, parts = found
            size, scale = stored[name].shape, parts[layout.needed[0]]
            count = scale.shape[-1] if len(scale.shape) > 1 else 1
            read = partial(_scales_of_rows, scale, size, form)
            floats[ours] = stored[name]
            scales[ours] = WeightTensor(torch.Size((*size[:-1], count)), torch.float32, read)
            break
    return floats, scales


def _layouts(form: PackedForm) -> Iterator[_Layout]:
    if form.method in ("gptq", "awq"):
        yield _GPTQ if form.method == "gptq" else _AWQ
    elif form.method == "bitsandbytes":
        yield from (_BNB_NF4, _BNB_FP4, _BNB_INT8)
    elif form.method == "mxfp4":
        yield _MXFP4
    elif form.method == "compressed-tensors":
        yield from (_NVFP4_COMPRESSED, _MXFP4_COMPRESSED, _PACKED_INTEGERS, _SCALED)
    elif form.method == "modelopt":
        yield from (_NVFP4, _SCALED)
    else:
        yield from (_FP8_BLOCKS, _FP8_OF_DEEPSEEK, *_FP4_OF_DEEPSEEK, _SCALED)


def _dtype_of(parts: Parts, dtype: torch.dtype) -> torch.dtype:
    """The number format of a weight: that of its scales where they are 16-bit floats."""
    scales = parts.get(".scales")
    return scales.dtype if scales is not None else dtype


# --- Scaled numbers: FP8 and integers ------------------------------------------------------------


def _scaled(
    size: torch.Size,
    dtype: torch.dtype,
    numbers: Callable[[slice], Tensor],
    factors: Callable[[slice], Tensor],
) -> Tensor:
    """Return a weight of [..., out, in], computed in float32, some rows at a time.

    Args:
        size: of the weight; all dimensions but the last are rows.
        dtype: of the result.
        numbers: give [rows, in] of a slice of all rows.
        factors: the same, by which they are multiplied; may be [rows, 1].
    """
    result = torch.empty(size, dtype=dtype)
    rows = result.view(-1, size[-1])
    at_once = max(1, _PIECE // size[-1])
    for start in range(0, len(rows), at_once):
        piece = slice(start, min(start + at_once, len(rows)))
        rows[piece] = numbers(piece).float() * factors(piece)
    return result


def _read_scaled(
    packed: str, scale: str, zero: str | None, parts: Parts, dtype: torch.dtype, form: PackedForm
) -> Tensor:
    numbers = parts[packed].read()
    scales = _scales_of_rows(parts[scale], numbers.shape, form)
    if zero is None or zero not in parts:
        return times_scales(numbers, scales, dtype, form)
    zeros = _of_rows(parts[zero].read(), numbers.shape, form)
    return times_scales(numbers, scales, dtype, form, zeros)


def times_scales(
    numbers: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    form: PackedForm,
    zeros: Tensor | None = None,
    *,
    kind: str | None = None,
) -> Tensor:
    """Return numbers times their scales: [..., out, in], computed in float32, in pieces.

    Args:
        numbers: [..., out, in], of 8 bits.
        scales: [..., out, blocks] float32, of each block of columns.
        dtype: of the result.
        form: how they are stored.
        zeros: like the scales; subtracted from the numbers.
        kind: of the device that fake numbers stand for, which have shapes alone; None: they are
            real.
    """
    columns = numbers.size(-1)
    block = _block(columns, scales.size(-1), form.block[1] if form.block else 0)
    result = torch.empty(numbers.shape, dtype=dtype, device=numbers.device)
    rows, flat = result.view(-1, columns), numbers.reshape(-1, columns)
    factors = scales.reshape(-1, scales.size(-1))
    whole = columns // block  # blocks; the last one may have fewer columns
    is_on_host = (kind or numbers.device.type) == HOST_KIND
    at_once = max(1, (_PIECE_ON_HOST if is_on_host else _PIECE) // columns)
    starts = range(0, len(rows), at_once)
    for start in starts if kind is None else starts[:1]:  # a fake piece stands for all
        piece = slice(start, start + at_once)
        values, of_blocks = _float32(flat[piece], is_real=kind is None), factors[piece]
        blocks = values[:, : whole * block].unflatten(1, (whole, block))
        rest = values[:, whole * block :]
        if zeros is not None:
            of_zeros = zeros.reshape(factors.shape)[piece]
            blocks.sub_(of_zeros[:, :whole, None])
            rest.sub_(of_zeros[:, whole:])
        blocks.mul_(of_blocks[:, :whole, None])
        rest.mul_(of_blocks[:, whole:])
        rows[piece] = values
    return result


def _float32(numbers: Tensor, *, is_real: bool) -> Tensor:
    """Return numbers of 8 bits as float32, in memory of their own."""
    # A compiler makes one loop of all of it, and none of a look at the numbers.
    is_usual = numbers.dtype == torch.float8_e4m3fn and numbers.device.type == HOST_KIND
    if not is_usual or torch.compiler.is_compiling():
        return numbers.float()
    # torch 2.13 converts these one by one on CPUs, which takes five times as long as all of this.
    # Their bits are those of a float16 that is smaller by 2**8, because the two biases differ by 8.
    bits = numbers.view(torch.int8).to(torch.int16)
    if is_real and (bits & 127).max() == 127:  # NaN
        return numbers.float()
    return (bits << 7).bitwise_and_(_SIGN_AND_NUMBER).view(torch.float16).float().mul_(2**8)


_SIGN_AND_NUMBER = 0xBF80 - 2**16
"""Bits of a float16 that come from 8 bits: all but the highest of the exponent, and 7 of the
fraction. An int16."""


def _scales_of_rows(part: WeightTensor, size: torch.Size, form: PackedForm) -> Tensor:
    """Read the scales of a weight: [..., out, blocks] float32, of each row."""
    return _of_rows(_floats(part.read()), size, form)


def _of_rows(found: Tensor, size: torch.Size, form: PackedForm) -> Tensor:
    """Repeat what belongs to blocks of rows for each row: [..., out, blocks] float32.

    Args:
        found: of the whole weight, of each row (or matrix) or of each block of both dimensions.
        size: of the weight.
        form: how it is stored.
    """
    if found.ndim < 2 or found.numel() == 1:
        found = found.reshape(-1, *[1] * max(1, len(size) - 1))
    of_matrix = found.shape[-2:]
    rows = _block(size[-2], of_matrix[0], form.block[0] if form.block else 0)
    found = found.float().expand(*size[:-2], *of_matrix)
    return found.repeat_interleave(rows, dim=-2)[..., : size[-2], :]


def scales_in_row(columns: int, form: PackedForm) -> int:
    """Number of scales that a row of an FP8 weight has, by the settings."""
    return -(-columns // form.block[1]) if form.block else 1


def _block(whole: int, count: int, published: int) -> int:
    """Numbers that share a scale in one dimension."""
    if published and -(-whole // published) == count:
        return published
    if whole % count:
        raise UserError(
            f"A weight of {whole} rows or columns has {count} scales, which does not divide it, "
            "and its config.json names no weight_block_size that explains it. Download it again."
        )
    return whole // count


def _floats(scales: Tensor) -> Tensor:
    """Scales as float32; bytes are exponents of 2 with a bias of 127 (E8M0)."""
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


_FP8_BLOCKS = _Layout(
    packed="",
    needed=("_scale_inv",),
    shape=lambda parts, form: parts[""].shape,
    read=partial(_read_scaled, "", "_scale_inv", None),
    dtypes=_FP8,
)
_FP8_OF_DEEPSEEK = _Layout(  # V4
    packed=".weight",
    needed=(".scale",),
    shape=lambda parts, form: parts[".weight"].shape,
    read=partial(_read_scaled, ".weight", ".scale", None),
    plain=".weight",
    dtypes=_FP8,
)
_SCALED = _Layout(
    packed="",
    needed=("_scale",),
    shape=lambda parts, form: parts[""].shape,
    read=partial(_read_scaled, "", "_scale", "_zero_point"),
    dtypes=(*_FP8, torch.int8),
    further=("_zero_point",),
)
_BNB_INT8 = _Layout(
    packed=".weight",
    needed=(".SCB",),
    shape=lambda parts, form: parts[".weight"].shape,
    # SCB is the largest number of each row, which 127 stands for.
    read=lambda parts, dtype, form: _scaled(
        parts[".weight"].shape,
        dtype,
        lambda piece: parts[".weight"].read()[piece],
        lambda piece: parts[".SCB"].read()[piece, None].float() / 127,
    ),
    plain=".weight",
    dtypes=(torch.int8,),
    further=(".weight_format",),
)


# --- 4-bit floats: MXFP4 and NVFP4 ---------------------------------------------------------------


def e2m1(packed: Tensor) -> Tensor:
    """Return [..., 2 * bytes] float32 of bytes with two 4-bit floats each, the lower bits first."""
    signed = [*E2M1, *(-number for number in E2M1)]
    table = torch.tensor(signed, device=packed.device)
    both = torch.stack((packed & 15, packed >> 4), dim=-1)
    return table[both.int()].flatten(-2)


def _read_mxfp4(parts: Parts, dtype: torch.dtype, form: PackedForm) -> Tensor:
    """gpt-oss: [experts, out, groups, 16] bytes and an exponent of each group."""
    blocks, scales = parts["_blocks"].read(), parts["_scales"].read()
    size = torch.Size((*blocks.shape[:-2], blocks.size(-2) * blocks.size(-1) * 2))
    flat, exponents = blocks.reshape(-1, *blocks.shape[-2:]), scales.reshape(-1, scales.size(-1))
    unpacked_ = _scaled(
        size,
        dtype,
        lambda piece: e2m1(flat[piece]).flatten(-2),
        lambda piece: _floats(exponents[piece]).repeat_interleave(
            size[-1] // exponents.size(-1), -1
        ),
    )
    # transformers' parameter is [experts, in, out].
    return unpacked_.transpose(-2, -1).contiguous()


def _size_of_mxfp4(parts: Parts, form: PackedForm) -> torch.Size:
    *outer, rows, groups, width = parts["_blocks"].shape
    return torch.Size((*outer, groups * width * 2, rows))


_MXFP4 = _Layout(
    packed="_blocks",
    needed=("_scales",),
    shape=_size_of_mxfp4,
    read=_read_mxfp4,
    dtypes=(torch.uint8,),
)


def _read_nvfp4(
    packed: str, whole: str, invert: bool, parts: Parts, dtype: torch.dtype, form: PackedForm
) -> Tensor:
    """Two numbers in a byte, an FP8 scale for 16 of them, and one scale of the whole."""
    numbers, scales = parts[packed].read(), parts["_scale"].read()
    of_all = parts[whole].read().float().reshape(())
    size = _doubled(packed, parts, form)

    def factors(piece: slice) -> Tensor:
        of_blocks = scales[piece].float()
        of_blocks = of_blocks / of_all if invert else of_blocks * of_all
        return of_blocks.repeat_interleave(size[-1] // scales.size(-1), dim=-1)

    return _scaled(size, dtype, lambda piece: e2m1(numbers[piece]), factors)


def _doubled(packed: str, parts: Parts, form: PackedForm) -> torch.Size:
    *rows, width = parts[packed].shape
    return torch.Size((*rows, 2 * width))


def _read_mxfp4_rows(
    packed: str, scale: str, parts: Parts, dtype: torch.dtype, form: PackedForm
) -> Tensor:
    """[out, in / 2] bytes and an exponent of each group of inputs."""
    numbers, exponents = parts[packed].read().view(torch.uint8), parts[scale].read()
    size = _doubled(packed, parts, form)
    return _scaled(
        size,
        dtype,
        lambda piece: e2m1(numbers[piece]),
        lambda piece: _floats(exponents[piece]).repeat_interleave(
            size[-1] // exponents.size(-1), -1
        ),
    )


_NVFP4 = _Layout(  # ModelOpt
    packed="",
    needed=("_scale", "_scale_2"),
    shape=partial(_doubled, ""),
    read=partial(_read_nvfp4, "", "_scale_2", False),
    dtypes=(torch.uint8,),
)
_NVFP4_COMPRESSED = _Layout(  # compressed-tensors
    packed="_packed",
    needed=("_scale", "_global_scale"),
    shape=partial(_doubled, "_packed"),
    read=partial(_read_nvfp4, "_packed", "_global_scale", True),
    dtypes=(torch.uint8,),
)
_MXFP4_COMPRESSED = _Layout(
    packed="_packed",
    needed=("_scale",),
    shape=partial(_doubled, "_packed"),
    read=partial(_read_mxfp4_rows, "_packed", "_scale"),
    dtypes=(torch.uint8,),
)
_FP4_OF_DEEPSEEK = tuple(  # the experts of V4; the second as transformers saves them
    _Layout(
        packed=".weight",
        needed=(scale,),
        shape=partial(_doubled, ".weight"),
        read=partial(_read_mxfp4_rows, ".weight", scale),
        plain=".weight",
        dtypes=(torch.int8,),
    )
    for scale in (".scale", ".weight_scale_inv")
)


# --- Packed integers: GPTQ, AWQ and compressed-tensors -------------------------------------------


def _integers(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack int32 words along a dimension, from the lowest bits: int32 from 0 to 2**bits - 1."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    shape = [1] * (words.ndim + 1)
    dim = dim % words.ndim
    shape[dim + 1] = len(shifts)
    each = (words.unsqueeze(dim + 1) >> shifts.view(shape)) & (2**bits - 1)
    return each.flatten(dim, dim + 1)


def _read_gptq(parts: Parts, dtype: torch.dtype, form: PackedForm) -> Tensor:
    """[in / 8, out] words; scales and zeros of groups of inputs, which g_idx may mix."""
    words, scales = parts[".qweight"].read(), parts[".scales"].read()
    zeros = _integers(parts[".qzeros"].read(), form.bits, -1)
    # The first version stores zeros less one, in bits that wrap around.
    if form.zeros_less_one:
        zeros = (zeros + 1) & (2**form.bits - 1)
    size = _size_of_gptq(parts, form)
    groups = (
        parts[".g_idx"].read().long()
        if ".g_idx" in parts
        else torch.arange(size[1]) // (size[1] // len(scales))
    )
    result = torch.empty(size, dtype=dtype)
    at_once = max(1, _PIECE // size[1])
    for start in range(0, size[0], at_once):
        piece = slice(start, start + at_once)
        numbers = _integers(words[:, piece], form.bits, 0) - zeros[:, piece][groups]
        result[piece] = (numbers.float() * scales[:, piece].float()[groups]).t()
    return result


def _read_awq(parts: Parts, dtype: torch.dtype, form: PackedForm) -> Tensor:
    """[in, out / 8] words in AWQ's order; scales and zeros of groups of inputs."""
    scales = parts[".scales"].read()

    def ordered(words: Tensor) -> Tensor:
        each = _integers(words, 4, -1).unflatten(-1, (-1, 8))
        return each[..., torch.tensor(_AWQ_ORDER).argsort()].flatten(-2)

    zeros = ordered(parts[".qzeros"].read())
    words = parts[".qweight"].read()
    size = _size_of_awq(parts, form)
    of_group = size[1] // len(scales)
    result = torch.empty(size, dtype=dtype)
    at_once = max(1, _PIECE // size[0])
    for start in range(0, size[1], at_once):
        piece = slice(start, min(start + at_once, size[1]))
        groups = torch.arange(piece.start, piece.stop) // of_group
        numbers = ordered(words[piece]) - zeros[groups]
        result[:, piece] = (numbers.float() * scales[groups].float()).t()
    return result


def _size_of_gptq(parts: Parts, form: PackedForm) -> torch.Size:
    rows, width = parts[".qweight"].shape
    return torch.Size((width, rows * 32 // form.bits))


def _size_of_awq(parts: Parts, form: PackedForm) -> torch.Size:
    rows, width = parts[".qweight"].shape
    return torch.Size((width * 8, rows))


_GPTQ = _Layout(
    packed=".qweight",
    needed=(".qzeros", ".scales"),
    shape=_size_of_gptq,
    read=_read_gptq,
    plain=".weight",
    dtypes=(torch.int32,),
    further=(".g_idx",),
)
_AWQ = _Layout(
    packed=".qweight",
    needed=(".qzeros", ".scales"),
    shape=_size_of_awq,
    read=_read_awq,
    plain=".weight",
    dtypes=(torch.int32,),
)


def _read_integers(parts: Parts, dtype: torch.dtype, form: PackedForm) -> Tensor:
    """[out, in / 8] words of numbers around the middle; scales and zeros of groups of inputs."""
    words, scales = parts["_packed"].read(), parts["_scale"].read()
    rows, columns = size = _size_of_integers(parts, form)
    scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    scales = scales.expand(rows, -1)
    bits, middle = _bits_of(words, columns), 0
    zeros = parts["_zero_point"].read() if "_zero_point" in parts else None
    if zeros is None:
        middle = 2 ** (bits - 1)
    elif zeros.dtype == torch.int32:  # packed by rows; around the middle, as the numbers are
        zeros = _integers(zeros, bits, 0)[:rows]
    else:
        zeros = (zeros.int() + 2 ** (bits - 1)).reshape(-1, scales.size(1)).expand(rows, -1)
    of_group = -(-columns // scales.size(-1))
    groups = torch.arange(columns) // of_group
    if "_g_idx" in parts and bool((parts["_g_idx"].read() >= 0).all()):
        groups = parts["_g_idx"].read().long()

    def numbers(piece: slice) -> Tensor:
        found = _integers(words[piece], bits, -1)[:, :columns] - middle
        return found if zeros is None else found - zeros[piece][:, groups]

    return _scaled(size, dtype, numbers, lambda piece: scales[piece].float()[:, groups])


def _bits_of(words: Tensor, columns: int) -> int:
    """Bits of numbers, given [rows, words] of them."""
    for bits in (1, 2, 4, 8):
        if -(-columns * bits // 32) == words.size(-1):
            return bits
    raise UserError(
        f"{columns} columns in {words.size(-1)} words are not numbers of 1, 2, 4 or 8 bits. "
        "Download the model again, or give the original one."
    )


def _size_of_integers(parts: Parts, form: PackedForm) -> torch.Size:
    return torch.Size(parts["_shape"].read().tolist())


_PACKED_INTEGERS = _Layout(
    packed="_packed",
    needed=("_scale", "_shape"),
    shape=_size_of_integers,
    read=_read_integers,
    dtypes=(torch.int32,),
    further=("_zero_point", "_g_idx"),
)


# --- bitsandbytes --------------------------------------------------------------------------------


def _read_bnb(kind: str, parts: Parts, dtype: torch.dtype, form: PackedForm) -> Tensor:
    from bitsandbytes.functional import QuantState

    from ftkit.models.quantization import unpacked_4bit

    facts = {end.rpartition(".weight.")[2]: part.read() for end, part in parts.items()}
    packed = facts.pop(".weight")
    state = QuantState.from_dict(facts, device=torch.device("cpu"))
    return unpacked_4bit(packed, state).to(dtype)


def _size_of_bnb(kind: str, parts: Parts, form: PackedForm) -> torch.Size:
    facts = json.loads(bytes(parts[_state(kind)].read().tolist()))
    return torch.Size(facts["shape"])


def _state(kind: str) -> str:
    return f".weight.quant_state.bitsandbytes__{kind}"


def _bnb(kind: str) -> _Layout:
    return _Layout(
        packed=".weight",
        needed=(".weight.absmax", ".weight.quant_map", _state(kind)),
        shape=partial(_size_of_bnb, kind),
        read=partial(_read_bnb, kind),
        plain=".weight",
        dtypes=(torch.uint8,),
        further=(".weight.nested_absmax", ".weight.nested_quant_map"),
    )


_BNB_NF4, _BNB_FP4 = _bnb("nf4"), _bnb("fp4")
