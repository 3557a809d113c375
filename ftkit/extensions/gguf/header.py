"""The header of a GGUF file, checked against the file's length.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ftkit.errors import UserError
from ftkit.utils.damaged_files import reading, require_regular

BLOCKS = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ2_XXS": (16, 256, 66),
    "IQ2_XS": (17, 256, 74),
    "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18),
    "IQ3_S": (21, 256, 110),
    "IQ2_S": (22, 256, 82),
    "IQ4_XS": (23, 256, 136),
    "F64": (28, 1, 8),
    "IQ1_M": (29, 256, 56),
    "BF16": (30, 1, 2),
    "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17),
}
"""Number formats of tensors: their number in files, and the numbers and bytes of a block."""

_ADVICE = "Download or convert it again."
_MAGIC = b"GGUF"
# Version 1 counts in 32 bits, and was soon replaced.
_VERSIONS = (2, 3)
_MOST_HEADER_BYTES = 2**28
"""A vocabulary of a million tokens takes a tenth of it."""
_MOST_KEYS, _MOST_TENSORS, _MOST_TEXTS = 2**16, 2**17, 2**21
"""Empty texts and tensors take hardly any bytes of a file, but as much time as others."""
# GGML_MAX_DIMS of ggml.
_MOST_DIMENSIONS = 4
# Bytes; the first is GGUF's own, where general.alignment is missing.
_DEFAULT_ALIGNMENT, _MOST_ALIGNMENT = 32, 2**20
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Types of values in files, as numpy has them."""
# GGUF's numbers of these types.
_STRING, _ARRAY = 8, 9
# Length of the key, type, and a value of one byte.
_LEAST_PAIR_BYTES = 8 + 4 + 1
# Length of the name, number of dimensions, one dimension, type and offset.
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_KIND_OF_NUMBER = {number: kind for kind, (number, _, _) in BLOCKS.items()}


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A tensor of a GGUF file: name, shape, number format and position."""

    name: str
    shape: tuple[int, ...]
    """Shape in torch's order: numbers of the last dimension are adjacent."""
    kind: str
    """A key of `BLOCKS`."""
    start: int
    """Its first byte in the file."""

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return packed_bytes(self.shape, self.kind)


def packed_bytes(shape: Sequence[int], kind: str) -> int:
    """Return the bytes of a tensor in a file, without padding; kind: a key of `BLOCKS`."""
    _, numbers, block_bytes = BLOCKS[kind]
    return math.prod(shape) // numbers * block_bytes


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """Metadata and tensors of a GGUF file; no tensor overlaps another or exceeds the file."""

    file: Path
    metadata: Mapping[str, Any]
    """Numbers, texts, lists of texts, and numpy arrays of numbers."""
    tensors: Mapping[str, GgufTensor]

    def error(self, problem: str) -> UserError:
        """Return the error for a damaged file, with the problem."""
        return _damaged(self.file, problem)

    def integer(self, key: str, default: int | None = None) -> int:
        """Read a non-negative integer.

        Raises:
            UserError: it is something else, or missing without a default.
        """
        # bool first: True is an int in Python.
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(f"its {key} is {_shown(value)}, not a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Read a finite number; 32-bit numbers become the shortest decimal with their value.

        Raises:
            UserError: it is something else, or missing without a default.
        """
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f"its {key} is {_shown(value)}, not a number")
        if not math.isfinite(value):
            raise self.error(f"its {key} is {value}")
        return float(value)

    def text(self, key: str) -> str | None:
        """Read a string; None if the key is missing.

        Raises:
            UserError: it is something else.
        """
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(f"its {key} is {_shown(value)}, not a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Read a boolean.

        Raises:
            UserError: it is something else.
        """
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"its {key} is {_shown(value)}, not true or false")
        return value

    def texts(self, key: str) -> list[str]:
        """Read a list of strings.

        Raises:
            UserError: it is missing or something else.
        """
        value = self.metadata.get(key)
        if not isinstance(value, list):
            raise self.error(f"it has no list of texts {key}")
        return value

    def numbers(self, key: str, count: int) -> list[Any] | None:
        """Read a list of numbers; None if the key is missing.

        Args:
            key: of the metadata.
            count: how many there have to be.

        Raises:
            UserError: it is something else.
        """
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self.error(f"its {key} is not a list of {count} numbers")
        return list(value.tolist())


def read_header(file: Path) -> GgufHeader:
    """Read the header of a GGUF file, and compare its sizes with the file's length.

    Nothing is allocated for a count that the rest of the file could not hold.

    Raises:
        UserError: it cannot be read, is not a GGUF file, or is damaged, cut off or contradictory.
    """
    require_regular(file)
    with reading(f"checkpoint_dir {file}", "the header of a GGUF file", advice=_ADVICE):
        try:
            with file.open("rb") as stream:
                return _Reader(file, stream, file.stat().st_size).header()
        except _Unsound as problem:
            raise _damaged(file, str(problem)) from None


class _Unsound(Exception):
    """The file is damaged; the text says how."""


