"""Ranged reading of safetensors files at a url: the header, then the ranges that are needed.

All that is read is verified: whole blocks are fetched, and each is compared with its checksum.
Local files are not read here; `ftkit.checkpoint.shards` maps them into memory.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftkit.extensions.object_storage.objects import Objects
from ftkit.utils.url_files import BLOCK_BYTES, BlockChecksums, DamagedObject

# Of the length of the header, at the beginning of a safetensors file.
_LENGTH_BYTES = 8
_KEPT_BLOCKS = 8
"""Blocks in memory: small tensors share one, but parameters and each kind of their state lie in
different places of a file."""
_MOST_HEADER_BYTES = 100 * 2**20
"""Limit of safetensors itself."""


def size_bytes(path: Path) -> int | None:
    """Length of a file at a url; None: it does not exist.

    Raises:
        StorageError: the storage does not answer.
    """
    entry = Objects.of(path.parent).entry(path.name)
    return None if entry is None else entry.size_bytes


def blocks(path: Path, size_bytes: int) -> Iterator[bytes]:
    """Read a file at a url, block by block.

    Raises:
        StorageError: it cannot be read.
    """
    objects = Objects.of(path.parent)
    for start in range(0, size_bytes, BLOCK_BYTES):
        stop = min(start + BLOCK_BYTES, size_bytes)
        yield objects.read_range(path.name, start, stop)


class RangedSafetensors:
    """A safetensors file at a url; see `ftkit.utils.url_files.UrlTensors`."""

    def __init__(self, path: Path, checksums: BlockChecksums | None = None) -> None:
        """Read the header, as `ftkit.utils.url_files.UrlFiles.tensors` says."""
        self._objects, self._name = Objects.of(path.parent), path.name
        self._checksums = checksums
        self._block_bytes = BLOCK_BYTES if checksums is None else checksums.block_bytes
        entry = self._objects.entry(self._name)
        if entry is None:
            raise ValueError("there is no such object")
        self._size = size = entry.size_bytes
        if checksums is not None and (problem := checksums.problem(size)):
            raise self._damaged(problem)
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        # A file begins with the length of its header, then the header as JSON, then the tensors.
        length = int.from_bytes(self._bytes(0, min(size, _LENGTH_BYTES)), "little")
        if length > min(size, _MOST_HEADER_BYTES):
            raise ValueError("its header is longer than the file")
        self._start = _LENGTH_BYTES + length
        header = json.loads(self._bytes(_LENGTH_BYTES, min(size, self._start)))
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.entries: dict[str, dict[str, Any]] = header
        """`dtype`, `shape` and `data_offsets` of each tensor, as the file has them."""
        # Offsets count from the end of the header; the last tensor ends with the file.
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        if self._start + end != size:
            raise self._damaged(f"it has {size:,} bytes instead of {self._start + end:,}")

    def read(self, key: str, start: int, stop: int) -> bytearray:
        begin, end = self.entries[key]["data_offsets"]
        assert 0 <= start <= stop <= end - begin, (key, start, stop)
        return self._bytes(self._start + begin + start, self._start + begin + stop)

    def _bytes(self, first: int, last: int) -> bytearray:
        """Read a range of the file; the first and the last block that it touches are kept."""
        found = bytearray(last - first)
        length = self._block_bytes
        touched = range(first // length, -(-last // length)) if first < last else range(0)
        blocks: dict[int, bytes | memoryview] = {
            number: self._blocks[number] for number in touched if number in self._blocks
        }
        if missing := [number for number in touched if number not in blocks]:
            # One request for all: only blocks at the ends are kept, so hardly any is read twice.
            blocks |= self._fetched(missing[0], missing[-1] + 1)
        for number in touched:
            start = number * length
            part = memoryview(blocks[number])[max(first - start, 0) : last - start]
            offset = max(start - first, 0)
            found[offset : offset + len(part)] = part
        # Neighbouring tensors, which are read next, begin or end in these two.
        for number in {*touched[:1], *touched[-1:]}:
            self._blocks[number] = bytes(blocks[number])
            self._blocks.move_to_end(number)
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return found

    def _fetched(self, begin: int, end: int) -> dict[int, memoryview]:
        """Fetch the blocks [begin, end) in one request and verify them; by number."""
        length = self._block_bytes
        start, stop = begin * length, min(end * length, self._size)
        content = memoryview(self._objects.read_range(self._name, start, stop))
        blocks = {
            number: content[number * length - start : (number + 1) * length - start]
            for number in range(begin, end)
        }
        for number, block in blocks.items():
            if self._checksums is not None and not self._checksums.matches(number, block):
                first = number * length
                raise self._damaged(
                    f"bytes {first:,} to {first + len(block):,} have another checksum"
                )
        return blocks

    def _damaged(self, why: str) -> DamagedObject:
        return DamagedObject(f"{self._objects.url}/{self._name} is damaged: {why}")
