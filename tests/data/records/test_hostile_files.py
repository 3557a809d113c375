"""Data files that block, have no end or explode: refused in linear time, before memory is full."""

import gzip
import os
import socket
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from messages import key_words

from ftkit.data.cache import file_digest
from ftkit.data.records import formats
from ftkit.data.records.paths import find_files
from ftkit.data.records.read import read_files, read_records
from ftkit.errors import UserError

RECORD = '{"instruction": "%s", "output": "b"}\n'


@pytest.mark.parametrize("ending", [".json", ".jsonl", ".csv", ".txt", ".parquet", ".jsonl.gz"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_only_regular_files_are_read(
    tmp_path: Path, kind: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"train{ending}"
    monkeypatch.chdir(tmp_path)  # the name of a socket has to be short
    with socket.socket(socket.AF_UNIX) as listening:
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "socket":
            listening.bind(file.name)
        else:
            file.symlink_to("/dev/zero")
        with pytest.raises(UserError, match=f"^{file} is not a regular file"):
            read_files(find_files(file, "data.path"), "mine", None)
        with pytest.raises(UserError, match=f"^{file} is not a regular file"):
            file_digest(file)  # what names the samples in the cache comes first


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", b"[" * 100_000, "line 1 ... too deeply"),
        ("a.jsonl", b'{"a":' * 100_000, "line 1 ... too deeply"),
        ("a.jsonl", b'{"b":' + b"[{}," * 700 + b"0" + b"]" * 700 + b"}", "too deeply"),
        ("a.jsonl", b'{"text":' + b"[" * 900 + b"]" * 900 + b"}", "too deeply"),
        ("a.jsonl", b'{"instruction": "a\0", "output": "b"}', "line 1, column 19"),
        ("a.jsonl", b'{"instruction": ' + b"9" * 5000 + b"}", "line 1, cannot be read"),
        ("a.parquet", b"PAR1" + b"\0" * 100 + b"PAR1", "cannot be read"),
        ("a.parquet", b"PAR1" + b"\xff" * 100 + b"PAR1", "a.parquet"),
        ("a.csv", b'a,b\n"' + b"x\n" * 100_000, "is not valid CSV"),
        ("a.csv", b",".join(b"c%d" % i for i in range(100_000)) + b"\n" + b"," * 99_999,
         "no keys ... c19"),
        ("a.csv", b"c," * 100_000, "two columns named 'c'"),
    ],
)  # fmt: skip
def test_damaged_data_are_one_message(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError, match=key_words(file, reason)) as error:
        read_records(file)
    assert len(str(error.value)) < 1000


def test_a_text_of_a_table_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    column = pyarrow.array([b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), file)
    with pytest.raises(UserError, match="is damaged: UnicodeDecodeError"):
        read_records(file)


class TestWhatExplodes:
    @pytest.fixture(autouse=True)
    def _little_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(formats, "_MOST_UNPACKED_BYTES", 2**16)

    @pytest.mark.parametrize("name", ["a.json.gz", "a.csv.gz", "a.txt.gz"])
    def test_a_compressed_file_is_unpacked_only_so_far(self, tmp_path: Path, name: str) -> None:
        file = tmp_path / name
        file.write_bytes(gzip.compress(b"text\n" + b"a\n" * 10**6))
        with pytest.raises(UserError, match=key_words("more than 200 times")):
            read_records(file)

    def test_zstandard_too(self, tmp_path: Path) -> None:
        zstandard = pytest.importorskip("zstandard")
        file = tmp_path / "a.jsonl.zst"
        file.write_bytes(zstandard.compress((RECORD % ("a" * 1000)).encode() * 2000))
        with pytest.raises(UserError, match=key_words("more than 200 times")):
            read_records(file)

    @pytest.mark.parametrize("row", [{"text": "a" * 1000}, {"text": "a"}])
    def test_a_table_whose_rows_are_hardly_in_the_file(
        self, tmp_path: Path, row: dict[str, str]
    ) -> None:
        file = tmp_path / "a.parquet"
        table = pyarrow.Table.from_pylist([{"text": "a"}, *[row] * 100_000])
        pyarrow.parquet.write_table(table, file, compression="zstd")
        with pytest.raises(UserError, match=key_words("more than 200 times")):
            read_records(file)

    def test_a_line_without_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(formats, "_MOST_LINE_BYTES", 1000)
        file = tmp_path / "a.jsonl"
        file.write_text(RECORD % "a" + RECORD % ("a" * 1000))
        with pytest.raises(UserError, match=key_words(f"{file}, line 2 ... 1,000 bytes")):
            read_records(file)


def test_a_long_record_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress((RECORD % ("a " * 5_000_000)).encode()))
    assert len(read_records(file)[0]["instruction"]) == 10_000_000
