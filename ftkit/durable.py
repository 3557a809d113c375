"""Files that are still there, and whole, after a crash of the program or the machine."""

import os
from pathlib import Path


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


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk: new, renamed and removed entries."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
