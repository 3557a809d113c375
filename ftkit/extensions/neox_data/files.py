"""The files of a corpus: PREFIX.bin has the tokens of all documents, PREFIX.idx where each lies.

PREFIX.idx is a header, then sizes in tokens (int32) and places in bytes (int64) of all sequences,
and the sequences with which documents begin (int64). GPT-NeoX takes every sequence for a document,
so that these last numbers are not used. All numbers are little-endian.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ftkit.errors import UserError
from ftkit.utils.damaged_files import DamagedFile, reading, require_regular

_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the type of tokens, number of sequences, and of numbers behind these."""
_MAGIC, _VERSION = b"MMIDIDX\0\0", 1
_MAGIC_OF_OLD = b"TNTIDX"
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FRACTIONS = {6: "float32", 7: "float64"}
_AT_ONCE = 2**22
"""Documents that are checked at once: arrays of all of them would take gigabytes."""
_EXPECTED = "an index as GPT-NeoX's tools/datasets/preprocess_data.py writes it"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The mapped files of a corpus."""

    prefix: Path
    """Path of both files without their endings."""
    sizes: npt.NDArray[np.int32]
    """[documents], tokens of each."""
    places: npt.NDArray[np.int64]
    """[documents], bytes before each."""
    tokens: npt.NDArray[Any]
    """[tokens in the file], as they are stored."""

    def starts(self, documents: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Tokens in the file before each of some documents."""
        found: npt.NDArray[np.int64] = self.places[documents] // self.tokens.itemsize
        return found


def index_file(prefix: Path) -> Path:
    """PREFIX.idx."""
    return prefix.with_name(f"{prefix.name}.idx")


def tokens_file(prefix: Path) -> Path:
    """PREFIX.bin."""
    return prefix.with_name(f"{prefix.name}.bin")


def check_corpus(prefix: Path, key: str) -> tuple[Path, Path]:
    """Return both files of a corpus, of which only the header is read.

    Args:
        prefix: of the corpus.
        key: that names it, for messages.

    Raises:
        UserError: one is not there, or the index is of another kind.
    """
    files = index_file(prefix), tokens_file(prefix)
    for file in files:
        require_regular(file)
        if not file.is_file():
            is_whole = prefix.suffix in (".bin", ".idx")
            advice = prefix.with_suffix("") if is_whole else "PREFIX, where PREFIX.bin lies"
            raise UserError(
                f"{key} is {prefix}, but {file} does not exist; a corpus of GPT-NeoX is named by "
                f"the path of its two files without .bin and .idx.\nTry --{key} {advice}."
            )
    _header(files[0])
    return files


def open_corpus(prefix: Path) -> Corpus:
    """Map the files of a corpus into memory.

    Raises:
        UserError: they are damaged, or do not belong together.
    """
    file = index_file(prefix)
    code, count, further = _header(file)
    expected = _HEADER.size + 12 * count + 8 * further
    if (found := file.stat().st_size) != expected:
        raise _damaged(file, f"it has {found:,} bytes, not the {expected:,} that its header says")
    if not count:
        raise _damaged(file, "it has no documents")
    with reading(file, _EXPECTED):
        sizes = np.memmap(file, "<i4", "r", _HEADER.size, (count,))
        places = np.memmap(file, "<i8", "r", _HEADER.size + 4 * count, (count,))
    itemsize = np.dtype(_TYPES[code]).itemsize
    of_tokens = tokens_file(prefix)
    stored = of_tokens.stat().st_size
    for first in range(0, count, _AT_ONCE):
        size, place = (of[first : first + _AT_ONCE].astype(np.int64) for of in (sizes, places))
        if size.min() < 0 or place.min() < 0 or (place % itemsize).any():
            raise _damaged(file, "a document has a size or a place that none can have")
        if stored % itemsize or (place + size * itemsize).max() > stored:
            raise _damaged(of_tokens, f"it has {stored:,} bytes, fewer than {file.name} says")
    if not stored:
        raise _damaged(of_tokens, "it has no tokens")
    with reading(of_tokens, "the tokens of documents"):
        tokens = np.memmap(of_tokens, _TYPES[code], "r")
    return Corpus(prefix=prefix, sizes=sizes, places=places, tokens=tokens)


def _header(file: Path) -> tuple[int, int, int]:
    """Code of the type of tokens, number of sequences, and of numbers behind them."""
    with reading(file, _EXPECTED):
        with file.open("rb") as opened:
            content = opened.read(_HEADER.size)
        if content.startswith(_MAGIC_OF_OLD):
            raise UserError(
                f"{file} is an index of the older kind TNTIDX (data_impl cached), whose tokens "
                "cannot be mapped into memory.\nWrite the corpus again with --dataset-impl mmap of "
                "GPT-NeoX's tools/datasets/preprocess_data.py."
            )
        magic, version, code, count, further = _HEADER.unpack(content)
        if (magic, version) != (_MAGIC, _VERSION):
            raise ValueError(f"it begins with {content[:17]!r}")
    if code in _FRACTIONS:
        raise UserError(
            f"{file} says that tokens are {_FRACTIONS[code]}, as rewards are, which are not "
            "trained on.\nGive the corpus with the tokens."
        )
    if code not in _TYPES:
        raise _damaged(file, f"type {code} of tokens is not known")
    return code, count, further


def _damaged(file: Path, what: str) -> DamagedFile:
    return DamagedFile(f"{file} is damaged: {what}. Copy both files of the corpus again.")
