"""Sharded tensors on disk: each rank writes a file of its own, any number of ranks read them.

A piece is a range of a tensor's numbers in row-major order. The rows that FSDP gives a rank are
such a range, so is a partition of ZeRO, and so is a whole tensor. Reading asks for a range and
copies from whatever pieces overlap it, without a word between ranks.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ftkit.checkpoint.files import is_shard
from ftkit.checkpoint.metadata import CheckpointError, Metadata
from ftkit.optim.state_kinds import BLOCK
from ftkit.utils.safetensors_files import save_tensors

_PIECES = "pieces"
_SCALES = ".scales"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A range of a tensor's numbers, as one rank holds it."""

    name: str
    """Of the whole tensor."""
    shape: torch.Size
    """Of the whole tensor."""
    start: int
    """First number of the range, counted in row-major order."""
    values: Tensor
    """[numbers of the range], flat."""
    scales: Tensor | None = None
    """[blocks of the range]: `values` are 8-bit codes, in blocks of 256 from `start` on."""
    code: Tensor | None = None
    """[256], what the codes stand for, relative to their block's scale."""


def share_of(rank: int, world_size: int, numel: int) -> tuple[int, int]:
    """First number and last + 1 that a rank writes of a tensor which all ranks hold whole.

    The borders are multiples of a block, so that 8-bit states can be cut there.
    """
    blocks = -(-numel // BLOCK)
    first, last = (blocks * r // world_size * BLOCK for r in (rank, rank + 1))
    return min(first, numel), min(last, numel)


def write_shard(path: Path, pieces: Iterable[Piece]) -> None:
    """Write pieces to a safetensors file; its header says where in its tensor each one belongs.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    places = {}
    for piece in pieces:
        key = f"{piece.name}@{piece.start}"
        tensors[key] = piece.values
        places[key] = {"name": piece.name, "shape": list(piece.shape), "start": piece.start}
        if piece.scales is not None and piece.code is not None:
            tensors[key + _SCALES] = piece.scales
            places[key]["code"] = piece.code.tolist()
    save_tensors(tensors, path, {_PIECES: json.dumps(places)})


class StoredState:
    """The tensors in the shards of a checkpoint, by name.

    The files are mapped into memory: pages are read when touched and are free to be dropped.
    """

    def __init__(self, shards: Iterable[Path]) -> None:
        """Read the headers.

        Raises:
            CheckpointError: a file is missing or damaged, or a tensor is not there completely.
        """
        self._tensors: dict[str, StoredTensor] = {}
        pieces: dict[str, list[_StoredPiece]] = {}
        shapes: dict[str, torch.Size] = {}
        for path in shards:
            for name, shape, piece in _pieces_in(path):
                if shapes.setdefault(name, shape) != shape:
                    raise CheckpointError(f"{path}: {name} has another shape than in other shards")
                pieces.setdefault(name, []).append(piece)
        for name, found in pieces.items():
            self._tensors[name] = StoredTensor(name, shapes[name], found)

    @classmethod
    def in_checkpoint(cls, directory: Path, metadata: Metadata) -> "StoredState":
        """The tensors of a checkpoint.

        Args:
            directory: of the checkpoint.
            metadata: what it says about itself.

        Raises:
            CheckpointError: a file is missing or damaged, or a tensor is not there completely.
        """
        return cls(directory / name for name in metadata.files if is_shard(name))

    def __getitem__(self, name: str) -> "StoredTensor":
        if name not in self._tensors:
            raise CheckpointError(f"the checkpoint has no {name}")
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """The names of all tensors."""
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
        for piece in self._pieces:
            if piece.start != end:
                raise CheckpointError(
                    f"{name} is not complete: number {min(end, piece.start)} of {shape.numel()} "
                    "is missing or there twice"
                )
            end = piece.end
        if end != shape.numel():
            raise CheckpointError(f"{name} is not complete: {end} of {shape.numel()} numbers")
        self._starts = [piece.start for piece in self._pieces]

    @property
    def quantized(self) -> bool:
        """Whether any of it is stored in 8 bits."""
        return any(piece.scales is not None for piece in self._pieces)

    def __getitem__(self, rows: slice) -> Tensor:
        """Some rows of the tensor, as of a tensor in memory."""
        first, last, _ = rows.indices(self.shape[0])
        width = math.prod(self.shape[1:])
        values = self.read(first * width, last * width)
        return values.view(last - first, *self.shape[1:])

    def read(self, start: int, stop: int) -> Tensor:
        """The numbers [start, stop) in row-major order, flat; 8-bit states as float32.

        A view of the file where one piece holds them all, else a copy.
        """
        if start == stop:
            return self._pieces[0].values[:0]
        parts = [
            piece.numbers(max(start, piece.start), min(stop, piece.end))
            for piece in self._overlapping(start, stop)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_quantized(self, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """The same as codes and scales, if they are stored in blocks from `start` on, else None."""
        codes, scales = [], []
        for piece in self._overlapping(start, stop):
            first, last = max(start, piece.start), min(stop, piece.end)
            is_aligned = (first - piece.start) % BLOCK == (first - start) % BLOCK == 0
            if piece.scales is None or not is_aligned:
                return None
            first, last = first - piece.start, last - piece.start
            codes.append(piece.values[first:last])
            scales.append(piece.scales[first // BLOCK : -(-last // BLOCK)])
        return torch.cat(codes), torch.cat(scales)

    def _overlapping(self, start: int, stop: int) -> list["_StoredPiece"]:
        assert 0 <= start <= stop <= self.shape.numel(), (start, stop, self.shape)
        first = max(0, bisect_right(self._starts, start) - 1)
        found: list[_StoredPiece] = []
        for piece in self._pieces[first:]:
            if piece.start >= stop and found:
                break
            found.append(piece)
        return found


@dataclass(frozen=True)
class _StoredPiece:
    start: int
    values: Tensor
    scales: Tensor | None
    code: Tensor | None

    @property
    def end(self) -> int:
        return self.start + self.values.numel()

    def numbers(self, start: int, stop: int) -> Tensor:
        first, last = start - self.start, stop - self.start
        values = self.values[first:last]
        if self.scales is None or self.code is None:
            return values
        block = first // BLOCK
        scales = self.scales[block : -(-last // BLOCK)].repeat_interleave(BLOCK)
        first -= block * BLOCK
        return self.code[values.long()] * scales[first : first + len(values)]


def _pieces_in(path: Path) -> Iterable[tuple[str, torch.Size, _StoredPiece]]:
    try:
        with safe_open(path, "pt") as file:
            places = json.loads((file.metadata() or {})[_PIECES])
            for key, place in places.items():
                code = place.get("code")
                if type(place["start"]) is not int or place["start"] < 0:
                    raise ValueError(f"{key} starts at {place['start']!r}")
                yield (
                    place["name"],
                    torch.Size(place["shape"]),
                    _StoredPiece(
                        place["start"],
                        file.get_tensor(key),
                        None if code is None else file.get_tensor(key + _SCALES),
                        None if code is None else torch.tensor(code),
                    ),
                )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is missing or damaged: {error}") from error
