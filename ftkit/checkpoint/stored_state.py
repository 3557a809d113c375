"""The tensors of a checkpoint: ranges of them, read from the shards that ranks have written."""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ftkit.checkpoint.metadata import (
    CheckpointError,
    DamagedPart,
    FileEntry,
    Metadata,
    is_shard,
)
from ftkit.checkpoint.shards import PIECES, SCALES, blocks_of
from ftkit.recipe.optimizers import BLOCK
from ftkit.strategies.state import codes_per_byte
from ftkit.utils.url_files import DamagedObject, StorageError, UrlTensors, lies_elsewhere, url_files
from ftkit.utils.urls import display_path

# Raised where a header is valid JSON, but of another form.
_NOT_AS_EXPECTED = (KeyError, TypeError, AttributeError)


class StoredState:
    """The tensors in the shards of a checkpoint, by name.

    Local files are mapped into memory, so pages are read when touched and can be dropped. Of files
    at a url, only the requested ranges are fetched; they are checked against the checksums of
    their blocks, and not kept.
    """

    def __init__(
        self, shards: Iterable[Path], entries: Mapping[Path, FileEntry] | None = None
    ) -> None:
        """Read the headers.

        Args:
            shards: the files.
            entries: expected size and checksums of each, as far as known.

        Raises:
            CheckpointError: a file is missing or damaged, or a tensor is not there completely.
        """
        entries = entries or {}
        self._tensors: dict[str, StoredTensor] = {}
        pieces: dict[str, list[_StoredPiece]] = {}
        shapes: dict[str, torch.Size] = {}
        for path in shards:
            for name, shape, piece in _pieces_in(path, entries.get(path)):
                # Every piece carries the shape of the whole tensor: shards that do not belong
                # together show.
                if shapes.setdefault(name, shape) != shape:
                    raise CheckpointError(f"{path}: the shape of {name} differs between shards")
                pieces.setdefault(name, []).append(piece)
        # Only when all shards are read: pieces of one tensor lie in several of them.
        for name, found in pieces.items():
            self._tensors[name] = StoredTensor(name, shapes[name], found)

    @classmethod
    def in_checkpoint(cls, directory: Path, metadata: Metadata) -> "StoredState":
        """Open the shards of a checkpoint.

        Args:
            directory: of the checkpoint.
            metadata: of the checkpoint.

        Raises:
            CheckpointError: a file is missing or damaged, or a tensor is incomplete.
        """
        entries = {
            directory / name: entry for name, entry in metadata.files.items() if is_shard(name)
        }
        return cls(entries, entries)

    def __getitem__(self, name: str) -> "StoredTensor":
        if name not in self._tensors:
            raise CheckpointError(f"the checkpoint has no {name}")
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)


