"""Checks of a checkpoint's files: checksums, made when they are written, and formats.

A rank verifies the parts that it reads of a file at a url. One that finds damage leaves a mark, so
that the next start reads the whole file before it chooses the checkpoint.

Checksums protect against damage, not against somebody who recomputes them. Nothing is ever
unpickled: a file that is not JSON, safetensors or text is refused before anything else opens it.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from ftkit.checkpoint.metadata import FileEntry
from ftkit.utils.url_files import (
    BLOCK_BYTES,
    BlockChecksums,
    DamagedObject,
    StorageError,
    lies_elsewhere,
    url_files,
)
from ftkit.utils.urls import url_of, working_root

_READ_BYTES = 2**18
"""Fits into the cache of a core, which reads each part once for each kind of checksum."""
# Protocols 2 to 5 begin with PROTO and their number; torch.save has written zip archives since 1.6.
_PICKLES = (*(bytes([0x80, protocol]) for protocol in range(2, 6)), b"PK\x03\x04")
"""First bytes of a pickle, and of the archive in which torch.save packs one."""
# A safetensors file begins with the length of its JSON header: 8 bytes, little-endian.
_LENGTH_BYTES = 8


def hash_file(path: Path, on_block: Callable[[int], None] | None = None) -> FileEntry:
    """Size and SHA-256 of a file.

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
    """Size, SHA-256 and block checksums of a file that was just written.

    Args:
        path: a regular file.
        block_bytes: length of a block.
    """
    # One pass makes both kinds of checksum, because the file is read only once.
    digest, size, of_blocks = hashlib.sha256(), 0, []
    import xxhash  # compiled; not needed by commands that read no checkpoint

    # XXH3-64, because CRC-32 took a third of all hashing time: it finds damage, and SHA-256 is
    # beside it.
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
    # The last block is shorter, unless the file is a multiple of the block.
    if size % block_bytes:
        of_blocks.append(block.hexdigest())
    blocks = BlockChecksums(block_bytes=block_bytes, xxh3_64="".join(of_blocks))
    return FileEntry(size_bytes=size, sha256=digest.hexdigest(), blocks=blocks)


def remote_problem(
    path: Path, entry: FileEntry, on_block: Callable[[int], None] | None, *, fetching: bool
) -> str | None:
    """Problem of a file that is stored at a url; None: there is none.

    Args:
        path: local path that stands for the shard; the shard itself is at the url.
        entry: its expected size and checksums.
        on_block: called with the length of each block that is done.
        fetching: always read the whole file; otherwise only if it has no block checksums, by which
            readers verify it, or if damage was found in it before.
    """
    url, mark = url_of(path), _damage_mark(path)
    try:
        # Existence and size come first: one small request, where the checksum needs the whole file.
        size = url_files(path).size_bytes(path)
        if size is None:
            return f"{url} is missing."
        if size != entry.size_bytes:
            return f"{url} has {size:,} bytes instead of {entry.size_bytes:,}."
        # Readers verify each block as they fetch it. Only a file in which a rank found damage is
        # read whole, so that one mechanism, SHA-256, decides whether a checkpoint can be used.
        if not fetching and entry.blocks is not None and not mark.exists():
            return None
        digest = hashlib.sha256()
        for block in url_files(path).blocks(path, size):
            digest.update(block)
            if on_block:
                on_block(len(block))
    except StorageError as error:
        return f"{error}."
    if digest.hexdigest() != entry.sha256:
        return f"{url} is damaged: its checksum differs."
    # All of the file is intact, so later starts need not read it again.
    mark.unlink(missing_ok=True)
    return None


def mark_damaged(path: Path) -> None:
    """Make the next start read all of a file at a url, because damage was found in it.

    Raises:
        OSError: the mark cannot be written.
    """
    mark = _damage_mark(path)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def format_problem(path: Path, entry: FileEntry) -> str | None:
    """Problem of a file whose content is not what its name says; None: there is none.

    Args:
        path: of the file, or its local path if it is stored at a url.
        entry: its expected size and checksums.
    """
    try:
        if lies_elsewhere(path):
            url_files(path).tensors(path, entry.blocks)  # only shards stay at a url
            is_sound = True
        elif path.suffix == ".safetensors":
            is_sound = _is_safetensors(path)
        elif path.suffix == ".json":
            is_sound = isinstance(json.loads(path.read_bytes()), dict | list)
        else:
            with path.open("rb") as file:
                # Templates and recipes are text of any form: only a pickle in their place is
                # refused.
                is_sound = not file.read(4).startswith(_PICKLES)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})."
    except (DamagedObject, StorageError) as error:
        return f"{error}."
    # JSON that is nested too deeply raises RecursionError.
    except (ValueError, RecursionError):
        is_sound = False
    if is_sound:
        return None
    kind = f"a valid {path.suffix.removeprefix('.')}" if path.suffix else "such a"
    return f"{path} is not {kind} file: it was not written by ftkit."


def _is_safetensors(path: Path) -> bool:
    """Return whether the header of a safetensors file accounts for every byte of it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES + length:
            return False
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        return False
    # The largest end must be the end of the file: neither a cut file nor bytes behind the tensors.
    ends = [0]
    for name, entry in header.items():
        # The only entry of a header that is not a tensor.
        if name == "__metadata__":
            continue
        try:
            ends.append(int(entry["data_offsets"][1]))
        except (TypeError, KeyError, IndexError):
            return False
    return size == _LENGTH_BYTES + length + max(ends)


def _parts(path: Path, most_bytes: int) -> Iterator[memoryview]:
    """All of a file in parts, each valid until the next one is read."""
    buffer = memoryview(bytearray(most_bytes))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]


def _damage_mark(path: Path) -> Path:
    # Not in the directory of the run, which may be replaced before the next start.
    name = hashlib.sha256(str(url_of(path)).encode()).hexdigest()[:32]
    return working_root() / ".known" / f"{name}.doubt"
