"""Small corpora of documents, and what their samples are, by definition."""

import gzip
import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from math import ceil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import zstandard
from tiny import WORDS

Encode = Callable[[str], list[int]]


def documents(number: int, seed: int = 0) -> list[str]:
    """Documents of different lengths, each of which is there once."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 60))) for _ in range(number)]
    return [f"{seed}.{place} {text}" for place, text in enumerate(texts)]


def lines_of(texts: Sequence[str]) -> bytes:
    """Records of documents, a line for each."""
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def write_corpus(root: Path, number: int = 40) -> Path:
    """A corpus in every format, with empty lines, an empty file and a last line without its end."""
    (root / "below").mkdir(parents=True)
    (root / "a.jsonl").write_bytes(b"\n" + lines_of(documents(number, 1)) + b"  \n\n")
    (root / "b.jsonl").write_bytes(lines_of(documents(number, 2)).rstrip(b"\n"))
    (root / "below" / "c.jsonl.gz").write_bytes(gzip.compress(lines_of(documents(9, 3))))
    packed = zstandard.ZstdCompressor().compress(lines_of(documents(9, 4)))
    (root / "below" / "d.jsonl.zst").write_bytes(packed)
    (root / "empty.jsonl").touch()
    table = pyarrow.table({"id": list(range(30)), "text": documents(30, 5)})
    pyarrow.parquet.write_table(table, root / "e.parquet", row_group_size=7)
    (root / "f.txt").write_text("\n\n".join(documents(3, 6)))
    return root


def pieces_of(root: Path, piece_bytes: int) -> list[list[str]]:
    """The documents that begin in each piece."""
    pieces: list[list[str]] = []
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        if file.suffix == ".parquet":
            table = pyarrow.parquet.ParquetFile(file)
            groups = range(table.num_row_groups)
            pieces += [table.read_row_group(i)["text"].to_pylist() for i in groups]
        elif file.suffix == ".txt":
            pieces.append([file.read_text()])
        elif file.suffix in (".gz", ".zst"):
            packed, is_gzip = file.read_bytes(), file.suffix == ".gz"
            unpack = gzip.decompress if is_gzip else zstandard.ZstdDecompressor().decompress
            lines = unpack(packed).splitlines()
            pieces.append([json.loads(line)["text"] for line in lines])
        else:
            of_file: list[list[str]] = [[] for _ in range(ceil(file.stat().st_size / piece_bytes))]
            place = 0
            for line in file.read_bytes().split(b"\n"):
                if line.strip():
                    of_file[place // piece_bytes].append(json.loads(line)["text"])
                place += len(line) + 1
            pieces += of_file
    return pieces


def permuted(number: int, seed: int, *key: int) -> list[int]:
    """A random order of range(number)."""
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)).random_raw(number)
    return np.argsort(bits, kind="stable").tolist()


def scattered(place: int, number: int, seed: int, *key: int) -> int:
    """What a random order of range(number) has at a place, where there are too many to list."""
    rounds = np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)).random_raw(8).tolist()
    half = ceil((number - 1).bit_length() / 2)
    while True:
        left, right = divmod(place, 2**half)
        for one in rounds:
            bits = right ^ one
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                bits = (bits ^ (bits >> shift)) * factor % 2**64
            left, right = right, left ^ ((bits ^ (bits >> 31)) % 2**half)
        place = left * 2**half + right
        if place < number:
            return place


def samples_of(
    pieces: list[list[str]], encode: Encode, most: int, window: int, seed: int, source: int = 0
) -> Iterator[list[int]]:
    """The samples of a corpus, epoch after epoch, whose documents are joined."""
    per_epoch = ceil(len(pieces) / window)
    for number in count():
        epoch, place = divmod(number, per_epoch)
        order = permuted(len(pieces), seed, epoch, source)[place * window : (place + 1) * window]
        tokens = [token for piece in order for text in pieces[piece] for token in encode(text)]
        cut = [tokens[first : first + most] for first in range(0, len(tokens) - 1, most - 1)]
        for sample in permuted(len(cut), seed, number, source, 0):
            yield cut[sample]


def mixed(
    streams: Sequence[Iterator[list[int]]], shares: list[int], seed: int
) -> Iterator[list[int]]:
    """The samples of several corpora: in each thousand, so many of each."""
    for block in count():
        of_source = [source for source, share in enumerate(shares) for _ in range(share)]
        for place in permuted(1000, seed, block):
            yield next(streams[of_source[place]])
