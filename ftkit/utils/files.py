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

# 256 KiB: the last report and the error of a rank take less.
_RESERVE_BYTES = 2**18
CACHE_VARIABLE = "FTKIT_CACHE_DIR"


def cache_root() -> Path:
    """Directory of everything that is kept between runs and may be deleted between them."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/ftkit").expanduser()


def write_durably(path: Path, text: str) -> None:
    """Write a file at once: after a crash, it holds the new text or what it held before.

    Raises:
        OSError: and the file is as it was.
    """
    _write_at_once(path, text, synced=True)
    sync(path.parent)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a small file so that a reader sees all of it or nothing."""
    _write_at_once(path, json.dumps(values), synced=False)


def _write_at_once(path: Path, text: str, *, synced: bool) -> None:
    # In the same directory, because a rename does not cross file systems; by process, because
    # several may write the file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def make_reserve(path: Path) -> None:
    """Take space on a disk, for what `write_with_reserve` has to write when the disk is full.

    Raises:
        OSError: there is none left.
    """
    path.write_bytes(os.urandom(_RESERVE_BYTES))  # what can be compressed takes no space


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
    """A directory to fill, beside its place; after the block it is there, complete and synced.

    If the block fails, or the program or the machine does, there is what was there before. What a
    crash has left is cleared away by the next call.

    Args:
        out: its place; empty or not there.
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
        for path in (*partial.rglob("*"), partial):
            sync(path)
        if overwrite and out.exists():
            out.rename(replaced)
        partial.rename(out)
        sync(out.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(descriptor)


def discard_partial(out: Path) -> None:
    """Remove what a process that was killed has left of `new_directory`."""
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
    """An open descriptor of a directory that no other process has locked so."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # The kernel drops the lock with the process, so what a killed one has left can be taken
        # over.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had it may have renamed or removed it just now.
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
    """Remove a directory with all in it, or a file or link, or nothing if there is none."""
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
    """Free space where a file or directory is, or would be."""
    above = (place.absolute(), *place.absolute().parents)
    return shutil.disk_usage(next(path for path in above if path.exists())).free


def widen_table(path: Path, columns: Sequence[str]) -> tuple[str, ...]:
    """Give a CSV file the columns that it lacks, as the last ones, empty in the rows so far.

    Args:
        path: an existing file; a row that is not whole is dropped.
        columns: that it is to have.

    Returns:
        Its columns from then on; `columns`, where not even its header is whole.

    Raises:
        OSError: the file cannot be written; it is as it was.
    """
    header, *rows = path.read_bytes().split(b"\n")[:-1] or [b""]
    before = tuple(header.decode(errors="replace").split(",")) if header else ()
    further = [column for column in columns if column not in before]
    if header and further:
        ending = b"," * len(further)
        lines = (",".join((*before, *further)).encode(), *(row + ending for row in rows))
        write_durably(path, b"".join(line + b"\n" for line in lines).decode(errors="replace"))
    return (*before, *further)
