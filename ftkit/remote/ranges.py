"""Ranged reading: safetensors files where they lie, header first, then the numbers that are asked.

A file that is here is not read by this; `ftkit.checkpoint.shards` maps it into memory.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftkit.remote.objects import Objects
from ftkit.remote.urls import url_of

_LENGTH_BYTES = 8
_BLOCK_BYTES = 8 * 2**20
"""Small tensors that lie side by side are fetched together."""
_BLOCKS = 8
"""That many are kept: parameters and each kind of their state lie in different places of a file."""
_MOST_HEADER_BYTES = 100 * 2**20
"""As safetensors has it."""


def lies_elsewhere(path: Path) -> bool:
    """Whether a file that a checkpoint lists is not here, but at the url of its directory."""
    return not path.exists() and url_of(path) is not None


def remote_size_bytes(path: Path) -> int | None:
    """Length of a file that lies elsewhere; None: it is not there either.

    Raises:
        StorageError: it cannot be asked.
    """
    entry = Objects.of(path.parent).entry(path.name)
    return None if entry is None else entry.size_bytes


def remote_blocks(path: Path, size_bytes: int) -> Iterator[bytes]:
    """All of a file that lies elsewhere, block by block.

    Raises:
        StorageError: it cannot be read.
    """
    objects = Objects.of(path.parent)
    for start in range(0, size_bytes, _BLOCK_BYTES):
        stop = min(start + _BLOCK_BYTES, size_bytes)
        yield objects.read_range(path.name, start, stop)


class RangedSafetensors:
    """A safetensors file that lies elsewhere."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            StorageError: it cannot be read.
            ValueError: it is none.
        """
        self._objects, self._name = Objects.of(path.parent), path.name
        entry = self._objects.entry(self._name)
        if entry is None:
            raise ValueError("there is no such object")
        size = entry.size_bytes
        first = self._objects.read_range(self._name, 0, min(size, _BLOCK_BYTES))
        length = int.from_bytes(first[:_LENGTH_BYTES], "little")
        if length > min(size, _MOST_HEADER_BYTES):
            raise ValueError("its header is longer than the file")
        self._start = _LENGTH_BYTES + length
        if len(first) < self._start:
            first += self._objects.read_range(self._name, len(first), self._start)
        header = json.loads(first[_LENGTH_BYTES : self._start])
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.entries: dict[str, dict[str, Any]] = header
        """`dtype`, `shape` and `data_offsets` of each tensor, as the file has them."""
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        if self._start + end != size:
            raise ValueError(f"it has {size:,} bytes instead of {self._start + end:,}")
        self._size = size
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def read(self, key: str, start: int, stop: int) -> bytearray:
        """The bytes [start, stop) of a tensor.

        Raises:
            StorageError: they cannot be read.
        """
        begin, end = self.entries[key]["data_offsets"]
        assert 0 <= start <= stop <= end - begin, (key, start, stop)
        first, last = self._start + begin + start, self._start + begin + stop
        if last - first >= _BLOCK_BYTES:
            return bytearray(self._objects.read_range(self._name, first, last))
        found = bytearray()
        while first < last:
            number = first // _BLOCK_BYTES
            offset = first - number * _BLOCK_BYTES
            part = self._block(number)[offset : offset + last - first]
            found += part
            first += len(part)
        return found

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            start = number * _BLOCK_BYTES
            stop = min(start + _BLOCK_BYTES, self._size)
            self._blocks[number] = self._objects.read_range(self._name, start, stop)
            if len(self._blocks) > _BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return self._blocks[number]
