"""Data files, opened: decompressed, decoded, and told apart from files of other kinds."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from ftkit.errors import UserError
from ftkit.utils.damaged_files import require_regular

COMPRESSED = (".gz", ".zst")
"""Endings behind those of text files."""

_MAGIC = {
    b"PAR1": ("a parquet file", "Rename it to {stem}.parquet"),
    b"\x1f\x8b": ("compressed with gzip", "Rename it to {name}.gz"),
    b"\x28\xb5\x2f\xfd": ("compressed with Zstandard", "Rename it to {name}.zst"),
    b"PK\x03\x04": (
        "a zip archive, such as an Excel sheet",
        "Unpack it, or save the sheet as CSV (UTF-8), and give that",
    ),
    b"\xd0\xcf\x11\xe0": ("an Excel sheet", "Save the sheet as CSV (UTF-8), and give that"),
    b"version https://git-lfs": (
        "a pointer of Git LFS, not the file itself",
        "Run git lfs pull in its repository",
    ),
    b"ARROW1": ("an Arrow file", "Give the directory that save_to_disk of datasets writes"),
}
_WEB_PAGE = (b"<!doctype html", b"<html")
_HEAD_BYTES = 64
_UNPACKED_AT_ONCE = 2**16
_MOST_LINE_BYTES = 2**27
"""A record of more is a file that lost its line ends, or is none."""
_MOST_UNPACKED_BYTES, _MOST_TIMES = 2**28, 200
"""Of a compressed file, and how many times its size if that is more: texts come to 50 at most."""


@contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """The bytes of a file without compression, for as long as it is read.

    Raises:
        UserError: it cannot be decompressed, or is of another kind than its name says.
        OSError: it cannot be read.
    """
    require_regular(file)
    try:
        with file.open("rb") as raw:
            _check_kind(file, raw.read(_HEAD_BYTES))
            raw.seek(0)
            yield _decompressed(file, raw)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(_explain_damage(file, error)) from None


def text_of(file: Path) -> str:
    """All text of a file, a byte order mark apart.

    Raises:
        UserError: as `opened`, or it is not UTF-8.
    """
    with opened(file) as stream:
        return _decoded(file, stream.read(), 0)


def lines_of(file: Path) -> Iterator[str]:
    """The lines of a text file with their ends, a byte order mark apart; never all at once.

    Lines end at a line feed alone: JSON allows other separators inside texts.

    Raises:
        UserError: as `opened`, or it is not UTF-8.
    """
    done_bytes = 0
    with opened(file) as stream:
        for number, line in enumerate(iter(partial(stream.readline, _MOST_LINE_BYTES + 1), b""), 1):
            if len(line) > _MOST_LINE_BYTES:
                raise UserError(
                    f"{file}, line {number}, has more than {_MOST_LINE_BYTES:,} bytes.\n"
                    "Give each record a line of its own, and cut long ones into several."
                )
            yield _decoded(file, line, done_bytes)
            done_bytes += len(line)


def _decoded(file: Path, content: bytes, start: int) -> str:
    try:
        return content.decode("utf-8-sig" if start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 text: byte {start + error.start} is "
            f"{error.object[error.start]:#04x}.\nSave it with the encoding UTF-8."
        ) from None


def _decompressed(file: Path, raw: BinaryIO) -> BinaryIO:
    ending = file.suffix.lower()
    if ending == ".gz":
        return _limited(file, gzip.GzipFile(fileobj=raw))
    if ending != ".zst":
        return raw
    try:
        import zstandard
    except ImportError:
        raise UserError(
            f"{file} is compressed with Zstandard, which needs a package of its own.\n"
            "Try pip install 'ftkit[zstd]', or decompress the file."
        ) from None
    return _limited(file, _Unpacking(raw, zstandard, file))


def most_unpacked_bytes(packed: int) -> int:
    """How much the content of so many bytes may be; the rest is made to fill memory."""
    return max(_MOST_UNPACKED_BYTES, _MOST_TIMES * packed)


def explain_too_large(file: Path) -> str:
    """Why a file is refused whose content is much larger than itself."""
    return (
        f"{file} unpacks to more than {_MOST_TIMES} times its size, which would fill memory.\n"
        "Give it unpacked, if it is data."
    )


def _limited(file: Path, content: io.RawIOBase | gzip.GzipFile) -> BinaryIO:
    return io.BufferedReader(_Limited(file, content), _UNPACKED_AT_ONCE)


class _Limited(io.RawIOBase):
    """What is unpacked, up to `most_unpacked_bytes`."""

    def __init__(self, file: Path, content: io.RawIOBase | gzip.GzipFile) -> None:
        self._file, self._content = file, content
        self._left = most_unpacked_bytes(file.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._content.readinto(buffer) or 0
        self._left -= count
        if self._left < 0:
            raise UserError(explain_too_large(self._file))
        return count


class _Unpacking(io.RawIOBase):
    """The content of a Zstandard file; the reader of its package takes a cut one for a whole."""

    def __init__(self, raw: BinaryIO, zstandard: ModuleType, file: Path) -> None:
        self._raw, self._file = raw, file
        self._frame = zstandard.ZstdDecompressor().decompressobj
        self._damage = zstandard.ZstdError
        self._decoder: Any = None
        self._packed = self._content = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            packed = self._packed or self._raw.read(_UNPACKED_AT_ONCE)
            if not packed:
                if self._decoder is not None:
                    raise EOFError("its end is missing")
                return 0
            self._decoder = self._decoder or self._frame()
            try:
                self._content = self._decoder.decompress(packed)
            except self._damage as error:
                raise UserError(_explain_damage(self._file, error)) from None
            self._packed = self._decoder.unused_data
            if self._decoder.eof:
                self._decoder = None
        count = min(len(buffer), len(self._content))
        buffer[:count], self._content = self._content[:count], self._content[count:]
        return count


def _check_kind(file: Path, head: bytes) -> None:
    """Refuse a file that begins like one of another kind."""
    ending = file.suffix.lower()
    known = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".parquet": b"PAR1"}
    if ending in known and head.startswith(known[ending]):
        return
    for magic, (kind, works) in _MAGIC.items():
        if head.startswith(magic):
            stem = file.name.removesuffix(file.suffix)
            advice = works.format(stem=stem, name=file.name)
            raise UserError(f"{file} is {kind}, not what its name says.\n{advice}.")
    if ending != ".txt" and head.lstrip().lower().startswith(_WEB_PAGE):
        raise UserError(
            f"{file} is a web page, not data.\nDownload the file itself: its address often has "
            "/resolve/ or /raw/ where that of its page has /blob/."
        )
    if ending in known:
        raise UserError(
            f"{file} is not what its name says: it does not begin as {ending} files do.\n"
            "Rename it to what it is, such as "
            f"{file.name.removesuffix(file.suffix).removesuffix('.jsonl')}.jsonl."
        )


def _explain_damage(file: Path, error: Exception) -> str:
    return (
        f"{file} cannot be decompressed: {error}.\nCopy or download it again; it may be cut short."
    )
