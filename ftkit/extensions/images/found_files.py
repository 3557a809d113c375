"""Files of media: found by what records say, read, and kept where records hold them.

Files come from anywhere: nothing is fetched, and what a header says is checked before anything is
decoded.
"""

import base64
import binascii
import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from ftkit.data.records.media import BadMedium, MediaFile, media_row
from ftkit.data.records.record import Misfit, kind_of
from ftkit.errors import UserError
from ftkit.utils.files import cache_root

MOST_BYTES = 2**28
"""Most bytes of a file."""
_REMOVE = "Correct it, or remove the record."


class BrokenMedium(Exception):
    """A file cannot be read as a medium. The text ends a sentence that begins with the file."""


class _Named(NamedTuple):
    """The file of a medium that a record names."""

    path: Path
    is_relative: bool
    """Whether the record says where it lies beside its own file."""


@dataclass(frozen=True)
class FilesOf:
    """How records have files of media of a kind."""

    kind: str
    """Its name, as in messages."""
    check: Callable[[bytes], Any]
    """Raises a `BrokenMedium` for content whose header says that it cannot be read."""

    @property
    def _noun(self) -> str:
        return media_row(self.kind).noun

    def reference(
        self, value: Any, folder: Path | None, *, names_files: bool = True
    ) -> dict[str, Any]:
        """Return file and digest of a medium that a record names or holds, and if it is relative.

        A medium that the record holds is kept in ftkit's cache, once for each content.

        Args:
            value: a path, a file or data url, an object with bytes or a path, or bytes.
            folder: directory of the records, in which relative paths begin; None: they are in no
                file.
            names_files: whether it may be a file of this machine, which no download may name.

        Raises:
            Misfit: the medium is missing or cannot be read; a BadMedium, if the value names a file.
        """
        held = self._held(value, folder)
        if isinstance(held, _Named):
            if not names_files:
                raise Misfit(
                    f": its {self.kind} is the path {_short(str(held.path))}, but data that were "
                    f"downloaded hold their {self._noun}.\n{_REMOVE}"
                )
            try:
                content = read_file(held.path)
                self.check(content)
            except BrokenMedium as broken:
                file = MediaFile(self.kind, "", str(held.path), held.is_relative)
                said = f": its {self.kind} {held.path} {broken}.\n{_REMOVE}"
                raise BadMedium(said, file) from None
            digest = hashlib.sha256(content).hexdigest()
            return {"file": str(held.path), "sha256": digest, "is_relative": held.is_relative}
        content, name = held
        try:
            self.check(content)
        except BrokenMedium as broken:
            raise Misfit(f": its {self.kind} {name} {broken}.\n{_REMOVE}") from None
        digest = hashlib.sha256(content).hexdigest()
        return {"file": str(self._kept(content, digest)), "sha256": digest, "is_relative": False}

    def content(self, file: str, digest: str) -> bytes:
        """Read a file again, which must hold what it held.

        Raises:
            UserError: it is not there, or holds something else.
        """
        try:
            content = read_file(Path(file))
        except BrokenMedium as broken:
            raise UserError(
                f"The {self.kind} {file} {broken}, but samples were made of it.\nPut it back."
            ) from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise UserError(
                f"The {self.kind} {file} has changed since samples were made of it.\n"
                "Put the former one back, or start again to make new samples."
            )
        return content

    def _kept(self, content: bytes, digest: str) -> Path:
        """Return the file of the cache with some content."""
        file = cache_root() / "media" / digest[:2] / digest
        if file.is_file():
            return file
        # Renamed into its place, so that it is whole or not there.
        partial = file.with_name(f"{digest}.{os.getpid()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(content)
            partial.replace(file)
        except OSError as error:
            raise UserError(
                f"The {self._noun} of the records cannot be kept in {file.parent} "
                f"({error.strerror}).\nSet FTKIT_CACHE_DIR to a directory that can be written."
            ) from None
        return file

    def _held(self, value: Any, folder: Path | None) -> _Named | tuple[bytes, str]:
        """The file of a medium, or its content and its name in messages."""
        if isinstance(value, Mapping):
            return self._held_by_object(value, folder)
        if isinstance(value, bytes):
            return value, "(given as bytes)"
        if not isinstance(value, str):
            raise Misfit(f": its {self.kind} is {kind_of(value)}, but has to be a path.\n{_REMOVE}")
        if value.startswith("data:"):
            head, _, text = value.partition(",")
            if not head.endswith(";base64"):
                raise Misfit(f": its {self.kind} is a data url without base64.\n{_REMOVE}")
            return self._decoded(text), "(a data url)"
        scheme = urlsplit(value).scheme.lower()
        if scheme in ("http", "https", "ftp", "s3", "gs", "hf"):
            raise Misfit(
                f": its {self.kind} is {_short(value)}, but ftkit fetches no {self._noun}.\n"
                "Download the files, such as with curl --remote-name URL, and give their paths."
            )
        path = Path(unquote(urlsplit(value).path)) if scheme == "file" else Path(value).expanduser()
        if path.is_absolute():
            return _Named(path, is_relative=False)
        if folder is None:
            raise Misfit(
                f": its {self.kind} is the path {_short(value)}, but records that are in no file "
                f"of this machine hold their {self._noun}.\n{_REMOVE}"
            )
        return _Named(folder / path, is_relative=True)

    def _held_by_object(
        self, value: Mapping[str, Any], folder: Path | None
    ) -> _Named | tuple[bytes, str]:
        """As `_held`, of an object: bytes and path of a table, or url of OpenAI's parts."""
        content = value.get("bytes")
        if isinstance(content, bytes | str) and content:
            name = value.get("path")
            shown = _short(name) if isinstance(name, str) and name else "(given as bytes)"
            return (content if isinstance(content, bytes) else self._decoded(content)), shown
        for key in ("path", "url", self.kind):
            if isinstance(value.get(key), str | bytes):
                return self._held(value[key], folder)
        raise Misfit(f": its {self.kind} is an object without bytes, path or url.\n{_REMOVE}")

    def _decoded(self, text: str) -> bytes:
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise Misfit(f": its {self.kind} is not valid base64.\n{_REMOVE}") from None


def read_file(path: Path) -> bytes:
    """Read the file of a medium, through links.

    Raises:
        BrokenMedium: the file is missing, not a regular file, or too large.
    """
    try:
        # Not blocking: opening a pipe would wait for whoever writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise BrokenMedium("is not a file, but a directory, a pipe or a device")
            if state.st_size > MOST_BYTES:
                raise BrokenMedium(f"has more than {MOST_BYTES // 2**20} MiB")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise BrokenMedium("is not there") from None
    except (OSError, ValueError) as error:  # a name with a null character
        raise BrokenMedium(f"cannot be read ({error})") from None


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
