"""Bad records: all kinds are listed, with place, count and an example, or they are left out."""

import json
from pathlib import Path
from typing import Any

import pytest
from messages import key_words, message_of, says

from ftkit.data.dataset import load_data
from ftkit.data.records.bad import BadData
from ftkit.data.records.paths import find_files
from ftkit.data.records.read import RecordSet, read_files, read_records
from ftkit.errors import UserError
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.changes import recipe_changes
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.recipe import Component

GOOD = {"instruction": "red?", "output": "sun"}
LINES: list[Any] = [
    "{broken",
    *[GOOD] * 4,
    {"instruction": "red?"},
    GOOD | {"output": 5},
    "{broken",
    [1],
    *[GOOD] * 4,
    {"instruction": "blue?", "id": 1},
    {"text": "red"},
]


def write(file: Path, lines: list[Any]) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_text("".join(f"{text}\n" for text in texts))
    return file


def read(file: Path, **options: Any) -> RecordSet:
    return read_files(find_files(file, "data.path"), str(file), None, **options)


def test_all_kinds_are_listed_with_places_counts_and_remedies(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", LINES)
    with pytest.raises(BadData) as error:
        read(file)
    head, *kinds, advice = str(error.value).splitlines()
    assert says(head, "7 of 15 records")
    places = [f"{file}, line {line}" for line in (1, 6, 7, 9, 15)]
    assert all(says(kind, place) for kind, place in zip(kinds, places, strict=True))
    assert says(kinds[0], "not valid JSON", "2 records", "line 1, 8")
    assert says(kinds[1], "no output", "Add output", "2 records", "line 6, 14")
    assert says(kinds[4], "is a document ... the first record is an instruction")
    assert says(advice, "--data.skip_bad_records true")


def test_those_of_all_files_and_splits_are_listed_together(tmp_path: Path) -> None:
    for name, lines in {"train": [GOOD, {"output": "b"}], "val": [GOOD, "{"]}.items():
        write(tmp_path / f"{name}.jsonl", lines)
    message = message_of(read, tmp_path)
    assert says(message, "2 of 4", "train.jsonl, line 2", "val.jsonl, line 2")


def test_one_is_named_with_both_remedies(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [GOOD, GOOD | {"output": 5}])
    message = message_of(read, file)
    assert message.startswith(f"{file}, line 2: output is a number.")
    assert says(message, "Make output a text", "--data.skip_bad_records true")
    assert "skip_bad_records" not in message_of(read_records, file)  # prompts have no such key


def test_the_others_are_read(tmp_path: Path) -> None:
    found = read(write(tmp_path / "a.jsonl", LINES), skips_bad=True)
    assert found.train == [GOOD] * 8
    kinds = found.bad["train"].kinds
    assert [kind.count for kind in kinds] == [2, 2, 1, 1, 1]
    assert kinds[0].example == "{broken" and kinds[1].example == '{"instruction": "red?"}'
    assert kinds[0].where == f"{tmp_path / 'a.jsonl'}, line 1, 8"


def test_a_row_of_a_table_with_a_value_too_many_is_one(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("instruction,output\nred?,sun\nred,blue?,sun\n")
    assert says(message_of(read, file), "record 2", "line 3", "3 values", "2 names")
    assert read(file, skips_bad=True).train == [GOOD]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"{\n{\n", "2 of 2"),
        ("a.json", b'[{"instruction": "red?", "output": "sun"}, {]', "not valid JSON"),
        ("a.jsonl", b'{"instruction": "red?", "output": "sun"}\n\xff', "not UTF-8"),
        ("a.csv", b'instruction,output\nred?,sun\nred?,"sun\n', "not valid CSV"),
    ],
)
def test_a_file_without_good_records_or_broken_as_a_whole_is_refused_in_any_case(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=key_words(words)) as error:
        read(tmp_path / name, skips_bad=True)
    assert "skip_bad_records" not in str(error.value)


def test_they_are_counted_as_left_out_also_from_the_cache(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    fingerprints = set()
    for lines, bad in ((LINES, 7), ([GOOD] * 8, 0)):
        path = str(write(tmp_path / "a.jsonl", lines))
        options = {"path": path, "val_split_fraction": 0.25, "skip_bad_records": True}
        component = Component(class_path="JSON", init_args=options)
        found = [load_data(component, Tokenizer(tiny_base), 100) for _ in range(2)]
        counts = found[0].counts["train"]
        assert (counts.records, counts.used, sum(counts.refused.values())) == (6 + bad, 6, bad)
        assert all("bad record" in reason for reason in counts.refused)
        assert found[1].counts == found[0].counts
        fingerprints |= {one.fingerprint for one in found}
    # What is trained is that of a file of the good ones.
    assert len(fingerprints) == 1


def test_the_key_is_a_boolean_that_stays_the_same_on_resume() -> None:
    keys = [("checkpoint_dir", "m"), ("data", "JSON"), ("data.path", "a.jsonl")]
    before = read_recipe([], keys)
    after = read_recipe([], [*keys, ("data.skip_bad_records", "true")])
    refused, _ = recipe_changes(before, after)
    assert len(refused) == 1 and "skip_bad_records" in refused[0]
    same = read_recipe([], [*keys, ("data.skip_bad_records", "false")])
    assert recipe_changes(before, same) == ([], [])
