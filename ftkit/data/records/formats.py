"""Formats of data files: how each is recognised, unpacked and read as rows."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

from ftkit.data.records.keys import CONVERSATION_KEYS
from ftkit.data.records.record import Misfit, keys_of, kind_of
from ftkit.data.records.shape_rows import known_shapes
from ftkit.errors import UserError
from ftkit.utils.damaged_files import reading, require_regular
from ftkit.utils.registry import Registry, imported

if TYPE_CHECKING:
    pass

COMPRESSED = (".gz", ".zst")
"""Suffixes behind those of text files."""

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
# Bytes, enough for the longest of these marks.
_HEAD_BYTES = 64
# Bytes.
_UNPACKED_AT_ONCE = 2**16
_MOST_LINE_BYTES = 2**27
"""Longest line; a longer one means that the file lost its line ends or is not text."""
_MOST_UNPACKED_BYTES, _MOST_TIMES = 2**28, 200
"""Largest content of a compressed file, or this many times its size: texts reach 50 times."""


@contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed.

    Raises:
        UserError: it cannot be decompressed, or is of another kind than its name says.
        OSError: it cannot be read.
    """
    require_regular(file)
    try:
        with file.open("rb") as raw:
            # The kind first: a parser's error about a zip archive would not say what it is.
            _check_kind(file, raw.read(_HEAD_BYTES))
            raw.seek(0)
            yield _decompressed(file, raw)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(_explain_damage(file, error)) from None


def text_of(file: Path) -> str:
    """Read a whole text file, without its byte order mark.

    Raises:
        UserError: as `opened`, or it is not UTF-8.
    """
    with opened(file) as stream:
        return _decoded(file, stream.read(), is_first=True)


def lines_of(file: Path) -> Iterator[str]:
    """Yield the lines of a text file with their ends, without a byte order mark.

    The file is never in memory as a whole. Only a line feed ends a line, because JSON allows other
    separators inside texts.

    Raises:
        UserError: as `opened`, or it is not UTF-8.
    """
    with opened(file) as stream:
        # One byte more than allowed shows that a line is too long, without reading all of it.
        for number, line in enumerate(iter(partial(stream.readline, _MOST_LINE_BYTES + 1), b""), 1):
            if len(line) > _MOST_LINE_BYTES:
                raise UserError(
                    f"{file}, line {number}, has more than {_MOST_LINE_BYTES:,} bytes.\n"
                    "Give each record a line of its own, and cut long ones into several."
                )
            yield _decoded(file, line, is_first=number == 1)


def _decoded(file: Path, content: bytes, *, is_first: bool) -> str:
    if is_first and 0 in content[:2]:  # UTF-16 without a mark
        raise _not_utf8(file)
    try:
        # Excel begins CSV files with a byte order mark, which would become part of the first name.
        return content.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError:
        raise _not_utf8(file) from None


def without_nul(file: Path, text: str) -> str:
    """A text of a format that says nothing about NUL characters, as JSON does."""
    if "\0" in text:
        raise _not_utf8(file)
    return text


def _not_utf8(file: Path) -> UserError:
    from ftkit.utils.texts import explain_not_utf8

    with opened(file) as stream:
        return UserError(explain_not_utf8(file, stream))


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
    """Largest content of a compressed file of a size; more is a decompression bomb."""
    return max(_MOST_UNPACKED_BYTES, _MOST_TIMES * packed)


def explain_too_large(file: Path) -> str:
    """Message for a file whose content is much larger than itself."""
    return (
        f"{file} unpacks to more than {_MOST_TIMES} times its size, which may exhaust memory.\n"
        "Unpack it yourself, if you trust it."
    )


def _limited(file: Path, content: io.RawIOBase | gzip.GzipFile) -> BinaryIO:
    return io.BufferedReader(_Limited(file, content), _UNPACKED_AT_ONCE)


