"""Writer of GGUF files: header first, then each tensor at its place, some rows at a time.

The package gguf packs header and numbers. Its own writer of tensors wants each as a whole and in
order; here they come in the order of the model's modules.
"""

import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from ftkit.errors import UserError
from ftkit.exchange.gguf.metadata import GgufMetadata
from ftkit.models.pretrained.gguf.header import BLOCKS
from ftkit.recipe.options import GgufNumbers
from ftkit.utils.progress import OnProgress

_ALIGNMENT = 32
"""GGUF's own, where general.alignment is not said."""
_CHUNK_NUMBERS = 2**22
"""Numbers held in memory as float32 at a time, unless a row has more."""
_LARGEST_F16 = 65504.0
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
"""general.file_type: of most tensors; llama.cpp's llama_ftype."""
QUANTIZATION_VERSION = 2
"""general.quantization_version: of how blocks are packed."""


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """A tensor that a file will hold."""

    shape: tuple[int, ...]
    kind: str
    """A key of `BLOCKS`."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without padding."""
        _, numbers, block_bytes = BLOCKS[self.kind]
        return math.prod(self.shape) // numbers * block_bytes


def planned_tensor(name: str, shape: tuple[int, ...], numbers: GgufNumbers) -> PlannedTensor:
    """Choose a tensor's format: vectors and norms float32, rows that blocks do not divide float16.

    Args:
        name: llama.cpp's.
        shape: as torch has it.
        numbers: requested number format.
    """
    kind = numbers.upper()
    if len(shape) < 2 or name.endswith("_norm.weight"):
        kind = "F32"
    elif shape[-1] % BLOCKS[kind][1]:
        kind = "F16"
    return PlannedTensor(shape=shape, kind=kind)


def require_gguf() -> None:
    """Refuse to start without the package that packs numbers.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            "--format gguf needs the package gguf. Install it: pip install 'ftkit[gguf]'."
        )


def file_bytes(tensors: Mapping[str, PlannedTensor]) -> int:
    """Bytes of a file's tensors, with the padding between them."""
    return sum(_padded(tensor.nbytes) for tensor in tensors.values())


# Our own: the package gguf knows no models, and llama.cpp's converter is no package, holds no
# streams of tensors, and needs the model as a directory on the disk.
def write_file(
    file: Path,
    architecture: str,
    metadata: GgufMetadata,
    planned: Mapping[str, PlannedTensor],
    tensors: Iterable[tuple[str, Tensor]],
    progress: OnProgress,
) -> None:
    """Write a GGUF file.

    Args:
        file: its place, in a directory that exists.
        architecture: llama.cpp's name of the family.
        metadata: all but the architecture.
        planned: every tensor, by llama.cpp's name.
        tensors: the same with numbers, in any order.
        progress: receives the number of bytes.

    Raises:
        OSError: it cannot be written.
        UserError: a number is none, or does not fit its format.
        ValueError: the tensors are not those that were planned.
    """
    _write_header(file, architecture, metadata, planned)
    start, starts = _padded(file.stat().st_size), {}
    for name, tensor in planned.items():
        starts[name] = start
        start += _padded(tensor.nbytes)
    total_bytes, done_bytes = file_bytes(planned), 0
    with file.open("r+b") as out:
        out.truncate(start)
        for name, values in tensors:
            if name not in starts or tuple(values.shape) != planned[name].shape:
                raise ValueError(f"{name} {list(values.shape)} is twice, unknown or misshapen")
            out.seek(starts.pop(name))
            _write_tensor(out, name, values, planned[name].kind)
            done_bytes += _padded(planned[name].nbytes)
            progress(done_bytes, total_bytes)
    if starts:
        raise ValueError(f"not given: {', '.join(starts)}")


def _write_header(
    file: Path,
    architecture: str,
    metadata: GgufMetadata,
    planned: Mapping[str, PlannedTensor],
) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(file, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, tensor in planned.items():
        writer.add_tensor_info(
            name,
            tensor.shape,
            # float32 for every format: of uint8 gguf would take the shape for bytes.
            np.dtype(np.float32),
            tensor.nbytes,
            GGMLQuantizationType[tensor.kind],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _write_tensor(out: BinaryIO, name: str, values: Tensor, kind: str) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    for rows in _row_chunks(values):
        chunk = rows.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()
        _require_numbers(name, chunk, kind)
        out.write(quantize(chunk, GGMLQuantizationType[kind]).tobytes())


def _row_chunks(values: Tensor) -> Iterator[Tensor]:
    rows = max(_CHUNK_NUMBERS // max(values[0].numel(), 1), 1)
    yield from values.split(rows)


def _require_numbers(name: str, values: np.ndarray, kind: str) -> None:
    # NaN and infinity come through the maximum.
    largest = float(np.abs(values).max())
    if not math.isfinite(largest):
        raise UserError(
            f"{name} holds numbers that are not finite. Its training has diverged: use an earlier "
            "checkpoint."
        )
    if kind == "F16" and largest > _LARGEST_F16:
        raise UserError(
            f"{name} holds {largest:.4g}, which f16 cannot hold. Try --quantization bf16."
        )


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
