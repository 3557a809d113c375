"""Files of every format give the records that they hold, and say what is wrong with them."""

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from messages import key_words

from ftkit.data.records.paths import find_files
from ftkit.data.records.read import read_files, read_records
from ftkit.errors import UserError

ROWS = [
    {"instruction": "Add, please.", "input": "1 and\n2", "output": '"3"'},
    {"instruction": "Grüße — 早上好 🎉", "input": "", "output": "007"},
]


def as_csv(delimiter: str) -> str:
    lines = [list(ROWS[0]), *(list(row.values()) for row in ROWS)]
    quoted = ([f'"{value.replace(chr(34), chr(34) * 2)}"' for value in line] for line in lines)
    return "".join(f"{delimiter.join(line)}\r\n" for line in quoted)


TEXTS = {
    ".json": json.dumps(ROWS, indent=1, ensure_ascii=False),
    ".jsonl": "\n".join(json.dumps(row) for row in ROWS),
    ".csv": as_csv(","),
    ".tsv": as_csv("\t"),
}


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def write_arrow_directory(directory: Path, rows: list[dict[str, Any]], shards: int = 1) -> Path:
    """As save_to_disk of the datasets library writes it."""
    directory.mkdir(parents=True)
    names = [f"data-{i:05}-of-{shards:05}.arrow" for i in range(shards)]
    table = pyarrow.Table.from_pylist(rows)
    for i, name in enumerate(names):
        part = table.slice(i * len(rows) // shards, len(rows) // shards)
        with pyarrow.ipc.new_stream(str(directory / name), table.schema) as stream:
            stream.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names]}
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text("{}")
    return directory


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "mark"])
@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("ending", TEXTS)
def test_every_text_format_gives_the_same_records(
    tmp_path: Path, ending: str, packed: str, mark: bytes
) -> None:
    content = mark + TEXTS[ending].encode()
    file = tmp_path / f"a{ending.upper()}{packed}"
    file.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    assert read_records(file) == ROWS


def test_parquet_and_arrow_directories_give_the_same_records(tmp_path: Path) -> None:
    assert read_records(write_parquet(tmp_path / "a.parquet", ROWS)) == ROWS
    assert read_records(write_arrow_directory(tmp_path / "a", ROWS * 2, shards=2)) == ROWS * 2


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_text_file_is_one_document(tmp_path: Path, packed: str) -> None:
    content = "A first line.\r\n\r\n<html> is a word here.\n".encode("utf-8-sig")
    file = tmp_path / f"a.txt{packed}"
    file.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    text = "A first line.\r\n\r\n<html> is a word here.\n"
    assert read_records(file) == [{"text": text}]


def test_zstandard_is_read_where_its_package_is(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="comes with the extra zstd")
    frames = [zstandard.compress(f"{line}\n".encode()) for line in TEXTS[".jsonl"].split("\n")]
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(b"".join(frames))
    assert read_records(file) == ROWS
    file.write_bytes(b"".join(frames)[:-5])
    with pytest.raises(UserError, match=key_words("cannot be decompressed")):
        read_records(file)
    file.write_bytes(frames[0][:5] + b"\xff" * 30)
    with pytest.raises(UserError, match="cannot be decompressed"):
        read_records(file)


def test_without_its_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(UserError, match=r"Try pip install 'ftkit\[zstd\]'"):
        read_records(file)


def test_values_of_tables_stay_texts(tmp_path: Path) -> None:
    """So that 007 does not become 7."""
    (tmp_path / "a.csv").write_text("instruction,output,score\nWhich?,007,0.5\n\nWhat?,true,1\n")
    assert [record["output"] for record in read_records(tmp_path / "a.csv")] == ["007", "true"]


def test_texts_in_tables_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"instruction,output\nLong?,{'long ' * 100_000}\n")
    assert len(read_records(tmp_path / "a.csv")[0]["output"]) == 500_000


@pytest.mark.extensions
def test_nulls_of_tables_are_not_values(tmp_path: Path) -> None:
    """Every object of a table has all keys that any of them has."""
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "Yes.", "train": False},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"name": "f", "arguments": {"a": 1}}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"name": "g", "arguments": {"b": 2}}],
        },
    ]
    (record,) = read_records(write_parquet(tmp_path / "a.parquet", [{"messages": said}]))
    assert record["messages"][:2] == said[:2]
    calls = [message["tool_calls"][0]["function"] for message in record["messages"][2:]]
    assert calls == [call for message in said[2:] for call in message["tool_calls"]]