class _Reader:
    """Reads values one after the other, none of which may reach beyond the end."""

    def __init__(self, file: Path, stream: BinaryIO, size_bytes: int) -> None:
        self._file, self._stream, self._size_bytes = file, stream, size_bytes
        self._position = 0
        self._end = min(size_bytes, _MOST_HEADER_BYTES)

    def header(self) -> GgufHeader:
        if self._size_bytes < len(_MAGIC) or self._bytes(len(_MAGIC)) != _MAGIC:
            raise _Unsound("it does not begin with GGUF")
        version = self._whole("<I")
        if version not in _VERSIONS:
            # Files of big-endian machines have all numbers the other way round.
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            what = "is of a machine with the other order of bytes" if swapped else "is not known"
            raise _Unsound(f"its version {version} {what}; 2 and 3 are")
        tensor_count = self._count("tensors", _LEAST_TENSOR_BYTES, _MOST_TENSORS)
        # Keys and tensors are counted before either is listed.
        pair_count = self._count("keys", _LEAST_PAIR_BYTES, _MOST_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._text("a key")
            if key in metadata:
                raise _Unsound(f"it has {key} twice")
            metadata[key] = self._value(key, self._whole("<I"))
        places = [self._tensor() for _ in range(tensor_count)]
        return GgufHeader(
            file=self._file, metadata=metadata, tensors=self._placed(places, metadata)
        )

    def _placed(
        self, places: list[GgufTensor], metadata: Mapping[str, Any]
    ) -> dict[str, GgufTensor]:
        """Return the tensors by name, with their positions in the file."""
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        is_number = isinstance(alignment, int) and 0 < alignment <= _MOST_ALIGNMENT
        if not is_number or alignment & (alignment - 1):
            raise _Unsound(f"its general.alignment is {_shown(alignment)}, no power of two")
        # Offsets of tensors count from here, not from the beginning of the file.
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        last_end, before = data_start, "its header"
        # In the order of the file, so that one pass finds overlaps.
        for place in sorted(places, key=lambda tensor: tensor.start):
            if place.start % alignment:
                raise _Unsound(f"{place.name} begins at {place.start}, no multiple of {alignment}")
            tensor = GgufTensor(
                name=place.name,
                shape=place.shape,
                kind=place.kind,
                start=data_start + place.start,
            )
            end = tensor.start + tensor.nbytes
            # A file that was cut off ends within its last tensors.
            if end > self._size_bytes:
                raise _Unsound(
                    f"{tensor.name} ends at byte {end:,}, but the file at {self._size_bytes:,}"
                )
            if tensor.start < last_end:
                raise _Unsound(f"{tensor.name} begins within {before}")
            if tensor.name in tensors:
                raise _Unsound(f"it has {tensor.name} twice")
            tensors[tensor.name] = tensor
            last_end, before = end, tensor.name
        return tensors

    def _tensor(self) -> GgufTensor:
        """Read a tensor's entry; its start counts from the end of the header."""
        name = self._text("a tensor's name")
        dimensions = self._whole("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise _Unsound(f"{name} has {dimensions} dimensions")
        # GGUF lists the innermost dimension first.
        shape = tuple(self._whole("<Q") for _ in range(dimensions))[::-1]
        number = self._whole("<I")
        kind = _KIND_OF_NUMBER.get(number)
        if kind is None:
            raise _Unsound(f"{name} is of type {number}, which is not known")
        # Rows consist of whole blocks.
        if 0 in shape or shape[-1] % BLOCKS[kind][1]:
            raise _Unsound(f"{name} of {kind} cannot be of shape {list(shape)}")
        return GgufTensor(name=name, shape=shape, kind=kind, start=self._whole("<Q"))

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            element = self._whole("<I")
            if element == _STRING:
                count = self._count(f"texts of {key}", 8, _MOST_TEXTS)
                return [self._text(key) for _ in range(count)]
            # Arrays of arrays are refused as an unknown type.
            return self._numbers(key, element, None)
        found = self._numbers(key, kind, 1)[0]
        # float32 stores 1e-05 as 9.99999974737875e-06: the shortest decimal was meant.
        return float(str(found)) if found.dtype.kind == "f" else found.item()

    def _numbers(self, key: str, kind: int, count: int | None) -> Any:
        """Read an array; count None: its length is read first."""
        if kind not in _NUMBERS:
            raise _Unsound(f"{key} is of type {kind}, which is not known")
        dtype = np.dtype(_NUMBERS[kind])
        count = self._count(key, dtype.itemsize) if count is None else count
        content = self._bytes(count * dtype.itemsize)
        return np.frombuffer(content, dtype) if count else np.empty(0, dtype)

    def _count(self, what: str, each_bytes: int, most: int | None = None) -> int:
        """Read a count; refuse one whose items, of at least each_bytes, exceed the rest."""
        count = self._whole("<Q")
        if most is not None and count > most:
            raise _Unsound(f"it says that it has {count:,} {what}, but {most:,} are the most")
        # Before anything is allocated: a damaged count may be any number of 64 bits.
        if count * each_bytes > self._end - self._position:
            raise _Unsound(f"it says that it has {count:,} {what}, more than fit in its bytes")
        return count

    def _text(self, what: str) -> str:
        length = self._count(f"bytes of {what}", 1)
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError:
            raise _Unsound(f"{what} is not UTF-8") from None

    def _whole(self, code: str) -> int:
        value: int = struct.unpack(code, self._bytes(struct.calcsize(code)))[0]
        return value

    def _bytes(self, count: int) -> bytes:
        # Not read at all beyond the bound, whatever the count says.
        found = self._stream.read(count) if self._position + count <= self._end else b""
        if len(found) != count:
            raise _Unsound(f"it ends within its header, of {self._size_bytes:,} bytes")
        self._position += count
        return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _damaged(file: Path, problem: str) -> UserError:
    return UserError(f"checkpoint_dir {file} is not a valid GGUF file: {problem}. {_ADVICE}")
