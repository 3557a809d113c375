"""Checksums of a checkpoint's files: of a whole file, and of its blocks while it is written."""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

from ftkit.checkpoint.metadata import FileEntry
from ftkit.utils.block_checksums import BLOCK_BYTES, BlockChecksums, checksum_of_block

_READ_BYTES = 4 * 2**20


def hash_file(path: Path, on_block: Callable[[int], None] | None = None) -> FileEntry:
    """Size and checksum of a file as a whole.

    Args:
        path: a regular file.
        on_block: told the length of each block that is done.
    """
    digest = hashlib.sha256()
    size = 0
    block = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
            if on_block:
                on_block(count)
    return FileEntry(size_bytes=size, sha256=digest.hexdigest())


def describe_file(path: Path, block_bytes: int = BLOCK_BYTES) -> FileEntry:
    """Size and checksums of a file that was written just now, those of its blocks included.

    It is read once. The checksum of the whole is computed in a thread while the next block is
    read and its own is, so that the blocks cost no time.

    Args:
        path: a regular file.
        block_bytes: length of a block.
    """
    digest, size, of_blocks = hashlib.sha256(), 0, []
    hashed: Future[None] | None = None
    buffers = cycle([memoryview(bytearray(block_bytes)) for _ in range(2)])
    with ThreadPoolExecutor(1) as pool, path.open("rb") as file:
        while count := file.readinto(buffer := next(buffers)):
            block = buffer[:count]
            of_blocks.append(checksum_of_block(block))
            size += count
            if hashed is not None:  # its buffer is read into next
                hashed.result()
            hashed = pool.submit(digest.update, block)
    blocks = BlockChecksums(block_bytes=block_bytes, crc32="".join(of_blocks))
    return FileEntry(size_bytes=size, sha256=digest.hexdigest(), blocks=blocks)
