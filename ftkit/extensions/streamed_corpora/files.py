"""Files of a corpus, their pieces, and the documents that begin in each.

A piece is a range of bytes of a file of lines, a row group of a Parquet file, or a whole file where
nothing can be read from its middle. Pieces are known from sizes alone (of Parquet, from the ends of
files); a document belongs to the piece that it begins in.
"""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from ftkit.data.records.formats import COMPRESSED, lines_of, text_of
from ftkit.data.records.paths import how_to_set
from ftkit.errors import UserError
from ftkit.extensions.streamed_corpora.places import Disk, Elsewhere, Place, PlacedFile
from ftkit.recipe.hubs import HubFiles
from ftkit.utils import embedded
from ftkit.utils.damaged_files import reading
from ftkit.utils.names import nearest
from ftkit.utils.url_files import url_files
from ftkit.utils.urls import is_url, local_path

Lines = Literal["document", "lines"]
"""What a text file holds: one document, or one in each line."""
_ENDINGS = (".jsonl", ".txt", ".parquet")
_MOST_WHOLE_BYTES = 2**28
"""Largest file, or row group of a Parquet file, that is read as a whole."""
_MOST_DOCUMENT_BYTES = 2**27
"""Longest line; a longer one means that the file lost its line ends or is not text."""
_READ_ON_BYTES = 2**16
"""What is read at once of a line that ends behind its piece."""
_BLOCKS, _BLOCK_BYTES = 256, 4096
"""Blocks of a corpus, evenly spread, that are compared to know it again."""
_BLOCKS_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class CorpusFile:
    """A file of documents."""

    placed: PlacedFile
    pieces: int

    @property
    def name(self) -> str:
        """Its path below the directory of the corpus."""
        return self.placed.name

    @property
    def shown(self) -> str:
        """Its path or url, for people."""
        return self.placed.shown

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self.placed.size_bytes

    @property
    def ending(self) -> str:
        """.jsonl, .txt or .parquet."""
        return _ending(self.placed.path)

    @property
    def is_packed(self) -> bool:
        """Whether it is compressed as a whole."""
        return self.placed.path.suffix.lower() in COMPRESSED


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How documents are read of files."""

    text_key: str
    """Key or column of the text of a document."""
    text_files: Lines
    piece_bytes: int
    skips_bad: bool = False
    """Whether a record without a text is left out."""


def find_files(given: str | Path, key: str) -> tuple[Place, list[PlacedFile]]:
    """Resolve a path or url to the files of a corpus, in the order of their names.

    Args:
        given: a file, a directory with all below it, a pattern, a url, or embedded:NAME.
        key: of the recipe, for errors.

    Raises:
        UserError: there are none that can be read, or the storage does not answer.
    """
    if is_url(given):
        return _at_url(str(given), key)
    name = str(given).removeprefix("embedded:")
    path = Path(given).expanduser()
    if name != str(given):
        path = embedded.path(name) / "data" if name.isidentifier() else path
    if path.is_dir():
        place = Disk(path)
        return place, _readable_of(place, given, key)
    if path.exists():
        if not _ending(path):
            raise UserError(
                f"{key} is {given}, but only {_readable()} can be read as they are trained on: of "
                "others nothing says where a record begins.\n"
                f"Convert it to .jsonl, or try --data JSON --data.path {given}."
            )
        return _on_disk(path.parent, [path])
    if set(str(path)) & set("*?["):
        root = Path(path.anchor)
        matches = [file for file in root.glob(str(path.relative_to(root))) if file.is_file()]
        if found := sorted(file for file in matches if _ending(file)):
            return _on_disk(Path(os.path.commonpath([file.parent for file in found])), found)
    near = nearest(path.name, [sibling.name for sibling in path.parent.glob("*")])
    advice = path.parent / near if near else "DIRECTORY, relative to the current directory"
    raise UserError(
        f"{key} is {given}, but there is no such file or directory.\n{how_to_set(key, advice)}"
    )


def find_on_hub(given: str, files: HubFiles, key: str) -> tuple[Place, list[PlacedFile]]:
    """The files of a data set of a hub, as `find_files` finds those of a path.

    Args:
        given: its name.
        files: that are read.
        key: of the recipe, for errors.

    Raises:
        UserError: there are none that can be read.
    """
    place = Elsewhere(Path(given, files.directory), files)
    return place, _readable_of(place, given, key, what="data set")


def _on_disk(root: Path, paths: Sequence[Path]) -> tuple[Place, list[PlacedFile]]:
    place = Disk(root)
    found = (place.find(path.relative_to(root).as_posix()) for path in paths)
    return place, [file for file in found if file is not None]


def _at_url(url: str, key: str) -> tuple[Place, list[PlacedFile]]:
    path = local_path(url)
    if _ending(path):
        above = Elsewhere(path.parent, url_files(path.parent).objects(path.parent))
        if (file := above.find(path.name)) is not None:
            return above, [file]
    place = Elsewhere(path, url_files(path).objects(path))
    return place, _readable_of(place, url, key, what="url")


def _readable_of(
    place: Place, given: str | Path, key: str, what: str = "directory"
) -> list[PlacedFile]:
    """The files of a directory, below a url or of a data set that hold documents."""
    found = [file for file in place.all() if _ending(file.path)]
    if not found:
        raise UserError(
            f"{key} is the {what} {given}, but no file below it can be read: only "
            f"{_readable()} can.\nGive files of these kinds."
        )
    return sorted(found, key=lambda file: file.path)


def _ending(path: Path) -> str:
    """Ending of a file of documents, without that of its compression; "": it is none."""
    ending = path.suffix.lower()
    inner = Path(path.stem).suffix.lower() if ending in COMPRESSED else ending
    # Parquet compresses its columns itself.
    return inner if inner in _ENDINGS and (inner == ending or inner != ".parquet") else ""


def _readable() -> str:
    return ".jsonl, .txt, .parquet, .jsonl.gz, .jsonl.zst, .txt.gz and .txt.zst"


class Pieces:
    """The pieces of a corpus, numbered through its files."""

    def __init__(self, place: Place, found: Sequence[PlacedFile], how: Reading) -> None:
        """Count the pieces; of Parquet files the ends are read, of others nothing.

        Args:
            place: directory of the corpus.
            found: its files, in their order.
            how: they are read.

        Raises:
            UserError: a file cannot be read in pieces.
        """
        self.how = how
        """How they are read."""
        self.place = place
        """Where they lie."""
        self.files = [self._counted(file) for file in found]
        self._ends = list(accumulate(file.pieces for file in self.files))
        self.bad = 0
        """Records that were left out of the pieces read so far."""

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def texts(self, number: int) -> list[str]:
        """The documents of a piece, in their order.

        Raises:
            UserError: it cannot be read, or a record of it has no text.
        """
        of_file = bisect_right(self._ends, number)
        file = self.files[of_file]
        place = number - (self._ends[of_file] - file.pieces)
        with reading(file.shown, f"what {file.ending} files hold"):
            self.place.require_unchanged(file.placed)
            return [text for text in self._documents(file, place) if text.strip()]

    def name_of(self, number: int) -> str:
        """Which piece of which file it is, for people."""
        of_file = bisect_right(self._ends, number)
        file = self.files[of_file]
        place = number - (self._ends[of_file] - file.pieces)
        if file.ending == ".parquet":
            return f"row group {place} of {file.shown}"
        if file.pieces == 1:
            return file.shown
        return f"{file.shown}, from byte {place * self.how.piece_bytes:,} on,"

    @cached_property
    def content(self) -> dict[str, Any]:
        """Names, sizes and sampled blocks of the files, as JSON values."""
        names = hashlib.sha256()
        for file in self.files:
            names.update(json.dumps([file.name, file.size_bytes]).encode())
        return {
            "files": names.hexdigest(),
            "blocks": self._blocks(),
            "text_key": self.how.text_key,
            "text_files": self.how.text_files,
            "piece_bytes": self.how.piece_bytes,
        }

    def _blocks(self) -> str:
        """Digest of blocks of all files, evenly spread."""
        digest, total = hashlib.sha256(), self.size_bytes
        ends = list(accumulate(file.size_bytes for file in self.files))

        def block(place: int) -> bytes:
            number = bisect_right(ends, place)
            file = self.files[number].placed
            start = place - (ends[number] - file.size_bytes)
            return self.place.read(file, start, start + _BLOCK_BYTES)

        # At a url each is a request, which waits for its answer most of the time.
        with ThreadPoolExecutor(_BLOCKS_AT_ONCE) as pool:
            places = sorted({number * total // _BLOCKS for number in range(_BLOCKS)})
            for content in pool.map(block, places):
                digest.update(content)
        return digest.hexdigest()

    def _counted(self, placed: PlacedFile) -> CorpusFile:
        file = CorpusFile(placed=placed, pieces=1)
        if file.ending == ".parquet":
            count = len(self._row_groups(file))
        elif file.is_packed or (file.ending == ".txt" and self.how.text_files == "document"):
            if file.size_bytes > _MOST_WHOLE_BYTES:
                raise UserError(_explain_too_large(file))
            count = 1
        else:
            count = -(-file.size_bytes // self.how.piece_bytes)
        return CorpusFile(placed=placed, pieces=count)

    def _row_groups(self, file: CorpusFile) -> list[int]:
        """Bytes of the text in each row group of a Parquet file."""
        import pyarrow.parquet

        with reading(file.shown, "what .parquet files hold"):
            metadata = pyarrow.parquet.read_metadata(self.place.opened(file.placed))
            names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        if self.how.text_key not in names:
            near = nearest(self.how.text_key, names) or (names or ["KEY"])[0]
            raise UserError(
                f"{file.shown} has no column {self.how.text_key}, only {', '.join(names)}.\n"
                f"Try --data.text_key {near}."
            )
        column = names.index(self.how.text_key)
        sizes = [group.column(column).total_uncompressed_size for group in groups]
        if max(sizes, default=0) > _MOST_WHOLE_BYTES:
            raise UserError(
                f"{file.shown} has a row group with {max(sizes):,} bytes of text, and one is read "
                f"as a whole: at most {_MOST_WHOLE_BYTES:,}.\nWrite it again with smaller ones, "
                "such as row_group_size=10000 of pyarrow.parquet.write_table."
            )
        return sizes

    def _documents(self, file: CorpusFile, place: int) -> Iterator[str]:
        if file.ending == ".parquet":
            yield from self._of_row_group(file, place)
        elif file.ending == ".txt" and self.how.text_files == "document":
            with self.place.whole(file.placed) as path:
                yield self._plain(text_of(path), file.shown)
        elif file.is_packed:
            with self.place.whole(file.placed) as path:
                for number, line in enumerate(lines_of(path), 1):
                    yield from self._of_line(file, line, f"{file.shown}, line {number}")
        else:
            for start, content in self._lines(file, place):
                where = f"{file.shown}, byte {start:,}"
                try:
                    # Excel and others begin files with a byte order mark.
                    line = content.decode("utf-8-sig" if start == 0 else "utf-8")
                except UnicodeDecodeError as error:
                    yield from self._misfit(where, f"is not UTF-8: {error.reason}")
                    continue
                yield from self._of_line(file, line, where)

    def _lines(self, file: CorpusFile, place: int) -> Iterator[tuple[int, bytes]]:
        """Lines that begin in a range of bytes, each with its place."""
        first = place * self.how.piece_bytes
        last = min(first + self.how.piece_bytes, file.size_bytes)
        # A line begins behind a line feed, which may be the last byte of the piece before.
        start = max(first - 1, 0)
        content = self.place.read(file.placed, start, last)
        if first:
            cut = content.find(b"\n") + 1
            if not cut:
                return
            start, content = start + cut, content[cut:]
        end = start + len(content)
        parts = [content]
        while content and not content.endswith(b"\n") and end < file.size_bytes:
            content = self.place.read(file.placed, end, end + _READ_ON_BYTES)
            cut = content.find(b"\n") + 1
            content = content[:cut] if cut else content
            parts.append(content)
            end += len(content)
            if end - start > _MOST_DOCUMENT_BYTES + self.how.piece_bytes:
                raise UserError(
                    f"{file.shown} has a line of more than {_MOST_DOCUMENT_BYTES:,} bytes from "
                    f"byte {start:,} on.\nGive each document a line of its own, and cut long "
                    "ones into several."
                )
        for line in _split(parts):
            yield start, line
            start += len(line) + 1

    def _of_line(self, file: CorpusFile, line: str, where: str) -> Iterator[str]:
        if not line.strip():
            return
        if file.ending == ".txt":
            yield self._plain(line.rstrip("\r\n"), where)
            return
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield from self._misfit(where, f"is not valid JSON: {error}")
            return
        yield from self._of_row(row, where)

    def _of_row_group(self, file: CorpusFile, place: int) -> Iterator[str]:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(self.place.opened(file.placed)) as table:
            rows = table.read_row_group(place, columns=[self.how.text_key]).to_pylist()
        for number, row in enumerate(rows, 1):
            yield from self._of_row(row, f"{file.shown}, row {number} of row group {place}")

    def _of_row(self, row: Any, where: str) -> Iterator[str]:
        key = self.how.text_key
        text = row.get(key) if isinstance(row, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
            yield from self._misfit(where, f"has no text under {key} (it has {keys or 'nothing'})")
            return
        try:
            text.encode()
        except UnicodeEncodeError:
            yield from self._misfit(where, "holds half of a surrogate pair")
            return
        yield text

    def _plain(self, text: str, where: str) -> str:
        if "\0" in text:
            raise UserError(f"{where} has NUL characters: it is no text.\nConvert it to UTF-8.")
        return text

    def _misfit(self, where: str, what: str) -> Iterator[str]:
        """Count a record without a text, or refuse it."""
        if not self.how.skips_bad:
            raise UserError(
                f"{where}, {what}.\nCorrect or remove it, name another --data.text_key, or leave "
                "out such records with --data.skip_bad_documents true."
            )
        self.bad += 1
        yield from ()


def _split(parts: Sequence[bytes]) -> list[bytes]:
    """The lines of joined parts, without their ends."""
    lines = b"".join(parts).split(b"\n")
    return lines if lines[-1] else lines[:-1]


def _explain_too_large(file: CorpusFile) -> str:
    what, works = "is compressed", "Unpack it, so that it is read in pieces, or cut it into several"
    if not file.is_packed:
        what, works = "is one document", "Try --data.text_files lines, if each line is a document"
    return (
        f"{file.shown} {what} of {file.size_bytes:,} bytes, which is read as a whole: at most "
        f"{_MOST_WHOLE_BYTES:,}.\n{works}."
    )


def digest_of(texts: Sequence[str]) -> int:
    """Digest of the documents of a piece, never 0."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        content = text.encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    return int.from_bytes(digest.digest(), "little") or 1