@pytest.mark.extensions
def test_values_of_mixed_types_are_read_as_the_datasets_library_writes_them(
    tmp_path: Path,
) -> None:
    """As JSON text of a type of its own."""
    call: dict[str, Any] = {"name": "f", "arguments": {"a": [1, "b", {"c": None, "d": 2}]}}
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
    texts = pyarrow.array([list(map(json.dumps, said))], pyarrow.list_(pyarrow.string()))
    column = texts.cast(pyarrow.list_(pyarrow.json_()))
    pyarrow.parquet.write_table(pyarrow.table({"messages": column}), tmp_path / "a.parquet")
    (record,) = read_records(tmp_path / "a.parquet")
    del call["arguments"]["a"][2]["c"]  # a null is one in no format
    assert record["messages"][1]["tool_calls"][0]["function"] == call


@pytest.mark.parametrize("key", ["data", "rows", "anything"])
def test_a_list_under_a_key_is_read(tmp_path: Path, key: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"version": "1", "tags": ["x"], key: ROWS}))
    assert read_records(tmp_path / "a.json") == ROWS


def test_several_lists_under_keys_become_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"train": ROWS, "val": ROWS}))
    with pytest.raises(UserError, match=key_words("lists ... train, val")) as error:
        read_records(tmp_path / "a.json")
    assert f"such as {tmp_path / 'train.json'} and {tmp_path / 'val.json'}" in str(error.value)


PARQUET, GZIP = b"PAR1....PAR1", gzip.compress(b"[]", mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "reason", "works"),
    [
        ("a.json", PARQUET, "a parquet file", "Rename it to a.parquet"),
        ("a.jsonl", GZIP, "compressed with gzip", "Rename it to a.jsonl.gz"),
        ("a.csv", b"\x28\xb5\x2f\xfd..", "compressed with Zstandard", "Rename it to a.csv.zst"),
        ("a.csv", b"PK\x03\x04..", "zip archive ... Excel", "as CSV"),
        ("a.csv", b"\xd0\xcf\x11\xe0..", "an Excel sheet", "as CSV"),
        ("a.json", b"\n<!DOCTYPE html><p>", "a web page", "/resolve/"),
        ("a.parquet", b"version https://git-lfs.github.com", "Git LFS", "git lfs pull"),
        ("a.parquet", b'{"instruction": "a"}', "does not match its name", "a.jsonl"),
        ("a.jsonl.gz", b'{"instruction": "a"}', "does not match its name", "to ... a.jsonl"),
        ("a.jsonl.gz", GZIP[:-4], "cannot be decompressed", "download it again"),
        ("a.jsonl.gz", GZIP[:12] + b"\xff" * 9, "cannot be decompressed", "download it again"),
        ("a.parquet", PARQUET, "is damaged", "download it again"),
        ("a.csv", b'{"instruction": "a", "output": "b"}', "holds JSON", ".json (a list"),
        ("a.json", b"instruction,output\na,b", "not valid JSON", ".csv"),
        ("a.csv", b"instruction;output\na;b", "with ';' inside", "with commas"),
        ("a.csv", b"instruction\toutput\na\tb", r"with '\t' inside", "Name the file .tsv"),
        ("a.csv", b"instruction,output\na,b\nc\n", "record 2 ... line 3, has 1 values", "quotes"),
        ("a.csv", b"instruction,output\na,b,c\n", "record 1 ... 3 values ... 2 names", "quotes"),
        ("a.csv", b'instruction,output\n"a,b\n', "line 2, is not valid CSV", "Correct it"),
        ("a.csv", b"output,output\na,b", "two columns named 'output'", "Rename or remove"),
        ("a.csv", b"instruction,output\n", "is empty", "a file with records"),
        ("a.csv", b"", "is empty", "a file with records"),
        ("a.txt", b" \n", "is empty", "a file with records"),
        ("a.csv", b"instruction,output\na,\xfc", "byte 21 is 0xfc", "UTF-8"),
        ("a.jsonl", b'{"instruction": "a", "output": "\xfc"}', "byte 32 is 0xfc", "UTF-8"),
        ("a.json", '[{"instruction": "ü"}]'.encode("latin-1"), "byte 18 is 0xfc", "UTF-8"),
        ("a.json", "[]".encode("utf-16"), "byte 0 is 0xff", "UTF-8"),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused_with_a_remedy(
    tmp_path: Path, name: str, content: bytes, reason: str, works: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError, match=key_words(file, reason, works)):
        read_records(file)


def test_a_missing_file_of_an_arrow_directory_is_named(tmp_path: Path) -> None:
    directory = write_arrow_directory(tmp_path / "a", ROWS * 2, shards=2)
    (directory / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"a cannot be read: .*data-00001"):
        read_records(directory)


# Paths


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*files: str) -> None:
    """A record in each, of the name of the file."""
    for name in files:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"instruction": name, "output": "."}
        if path.suffix == ".parquet":
            write_parquet(path, [record])
        elif path.suffix == ".txt":
            path.write_text(name)
        else:
            path.write_text(json.dumps([record] if path.suffix == ".json" else record))


