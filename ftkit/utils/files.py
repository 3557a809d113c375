"""Durable files: still there, and whole, after a crash of the program or the machine."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# The last report and the error of a rank take less than 256 KiB.
_RESERVE_BYTES = 2**18
CACHE_VARIABLE = "FTKIT_CACHE_DIR"


def cache_root() -> Path:
    """Directory of everything that is kept between runs and may be deleted between them."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/ftkit").expanduser()


def write_durably(path: Path, content: str | bytes) -> None:
    """Write a file atomically: after a crash, it holds the new content or what it held before.

    Raises:
        OSError: it cannot be written, and is unchanged.
    """
    # The content reaches the disk before the rename, and the rename with the directory.
    _write_at_once(path, content, synced=True)
    sync(path.parent)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a small file so that a reader sees all of it or nothing."""
    _write_at_once(path, json.dumps(values), synced=False)


def _write_at_once(path: Path, content: str | bytes, *, synced: bool) -> None:
    # In the same directory, because a rename does not cross file systems. With the process id,
    # because several processes may write the file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if synced:
                # A file system may put the rename on the disk before the content.
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def make_reserve(path: Path) -> None:
    """Take space on a disk, for what `write_with_reserve` has to write when the disk is full.

    Raises:
        OSError: the disk is full.
    """
    # Random, because a file system that compresses would hardly reserve space for zeros.
    path.write_bytes(os.urandom(_RESERVE_BYTES))


def write_with_reserve(write: Callable[[], object], reserve: Path) -> None:
    """Write something small; if that fails, once more with the space that was reserved.

    Args:
        write: writes it.
        reserve: what `make_reserve` made, or nothing.

    Raises:
        OSError: it still cannot be written.
    """
    try:
        write()
    except OSError:
        reserve.unlink(missing_ok=True)
        write()


@contextmanager
def new_directory(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Make a directory to fill, which takes its place after the block, complete and synced.

    If the block, the program or the machine fails, what was there before stays. The next call
    removes what a crash has left.

    Args:
        out: its place; an empty directory, or nothing.
        overwrite: replace what is there, after the block.

    Raises:
        FileExistsError: something is there.
        OSError: another process fills it, or it cannot be written.
    """
    partial, replaced = _partial(out), out.with_name(f".{out.name}.replaced")
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = _locked(partial)
    try:
        for path in partial.iterdir():
            remove(path)
        if replaced.exists() and not out.exists():  # a crash between the two renames below
            replaced.rename(out)
        shutil.rmtree(replaced, ignore_errors=True)
        if not overwrite and out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(out))
        yield partial
        # All content is on the disk before its name is there.
        for path in (*partial.rglob("*"), partial):
            sync(path)
        # A directory can only be renamed onto an empty one, so the old one moves away first.
        if overwrite and out.exists():
            out.rename(replaced)
        partial.rename(out)
        sync(out.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        # While it is locked, so that no other process has begun to fill it.
        shutil.rmtree(partial, ignore_errors=True)
        os.close(descriptor)


def discard_partial(out: Path) -> None:
    """Remove what a killed process has left of `new_directory`; not what another one fills."""
    partial = _partial(out)
    with suppress(OSError):
        descriptor = _locked(partial)
        try:
            shutil.rmtree(partial)
        finally:
            os.close(descriptor)


def _partial(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


def _locked(directory: Path) -> int:
    """Lock a directory against other processes that call this; return its open descriptor."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # The kernel drops the lock with the process, so what a killed one has left can be taken
        # over.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that held the lock may have renamed or removed it just now.
        if not directory.exists() or not os.path.samestat(os.fstat(descriptor), directory.stat()):
            raise BlockingIOError
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            message = "another process is writing it"
            raise BlockingIOError(errno.EWOULDBLOCK, message, str(directory)) from None
        raise
    return descriptor


def remove(path: Path) -> None:
    """Remove a directory with its content, a file or a link; nothing happens if it is missing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_disk_bytes(place: Path) -> int:
    """Free bytes on the disk where a file or directory is, or would be."""
    # The nearest directory that exists is on the same disk.
    above = (place.absolute(), *place.absolute().parents)
    return shutil.disk_usage(next(path for path in above if path.exists())).free


def widen_table(path: Path, columns: Sequence[str]) -> tuple[str, ...]:
    """Append columns that a CSV file lacks, empty in the rows so far.

    Args:
        path: an existing file; an incomplete row is dropped.
        columns: that it must have.

    Returns:
        Its columns from then on; `columns` if not even its header is complete.

    Raises:
        OSError: the file cannot be written, and is unchanged.
    """
    # What follows the last line end is part of a row, whose writer was killed.
    header, *rows = path.read_bytes().split(b"\n")[:-1] or [b""]
    before = tuple(header.decode(errors="replace").split(",")) if header else ()
    further = [column for column in columns if column not in before]
    if header and further:
        ending = b"," * len(further)
        lines = (",".join((*before, *further)).encode(), *(row + ending for row in rows))
        write_durably(path, b"".join(line + b"\n" for line in lines).decode(errors="replace"))
    return (*before, *further)