class _Limited(io.RawIOBase):
    """Decompressed content, up to `most_unpacked_bytes`."""

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
    """Content of a Zstandard file; the reader of its package accepts truncated files."""

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
                # The file ends within a frame.
                if self._decoder is not None:
                    raise EOFError("its end is missing")
                return 0
            self._decoder = self._decoder or self._frame()
            try:
                self._content = self._decoder.decompress(packed)
            except self._damage as error:
                raise UserError(_explain_damage(self._file, error)) from None
            # A file may have several frames, one after the other.
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
            raise UserError(f"{file} is {kind}, which does not match its name.\n{advice}.")
    # A document may be HTML.
    if ending != ".txt" and head.lstrip().lower().startswith(_WEB_PAGE):
        raise UserError(
            f"{file} is a web page, not data.\nDownload the file itself: its address often has "
            "/resolve/ or /raw/ where that of its page has /blob/."
        )
    if ending in known:
        raise UserError(
            f"{file} does not match its name: it does not begin like {ending} files do.\n"
            "Rename it to what it is, such as "
            f"{file.name.removesuffix(file.suffix).removesuffix('.jsonl')}.jsonl."
        )


def _explain_damage(file: Path, error: Exception) -> str:
    return (
        f"{file} cannot be decompressed: {error}.\nCopy or download it again; it may be cut short."
    )


def list_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the values of a .json file, numbered from 1: a list, or an object with a single list.

    Raises:
        UserError: it holds no list, or cannot be read.
    """
    text = text_of(file)
    if not text.strip():
        raise UserError(explain_empty(file))
    try:
        value = _parse(text, is_line=False)
    except Misfit as misfit:
        raise UserError(f"{file}{misfit}") from None
    # Else the text and its values would be in memory together.
    del text
    values = value if isinstance(value, list) else _list_in(value, file)
    if not values:
        raise UserError(f"{file} holds an empty list. {known_shapes()}\nAdd records.")
    for i in range(len(values)):
        # Records are built from rows: each row is freed when its record is there.
        row, values[i] = values[i], None
        yield i + 1, row


def line_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the values of a .jsonl file with their line numbers, from 1; empty lines are skipped.

    A line that is not JSON gives a Misfit.

    Raises:
        UserError: the file cannot be read.
    """
    is_empty = True
    for number, line in enumerate(lines_of(file), 1):
        line = line.rstrip("\n")
        if not line.strip():
            continue
        # A whole .json file under the wrong name, whose lines are no JSON by themselves.
        if is_empty and line.lstrip().startswith("["):
            raise UserError(
                f"{file} holds a list, but a .jsonl file has one record per line.\n"
                f"Try renaming it to {_renamed(file, '.json')}."
            )
        is_empty = False
        try:
            value = _parse(line, is_line=True)
        except Misfit as misfit:
            value = Misfit(str(misfit), line)
        yield number, value
    if is_empty:
        raise UserError(explain_empty(file))


def explain_empty(file: Path) -> str:
    """Message for an empty file."""
    return f"{file} is empty. {known_shapes()}\nSet data.path to a file with records."


def _list_in(value: Any, file: Path) -> list[Any]:
    """Find the list of records in an object that is not a record itself."""
    lists = {}
    if isinstance(value, dict) and not value.keys() & set(CONVERSATION_KEYS):
        lists = {
            key: item
            for key, item in value.items()
            if isinstance(item, list) and item and all(isinstance(row, dict) for row in item)
        }
    # Files such as {"version": ..., "data": [...]} are common: the only list of objects is meant.
    if len(lists) == 1:
        return next(iter(lists.values()))
    what = kind_of(value)
    works = "Put the records between [ and ]."
    if lists:
        what = f"lists under the keys {keys_of(lists)}"
        works = "Save each list as a file of its own, such as " + " and ".join(
            str(file.with_name(f"{key}.json")) for key in list(lists)[:2]
        )
    raise UserError(
        f"{file} holds {what}, but has to hold a list of records. {known_shapes()}\n{works}"
    )


