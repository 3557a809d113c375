"""Where the files of a corpus lie: on this machine, below a url of object storage, or on a hub.

All are read by ranges of bytes. A file at a url is named by the path that stands for it, one of a
hub by OWNER/NAME and its path in the repository.
"""

import io
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from ftkit.errors import UserError
from ftkit.utils.damaged_files import require_regular
from ftkit.utils.url_files import StorageError, UrlObjects, unreachable
from ftkit.utils.urls import display_path


@dataclass(frozen=True, kw_only=True)
class PlacedFile:
    """A file of a corpus, as it was found."""

    path: Path
    name: str
    """Its path below the directory of the corpus."""
    size_bytes: int
    version: str = ""
    """Of an object or a file of a hub, which changes whenever the content does; "": it is on this
    machine."""

    @property
    def shown(self) -> str:
        """Its path or url, for people."""
        return display_path(self.path)


class Place(ABC):
    """A directory of files, by their names below it; one thread or several."""

    is_local: bool

    @abstractmethod
    def find(self, name: str) -> PlacedFile | None:
        """Look for a file; None: there is none."""

    @abstractmethod
    def all(self) -> list[PlacedFile]:
        """All files below it whose names, and those of their directories, begin with no dot."""

    @abstractmethod
    def read(self, file: PlacedFile, start: int, stop: int) -> bytes:
        """Read the bytes [start, stop) of a file, fewer where it ends before.

        Raises:
            OSError: it cannot be read.
            UserError: its storage does not answer.
        """

    @abstractmethod
    def require_unchanged(self, file: PlacedFile) -> None:
        """Refuse a file that is not the one that was found, as far as can be seen from outside.

        Raises:
            UserError: it has another size or version, or is not there.
        """

    @abstractmethod
    def whole(self, file: PlacedFile) -> Any:
        """A context with a file on this machine that has all of its content."""

    @abstractmethod
    def opened(self, file: PlacedFile) -> Any:
        """What pyarrow reads from any place in it."""


class Disk(Place):
    """A directory of this machine."""

    is_local = True

    def __init__(self, root: Path) -> None:
        """Take a directory that is there."""
        self._root = root

    def find(self, name: str) -> PlacedFile | None:
        path = self._root / name
        require_regular(path)
        if not path.is_file():
            return None
        return PlacedFile(path=path, name=name, size_bytes=path.stat().st_size)

    def all(self) -> list[PlacedFile]:
        found = []
        # One look at each file: a corpus of a terabyte may have many thousands.
        for directory, below, names in os.walk(self._root):
            below[:] = [name for name in below if _is_visible(name)]
            within = Path(directory).relative_to(self._root)
            for name in filter(_is_visible, names):
                path = self._root / within / name
                try:
                    seen = path.stat()
                except OSError:  # a link that leads nowhere
                    continue
                if S_ISREG(seen.st_mode):
                    placed = (within / name).as_posix()
                    found.append(PlacedFile(path=path, name=placed, size_bytes=seen.st_size))
        return found

    def read(self, file: PlacedFile, start: int, stop: int) -> bytes:
        with file.path.open("rb") as opened:
            return os.pread(opened.fileno(), stop - start, start)

    def require_unchanged(self, file: PlacedFile) -> None:
        if file.path.stat().st_size != file.size_bytes:
            raise UserError(
                f"{file.path} has another size than when the run began.\nRestore it, or start "
                "a new run with another --out_dir."
            )

    @contextmanager
    def whole(self, file: PlacedFile) -> Iterator[Path]:
        yield file.path

    def opened(self, file: PlacedFile) -> Any:
        return file.path


class Elsewhere(Place):
    """A place in a bucket, or the files of a data set on a hub."""

    is_local = False

    def __init__(self, root: Path, objects: UrlObjects) -> None:
        """Prepare; no request is sent yet.

        Args:
            root: the directory that stands for the url, or for the data set.
            objects: below it.
        """
        self._root, self._objects = root, objects

    def find(self, name: str) -> PlacedFile | None:
        with _answering():
            entry = self._objects.entry(name)
        return None if entry is None else self._placed(name, entry.size_bytes, entry.version)

    def all(self) -> list[PlacedFile]:
        with _answering():
            found = self._objects.listing()
        return [
            self._placed(name, entry.size_bytes, entry.version)
            for name, entry in found.items()
            if all(map(_is_visible, name.split("/")))
        ]

    def read(self, file: PlacedFile, start: int, stop: int) -> bytes:
        stop = min(stop, file.size_bytes)
        if start >= stop:
            return b""
        with _answering():
            return self._objects.read_range(file.name, start, stop)

    def require_unchanged(self, file: PlacedFile) -> None:
        if self.find(file.name) != file:
            raise UserError(
                f"{file.shown} has changed since the run began: it has another version, or is not "
                "there.\nRestore it, or start a new run with another --out_dir."
            )

    @contextmanager
    def whole(self, file: PlacedFile) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, Path(file.name).name)
            with _answering():
                self._objects.download(file.name, path)
            try:
                yield path
            except UserError as error:
                raise UserError(str(error).replace(str(path), file.shown)) from error

    def opened(self, file: PlacedFile) -> Any:
        return _Seekable(self, file)

    def _placed(self, name: str, size_bytes: int, version: str) -> PlacedFile:
        path = self._root / name
        return PlacedFile(path=path, name=name, size_bytes=size_bytes, version=version)


class _Seekable(io.RawIOBase):
    """A file elsewhere, as pyarrow reads files: its end, then the columns that are wanted."""

    def __init__(self, place: Elsewhere, file: PlacedFile) -> None:
        super().__init__()
        self._place, self._file, self._at = place, file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size_bytes}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        content = self._place.read(self._file, self._at, self._at + len(buffer))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def _is_visible(name: str) -> bool:
    return not name.startswith(".")


@contextmanager
def _answering() -> Iterator[None]:
    """Say of storage that does not answer what to check."""
    try:
        yield
    except StorageError as error:
        raise unreachable(error) from error
