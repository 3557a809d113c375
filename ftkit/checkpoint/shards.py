"""Sharded tensors on disk: each rank writes its own file, and any number of ranks read them.

A piece is a range of a tensor's numbers in row-major order. A rank's rows under FSDP are such a
range, and so are a partition of ZeRO and a whole tensor (boxes, as torch's DCP has them, would not
cover ZeRO's partitions). Reading a range copies from all pieces that overlap it, without any
communication between ranks.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ftkit.recipe.optimizers import BLOCK
from ftkit.utils.safetensors_files import save_in_portions, save_tensors

PIECES = "pieces"
SCALES = ".scales"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A range of a tensor's numbers on one rank."""

    name: str
    """Name of the whole tensor."""
    shape: torch.Size
    """Shape of the whole tensor."""
    start: int
    """First number of the range, counted in row-major order."""
    values: Tensor
    """[numbers of the range], flat; codes of 4 bits: two in a byte, the first in its upper half."""
    scales: Tensor | None = None
    """[blocks of the range]: `values` are codes, in blocks from `start` on."""
    code: Tensor | None = None
    """Values of the codes, relative to the scale of their block: [256], or [16] for 4 bits."""
    block: int = BLOCK
    """Codes that share a scale; an even number."""

    @property
    def size_bytes(self) -> int:
        """Size of its numbers and scales."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)


def share_of(rank: int, world_size: int, numel: int, block: int = BLOCK) -> tuple[int, int]:
    """Range [first, end) that a rank writes of a tensor which all ranks hold whole."""
    # Between blocks, because each block of codes has one scale.
    blocks = -(-numel // block)
    first, last = (blocks * r // world_size * block for r in (rank, rank + 1))
    return min(first, numel), min(last, numel)


def blocks_of(first: int, last: int, block: int) -> slice:
    """Blocks that the numbers [first, last) of a piece are in."""
    # Rounded up: the last block of a piece may be shorter, and has a scale too.
    return slice(first // block, -(-last // block))


def write_shard(path: Path, pieces: Iterable[Piece]) -> None:
    """Write pieces to a safetensors file, with the place of each in its tensor in the header.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    tensors, metadata = _named(pieces)
    save_tensors(tensors, path, metadata)


def write_shard_in_portions(path: Path, pieces: Iterable[Piece], portion_bytes: int) -> None:
    """Write the same file as `write_shard`, copying only a portion to the host at a time.

    Raises:
        OSError: it cannot be written.
    """
    tensors, metadata = _named(pieces)
    save_in_portions(tensors, path, metadata, portion_bytes)


def _named(pieces: Iterable[Piece]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of a shard by key, and its metadata."""
    tensors: dict[str, Tensor] = {}
    places = {}
    for piece in pieces:
        key = f"{piece.name}@{piece.start}"
        # Keys carry the start: one rank may write several ranges of one tensor.
        tensors[key] = piece.values
        places[key] = {"name": piece.name, "shape": list(piece.shape), "start": piece.start}
        if piece.scales is not None and piece.code is not None:
            tensors[key + SCALES] = piece.scales
            places[key]["code"] = piece.code.tolist()
            if piece.block != BLOCK:
                places[key]["block"] = piece.block
    return tensors, {PIECES: json.dumps(places)}
