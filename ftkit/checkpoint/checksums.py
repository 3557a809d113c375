"""Checksums of a checkpoint's files: of a whole file, and of its blocks where it was written."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from ftkit.checkpoint.metadata import FileEntry
from ftkit.utils.block_checksums import BLOCK_BYTES, BlockChecksums

_READ_BYTES = 2**18
"""What fits into a core's own cache, for both kinds of checksums."""


def hash_file(path: Path, on_block: Callable[[int], None] | None = None) -> FileEntry:
    """Size and checksum of a file as a whole.

    Args:
        path: a regular file.
        on_block: called with the length of each part that is done.
    """
    digest, size = hashlib.sha256(), 0
    for part in _parts(path, _READ_BYTES):
        digest.update(part)
        size += len(part)
        if on_block:
            on_block(len(part))
    return FileEntry(size_bytes=size, sha256=digest.hexdigest())


def describe_file(path: Path, block_bytes: int = BLOCK_BYTES) -> FileEntry:
    """Size and checksums of a file that was written just now, those of its blocks included.

    Args:
        path: a regular file.
        block_bytes: length of a block.
    """
    digest, size, of_blocks = hashlib.sha256(), 0, []
    block = xxhash.xxh3_64()
    for part in _parts(path, min(_READ_BYTES, block_bytes)):
        digest.update(part)
        while len(part):
            left = part[: block_bytes - size % block_bytes]
            block.update(left)
            size += len(left)
            part = part[len(left) :]
            if size % block_bytes == 0:
                of_blocks.append(block.hexdigest())
                block.reset()
    if size % block_bytes:
        of_blocks.append(block.hexdigest())
    blocks = BlockChecksums(block_bytes=block_bytes, xxh3_64="".join(of_blocks))
    return FileEntry(size_bytes=size, sha256=digest.hexdigest(), blocks=blocks)


def _parts(path: Path, most_bytes: int) -> Iterator[memoryview]:
    """All of a file, in parts that last until the next one is read."""
    buffer = memoryview(bytearray(most_bytes))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]