def _parse(text: str, *, is_line: bool) -> Any:
    """The JSON value of a line, or of a whole file.

    Raises:
        Misfit: it is not JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if is_line else f"line {error.lineno}, column {error.colno}"
        advice = "Correct it there."
        # Nothing of it is JSON.
        if error.pos == 0:
            advice = "Correct it there, or rename the file to what it is: .csv, .tsv or .txt."
        if not is_line and error.msg == "Extra data" and text.lstrip().startswith("{"):
            advice = "If it has one record per line, rename it to end in .jsonl."
        raise Misfit(f", {place}, is not valid JSON: {error.msg}.\n{advice}") from None
    except (ValueError, RecursionError) as error:
        # ValueError: Python refuses integers of more than 4,300 digits.
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        place = "" if is_line else ", line 1"
        raise Misfit(f"{place}, cannot be read: {reason}.\nRemove it.") from None


def _renamed(file: Path, ending: str) -> str:
    packed = file.suffix if file.suffix.lower() in COMPRESSED else ""
    return Path(file.name.removesuffix(packed)).with_suffix(ending).name + packed


_STATE = "state.json"


def is_arrow_directory(path: Path) -> bool:
    """Return whether a directory was written by save_to_disk of the datasets library."""
    return (path / _STATE).is_file() and (path / "dataset_info.json").is_file()


def arrow_files(directory: Path) -> list[Path]:
    """The files of an Arrow directory that hold its rows, in order.

    Raises:
        UserError: it does not name them.
    """
    with reading(directory / _STATE, expected="a JSON object with _data_files"):
        state = json.loads((directory / _STATE).read_text(encoding="utf-8"))
        # .name: the entries must not lead out of the directory.
        names = [Path(entry["filename"]).name for entry in state["_data_files"]]
    return [directory / name for name in names]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A kind of files of records."""

    name: str
    """Their suffix, without its dot."""
    place: str
    """MODULE:FUNCTION that yields the rows of a file, each with its number; it may raise anything
    if the file is damaged."""
    unit: str = "record"
    """Name of the unit that is numbered, for messages."""
    is_text: bool = True
    """Whether it may be compressed."""
    has_cells: bool = False
    """Whether all its values are texts; see `values_of_cells`."""

    def rows(self, path: Path) -> Iterator[tuple[int, Any]]:
        """The rows of a file, each with its number.

        Raises:
            UserError: it cannot be read.
        """
        expected = f"what {path.suffix or 'such'} files hold"
        with reading(path, expected=expected, advice="Copy or download it again."):
            yield from imported(self.place)(path)


def document_rows(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the only document of a text file.

    Raises:
        UserError: it is empty, or cannot be read.
    """
    text = without_nul(file, text_of(file))
    if not text.strip():
        raise UserError(explain_empty(file))
    yield 1, {"text": text}


# Readers of our own over json, csv and pyarrow: the datasets library makes 7 of the text 007, and
# takes seconds to begin.
_OWN, _TABLES = __name__, "ftkit.data.records.tables"
RECORD_FORMATS = Registry(
    "record_formats",
    (Format,),
    core=(
        Format(name="json", place=f"{_OWN}:list_rows"),
        Format(name="jsonl", place=f"{_OWN}:line_rows", unit="line"),
        Format(name="csv", place=f"{_TABLES}:csv_rows", has_cells=True),
        Format(name="tsv", place=f"{_TABLES}:tsv_rows", has_cells=True),
        Format(name="parquet", place=f"{_TABLES}:parquet_rows", is_text=False),
        Format(name="txt", place=f"{_OWN}:document_rows"),
    ),
)
"""Formats by suffix, in the order in which files are looked for."""
_ARROW = Format(name="arrow", place=f"{_TABLES}:arrow_rows", is_text=False)


def suffixes() -> list[str]:
    """Suffixes of readable files, in the order in which files are looked for."""
    return [f".{name}" for name in RECORD_FORMATS.names]


def readable() -> str:
    """Readable formats, for messages."""
    return f"{', '.join(suffixes())}, .gz and .zst files of texts, and directories"


def format_of(path: Path) -> Format | None:
    """Return the format of a file or Arrow directory; None: it is not readable."""
    if path.is_dir():
        return _ARROW if is_arrow_directory(path) else None
    ending = path.suffix.lower()
    if ending not in COMPRESSED:
        return RECORD_FORMATS.get(ending.removeprefix("."))
    # Only texts may be compressed: parquet compresses its columns itself.
    found = RECORD_FORMATS.get(Path(path.stem).suffix.lower().removeprefix("."))
    return found if found and found.is_text else None


def files_of(path: Path) -> list[Path]:
    """List the files of a readable file or Arrow directory.

    Raises:
        UserError: an Arrow directory that does not name them.
    """
    return [path / "state.json", *arrow_files(path)] if path.is_dir() else [path]


def stem_of(path: Path) -> str:
    """Name of a data file without its suffixes; of a directory, its name."""
    if path.is_dir():
        return path.name
    return Path(path.stem).stem if path.suffix.lower() in COMPRESSED else path.stem