class StoredTensor:
    """A tensor in the shards of a checkpoint."""

    def __init__(self, name: str, shape: torch.Size, pieces: Sequence["_StoredPiece"]) -> None:
        """Put the pieces in order.

        Raises:
            CheckpointError: they leave a gap or overlap.
        """
        self.shape = shape
        self._pieces = sorted(pieces, key=lambda piece: piece.start)
        end = 0
        # Pieces must tile the tensor exactly: a checkpoint that lacks a shard shows here.
        for piece in self._pieces:
            if piece.start != end:
                raise CheckpointError(
                    f"{name} is incomplete: number {min(end, piece.start)} of {shape.numel()} "
                    "is missing or stored twice"
                )
            end = piece.end
        if end != shape.numel():
            raise CheckpointError(f"{name} is incomplete: {end} of {shape.numel()} numbers")
        self._starts = [piece.start for piece in self._pieces]

    @property
    def quantized(self) -> bool:
        """True if any piece is stored as codes."""
        return any(piece.scales is not None for piece in self._pieces)

    def __getitem__(self, rows: slice) -> Tensor:
        """Rows of the tensor, as from a tensor in memory."""
        first, last, _ = rows.indices(self.shape[0])
        width = math.prod(self.shape[1:])
        values = self.read(first * width, last * width)
        return values.view(last - first, *self.shape[1:])

    def read(self, start: int, stop: int) -> Tensor:
        """Numbers [start, stop) in row-major order, flat; codes as the float32 they stand for.

        A view of the file if one piece holds them all, otherwise a copy.
        """
        # A rank with fewer rows than ranks has an empty range, which overlaps no piece.
        if start == stop:
            return self._pieces[0].values[0:0]
        parts = [
            piece.numbers(max(start, piece.start), min(stop, piece.end))
            for piece in self._overlapping(start, stop)
        ]
        # torch.cat would copy a single part too.
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_quantized(
        self, start: int, stop: int, code: Tensor, block: int = BLOCK
    ) -> tuple[Tensor, Tensor] | None:
        """Codes and scales of [start, stop), or None if they are stored in another form.

        Args:
            start: first number.
            stop: number after the last one.
            code: values of the codes.
            block: codes that share a scale, from `start` on.
        """
        codes, scales, in_byte = [], [], codes_per_byte(code)
        for piece in self._overlapping(start, stop):
            first, last = max(start, piece.start), min(stop, piece.end)
            # Codes only keep their meaning where stored blocks are the blocks of the reader.
            is_aligned = (first - piece.start) % block == (first - start) % block == 0
            if piece.scales is None or piece.code is None or not is_aligned:
                return None
            if piece.block != block or not piece.code.equal(code.cpu()):
                return None
            first, last = first - piece.start, last - piece.start
            codes.append(piece.values[first // in_byte : -(-last // in_byte)])
            scales.append(piece.scales[blocks_of(first, last, block)])
        return torch.cat(codes), torch.cat(scales)

    def _overlapping(self, start: int, stop: int) -> list["_StoredPiece"]:
        assert 0 <= start <= stop <= self.shape.numel(), (start, stop, self.shape)
        # Many ranks read small ranges of large tensors: do not walk all pieces for each.
        first = max(0, bisect_right(self._starts, start) - 1)
        found: list[_StoredPiece] = []
        for piece in self._pieces[first:]:
            if piece.start >= stop and found:
                break
            found.append(piece)
        return found


class _RangedNumbers:
    """Numbers of a tensor in a file at a url; a slice of them is fetched when it is read."""

    def __init__(self, path: Path, file: UrlTensors, key: str) -> None:
        entry = file.entries[key]
        self._path, self._file, self._key = path, file, key
        self._dtype = _DTYPES[entry["dtype"]]
        self._numel = math.prod(entry["shape"])
        begin, end = entry["data_offsets"]
        # safetensors checks this for local files; ranges of a url are read without it.
        if end - begin != self._numel * self._dtype.itemsize:
            raise ValueError(f"{key} has {end - begin:,} bytes for {self._numel:,} numbers")

    def numel(self) -> int:
        return self._numel

    def __getitem__(self, part: slice) -> Tensor:
        first, last, _ = part.indices(self._numel)
        if first >= last:
            return torch.empty(0, dtype=self._dtype)
        width = self._dtype.itemsize
        try:
            content = self._file.read(self._key, first * width, last * width)
        except DamagedObject as error:
            raise DamagedPart(self._path, f"{error}.") from error
        except StorageError as error:
            raise CheckpointError(str(error)) from error
        return torch.frombuffer(content, dtype=self._dtype)


_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}
"""Dtypes by their names in headers of safetensors files."""


@dataclass(frozen=True)
class _StoredPiece:
    start: int
    values: Tensor | _RangedNumbers
    scales: Tensor | _RangedNumbers | None
    code: Tensor | None
    block: int

    @property
    def end(self) -> int:
        return self.start + self.values.numel() * codes_per_byte(self.code)

    def numbers(self, start: int, stop: int) -> Tensor:
        first, last = start - self.start, stop - self.start
        if self.scales is None or self.code is None:
            return self.values[first:last]
        in_byte = codes_per_byte(self.code)
        codes = self.values[first // in_byte : -(-last // in_byte)]
        if in_byte == 2:
            codes = torch.stack([codes >> 4, codes & 15], dim=-1).view(-1)[first % 2 :]
        codes = codes[: last - first]
        # The range may begin within a block, whose scale then applies to the rest of it.
        blocks = blocks_of(first, last, self.block)
        scales = self.scales[blocks].repeat_interleave(self.block)
        first -= blocks.start * self.block
        # The value of a number's code times the scale of its block, as both libraries do it.
        return self.code[codes.long()] * scales[first : first + len(codes)]


def _pieces_in(
    path: Path, entry: FileEntry | None
) -> Iterable[tuple[str, torch.Size, _StoredPiece]]:
    try:
        if lies_elsewhere(path):
            file = url_files(path).tensors(path, None if entry is None else entry.blocks)
            yield from _placed(file.metadata, lambda key: _RangedNumbers(path, file, key))
        else:
            with safe_open(path, "pt") as mapped:
                yield from _placed(mapped.metadata() or {}, mapped.get_tensor)
    except DamagedObject as error:
        raise DamagedPart(path, f"{error}.") from error
    except (OSError, SafetensorError, StorageError, ValueError, *_NOT_AS_EXPECTED) as error:
        raise CheckpointError(f"{display_path(path)} is missing or damaged: {error}") from error


def _placed(
    metadata: dict[str, str], numbers: Callable[[str], Tensor | _RangedNumbers]
) -> Iterable[tuple[str, torch.Size, _StoredPiece]]:
    """Pieces of a file with their places, from its metadata."""
    for key, place in json.loads(metadata[PIECES]).items():
        code = place.get("code")
        # Not isinstance: True is an int in Python.
        if type(place["start"]) is not int or place["start"] < 0:
            raise ValueError(f"{key} starts at {place['start']!r}")
        yield (
            place["name"],
            torch.Size(place["shape"]),
            _StoredPiece(
                place["start"],
                numbers(key),
                None if code is None else numbers(key + SCALES),
                None if code is None else torch.tensor(code),
                place.get("block", BLOCK),
            ),
        )
