"""Files that are still there, and whole, after a crash of the program or the machine."""

import os
from collections.abc import Callable
from pathlib import Path

RESERVE_BYTES = 2**18


def write_durably(path: Path, text: str) -> None:
    """Write a file at once: after a crash, it holds the new text or what it held before.

    Raises:
        OSError: and the file is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def make_reserve(path: Path) -> None:
    """Take space on a disk, for what `insist` has to write when the disk is full.

    Raises:
        OSError: there is none left.
    """
    path.write_bytes(os.urandom(RESERVE_BYTES))  # what can be compressed takes no space


def insist(write: Callable[[], object], reserve: Path) -> None:
    """Write something small; if that fails, once more with the space that was reserved.

    Args:
        write: writes it.
        reserve: what `make_reserve` made, or nothing.

    Raises:
        OSError: it cannot be written all the same.
    """
    try:
        write()
    except OSError:
        reserve.unlink(missing_ok=True)
        write()


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk: new, renamed and removed entries."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
