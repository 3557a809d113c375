"""Formats of data files: which can be read, by the ends of their names."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftkit.data.records.json_rows import explain_empty, line_rows, list_rows
from ftkit.data.records.opening import COMPRESSED, text_of
from ftkit.data.records.table_rows import (
    arrow_files,
    arrow_rows,
    csv_rows,
    is_arrow_directory,
    parquet_rows,
    tsv_rows,
)
from ftkit.errors import UserError
from ftkit.utils.damaged_files import reading


@dataclass(frozen=True, kw_only=True)
class Format:
    """How files of one kind are read."""

    parse: Callable[[Path], Iterator[tuple[int, Any]]]
    """The rows of a file, each with its number; it may raise anything if the file is damaged."""
    unit: str = "record"
    """What is numbered."""
    is_text: bool = True
    """Whether it may be compressed."""

    def rows(self, path: Path) -> Iterator[tuple[int, Any]]:
        """The rows of a file, each with its number.

        Raises:
            UserError: it cannot be read.
        """
        expected = f"what {path.suffix or 'such'} files hold"
        with reading(path, expected=expected, advice="Copy or download it again."):
            yield from self.parse(path)


def document_rows(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """The one document of a text file.

    Raises:
        UserError: it is empty, or cannot be read.
    """
    text = text_of(file)
    if not text.strip():
        raise UserError(explain_empty(file))
    yield 1, {"text": text}


FORMATS = {
    ".json": Format(parse=list_rows),
    ".jsonl": Format(parse=line_rows, unit="line"),
    ".csv": Format(parse=csv_rows),
    ".tsv": Format(parse=tsv_rows),
    ".parquet": Format(parse=parquet_rows, is_text=False),
    ".txt": Format(parse=document_rows),
}
"""By the end of the name, in the order in which files are looked for."""
ARROW = Format(parse=arrow_rows, is_text=False)

READABLE = f"{', '.join(FORMATS)}, .gz and .zst files of texts, and directories"
"""For people."""


def format_of(path: Path) -> Format | None:
    """How a file, or an Arrow directory, is read; None: it cannot be."""
    if path.is_dir():
        return ARROW if is_arrow_directory(path) else None
    ending = path.suffix.lower()
    if ending not in COMPRESSED:
        return FORMATS.get(ending)
    found = FORMATS.get(Path(path.stem).suffix.lower())
    return found if found and found.is_text else None


def files_of(path: Path) -> list[Path]:
    """The files that something readable consists of.

    Raises:
        UserError: an Arrow directory that does not name them.
    """
    return [path / "state.json", *arrow_files(path)] if path.is_dir() else [path]


def stem_of(path: Path) -> str:
    """The name of a data file without its ends; of a directory, its name."""
    if path.is_dir():
        return path.name
    return Path(path.stem).stem if path.suffix.lower() in COMPRESSED else path.stem
