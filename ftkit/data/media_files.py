"""Files of media of samples that are kept: whether they still hold what they held.

Each has a stamp: size and time of its last change. A file with another stamp is read and compared
by its digest, so that data that were copied are known again.
"""

import hashlib
import os
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ftkit.data.records.media import MediaFile
from ftkit.data.samples.layout import IntArray

_THREADS = 16
_AT_ONCE = 1000
"""Files that a thread takes at a time."""
_UNKNOWN = (-2, -2)
"""Stamp of a file that has to be read, which no file has."""
_NOT_THERE = (-1, -1)
_SETTLING_NS = 2 * 10**9
"""A file may change again within the grain of the clock that stamps it: 2 s on some disks."""
_Found = TypeVar("_Found")


def stamps_of(files: Sequence[MediaFile], read_at_ns: int) -> IntArray:
    """[files, 2], size in bytes and time of the last change in ns, of each file.

    Args:
        files: any.
        read_at_ns: when reading them began. One that has changed since gets a stamp that no file
            has.
    """
    found = np.array(_each(_stamp, files), dtype=np.int64).reshape(-1, 2)
    found[found[:, 1] > read_at_ns - _SETTLING_NS] = _UNKNOWN
    return found


def first_changed(files: Sequence[MediaFile], stamps: Any) -> tuple[MediaFile | None, IntArray]:
    """Return the first file that no longer holds what it held, and the stamps of all files.

    Args:
        files: any.
        stamps: [files, 2], of them when they held it; anything else counts as unknown.
    """
    before = time.time_ns()
    now = np.array(_each(_stamp, files), dtype=np.int64).reshape(-1, 2)
    if getattr(stamps, "shape", None) != now.shape:
        stamps = np.full_like(now, _UNKNOWN[0])
    numbers = np.flatnonzero((now != stamps).any(1)).tolist()
    others = [files[number] for number in numbers]
    for one, holds in zip(others, _each(_holds_the_same, others), strict=True):
        if not holds:
            return one, now
    touched = now[:, 1] > before - _SETTLING_NS
    now[touched] = _UNKNOWN
    return None, now


def _each(work: Callable[[MediaFile], _Found], files: Sequence[MediaFile]) -> list[_Found]:
    starts = range(0, len(files), _AT_ONCE)
    if len(starts) < 2:
        return [*map(work, files)]
    with ThreadPoolExecutor(_THREADS) as pool:
        groups = pool.map(lambda start: [*map(work, files[start : start + _AT_ONCE])], starts)
        return [one for group in groups for one in group]


def _stamp(one: MediaFile) -> tuple[int, int]:
    try:
        found = os.stat(one.file)  # noqa: PTH116  # 100,000 paths as objects take a second
    except (OSError, ValueError):  # a name with a null character
        return _NOT_THERE
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else _NOT_THERE


def _holds_the_same(one: MediaFile) -> bool:
    # One that could not be used has no digest: it may hold something else now.
    if not one.digest or _stamp(one) == _NOT_THERE:
        return False
    try:
        with Path(one.file).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == one.digest
    except OSError:
        return False