def read(path: str) -> tuple[list[str], list[str] | None]:
    """The names of the files whose records are trained on, and of those validated on."""
    found = read_files(find_files(path, "data.path"), path, None)
    names: Callable[[list[dict[str, str]]], list[str]]
    names = lambda records: [r.get("instruction") or r["text"] for r in records]  # noqa: E731
    return names(found.train), None if found.val is None else names(found.val)


@pytest.mark.parametrize(
    ("files", "path", "train", "val"),
    [
        (["b.jsonl", "a.json"], "b.jsonl", ["b.jsonl"], None),
        (["d/b.jsonl", "d/a.json", "d/README.md"], "d", ["d/a.json", "d/b.jsonl"], None),
        (["d/2.txt", "d/1.txt"], "d", ["d/1.txt", "d/2.txt"], None),
        (["d/train.json", "d/val.json", "d/a.json"], "d", ["d/train.json"], ["d/val.json"]),
        (["d/train.json", "d/train.jsonl", "d/val.jsonl"], "d", ["d/train.json"], ["d/val.jsonl"]),
        (["d/train.jsonl", "d/test.jsonl"], "./d/", ["d/train.jsonl"], ["d/test.jsonl"]),
        (
            ["d/train.jsonl", "d/validation.jsonl", "d/val.jsonl"],
            "d",
            ["d/train.jsonl"],
            ["d/val.jsonl"],
        ),
        (
            ["d/train.jsonl", "d/test.jsonl", "d/validation.jsonl"],
            "d",
            ["d/train.jsonl"],
            ["d/validation.jsonl"],
        ),
        (
            [
                *(f"d/train-0000{i}-of-00002.parquet" for i in (1, 0)),
                "d/val-00000-of-00001.jsonl",
                "d/test.jsonl",
            ],
            "d",
            ["d/train-00000-of-00002.parquet", "d/train-00001-of-00002.parquet"],
            ["d/val-00000-of-00001.jsonl"],
        ),
        (["d/b.jsonl", "d/a.jsonl", "d/a.json"], "d/*.jsonl", ["d/a.jsonl", "d/b.jsonl"], None),
        (["d/x/b.jsonl", "d/y/a.jsonl"], "d/**/*.jsonl", ["d/x/b.jsonl", "d/y/a.jsonl"], None),
        (["d[1].jsonl", "d1.jsonl"], "d[1].jsonl", ["d[1].jsonl"], None),
    ],
)  # fmt: skip
def test_a_path_means_files(
    here: Path, files: list[str], path: str, train: list[str], val: list[str] | None
) -> None:
    write(*files)
    assert read(path) == (train, val)
    assert read(str(here / path))[0] == train


def test_arrow_directories_of_splits_are_a_data_set(here: Path) -> None:
    write_arrow_directory(here / "d/train", [{"instruction": "a", "output": "."}])
    write_arrow_directory(here / "d/test", [{"instruction": "b", "output": "."}])
    (here / "d/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert read("d") == (["a"], ["b"])
    assert read("d/train") == (["a"], None)


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        (["data.jsonl"], "dta.jsonl", "no such file ... --data.path data.jsonl"),
        ([], "d/*.jsonl", "no such file or directory"),
        (["d/x.jsonl"], "d/*.json", "no such file or directory"),
        (["d/val.json"], "d", "has no train.json or train.jsonl"),
        (["d/train.json"], "d", "has no val.json or val.jsonl"),
        (["d/a.md"], "d", "can be read ... Add d/train.json"),
        (["d/x/a.jsonl"], "d", "can be read ... --data.path 'd/*/*.jsonl'"),
        (["a.ndjson"], "a.ndjson", "Try ... a.jsonl"),
        (["a.docx"], "a.docx", ".json, .jsonl, .csv ... directories"),
        (["a.xlsx"], "a.xlsx", "CSV ... --data.path a.csv"),
        (["d/a.md"], "d/*", "d/a.md ... .json"),
    ],
)
def test_a_path_that_means_nothing_is_refused(
    here: Path, files: list[str], path: str, message: str
) -> None:
    write(*files)
    with pytest.raises(UserError, match=key_words("data.path is", message)):
        read(path)
