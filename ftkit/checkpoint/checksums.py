"""Checksums of a checkpoint's files, when they are written and when they are verified.

A rank verifies what it reads of a file that lies at the checkpoint's url. One that finds damage
leaves a doubt, so that the next start reads the whole file before it chooses the checkpoint.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ftkit.checkpoint.metadata import FileEntry
from ftkit.utils.remote.block_checksums import BLOCK_BYTES, BlockChecksums
from ftkit.utils.remote.objects import StorageError
from ftkit.utils.remote.ranges import remote_blocks, remote_size_bytes
from ftkit.utils.remote.urls import url_of, working_root

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
    import xxhash  # compiled, and commands that read no checkpoint do without

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


def problem_elsewhere(
    path: Path, entry: FileEntry, on_block: Callable[[int], None] | None, *, fetching: bool
) -> str | None:
    """What is wrong with a file that lies at a url; None: nothing.

    Args:
        path: the place here where it would lie.
        entry: what the file must be.
        on_block: called with the length of each block that is done.
        fetching: read the whole file in any case; else only where its size says too little: it has
            no checksums of blocks, by which its readers verify it, or it is in doubt.
    """
    url, doubt = url_of(path), _doubt(path)
    try:
        size = remote_size_bytes(path)
        if size is None:
            return f"{url} is missing."
        if size != entry.size_bytes:
            return f"{url} has {size:,} bytes instead of {entry.size_bytes:,}."
        if not fetching and entry.blocks is not None and not doubt.exists():
            return None
        digest = hashlib.sha256()
        for block in remote_blocks(path, size):
            digest.update(block)
            if on_block:
                on_block(len(block))
    except StorageError as error:
        return f"{error}."
    if digest.hexdigest() != entry.sha256:
        return f"{url} is damaged: its checksum differs."
    doubt.unlink(missing_ok=True)
    return None


def leave_doubt(path: Path) -> None:
    """Have the next start read all of a file that lies at a url, in which damage was found.

    Raises:
        OSError: the doubt cannot be noted.
    """
    doubt = _doubt(path)
    doubt.parent.mkdir(parents=True, exist_ok=True)
    doubt.touch()


def _parts(path: Path, most_bytes: int) -> Iterator[memoryview]:
    """All of a file, in parts that last until the next one is read."""
    buffer = memoryview(bytearray(most_bytes))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]


def _doubt(path: Path) -> Path:
    """What is there while a file is in doubt; it lies apart from the run, which may be replaced."""
    name = hashlib.sha256(str(url_of(path)).encode()).hexdigest()[:32]
    return working_root() / ".known" / f"{name}.doubt"
