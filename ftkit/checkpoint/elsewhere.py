"""Files of a checkpoint that lie at its url: whether they are what they must be.

A rank verifies what it reads of them. One that finds damage leaves a doubt, so that the next start
reads the whole file before it chooses the checkpoint to go on from.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

from ftkit.checkpoint.metadata import FileEntry
from ftkit.remote.objects import StorageError
from ftkit.remote.ranges import remote_blocks, remote_size_bytes
from ftkit.remote.urls import url_of, working_root


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


def _doubt(path: Path) -> Path:
    """What is there while a file is in doubt; it lies apart from the run, which may be replaced."""
    name = hashlib.sha256(str(url_of(path)).encode()).hexdigest()[:32]
    return working_root() / ".known" / f"{name}.doubt"
