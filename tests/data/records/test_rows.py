"""Rows of tables: nulls that stand for nothing, and cells that stand for values."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from messages import message_of, says

from ftkit.data.records.paths import find_files
from ftkit.data.records.read import RecordSet, read_files
from ftkit.data.records.shapes import RecordReader

USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
TEXT = {"type": "text", "text": "4"}


def records(*rows: Any) -> list[Any]:
    return RecordReader().records(enumerate(rows), str)


@pytest.mark.extensions
def test_a_null_of_an_object_is_no_key_of_it_however_deep() -> None:
    call = {"name": "sun", "arguments": {"city": "red", "day": None, "at": {"h": 1, "min": None}}}
    tool = {
        "type": "function",
        "function": {
            "name": "sun",
            "description": None,
            "parameters": {"properties": {"city": {"enum": ["red", None]}, "day": None}},
        },
    }
    said = {"role": "assistant", "content": None, "tool_calls": [call], "name": None}
    (record,) = records({"messages": [USER | {"from": None}, said], "tools": [tool]})
    assert record["messages"][1]["tool_calls"][0]["function"]["arguments"] == {
        "city": "red",
        "at": {"h": 1},
    }
    # An item of a list has a place, which no table fills.
    assert record["tools"][0]["function"] == {
        "name": "sun",
        "parameters": {"properties": {"city": {"enum": ["red", None]}}},
    }


@pytest.mark.extensions
def test_json_text_says_itself_what_is_null() -> None:
    call = {"name": "sun", "arguments": '{"day": null}'}
    (record,) = records({"messages": [USER, {"role": "assistant", "tool_calls": [call]}]})
    assert record["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"day": None}


@pytest.mark.extensions
@pytest.mark.parametrize("empty", [None, "", []])
@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"instruction": "red?", "output": "4"}, "instruction"),
        ({"messages": [USER, ANSWER]}, "messages"),
        ({"conversations": [USER, ANSWER]}, "messages"),
        ({"prompt": "red?", "completion": "4"}, "completion"),
        ({"text": "red"}, "text"),
    ],
)
def test_columns_that_are_empty_in_all_records_do_not_decide_the_shape(
    row: dict[str, Any], shape: str, empty: Any
) -> None:
    keys = ("instruction", "output", "messages", "conversations", "prompt", "completion", "text")
    reader = RecordReader()
    padded = dict.fromkeys(keys, empty) | row
    assert reader.records(enumerate([padded] * 3), str) == records(row) * 3
    assert reader.finish("data").shape == shape
    assert reader.unused.names == ()


def test_a_column_that_is_empty_in_the_first_record_alone_decides_the_shape() -> None:
    first = {"instruction": "red?", "output": "", "messages": [USER, ANSWER]}
    reader = RecordReader()
    reader.records(enumerate([first, first | {"output": "4"}]), str)
    assert reader.finish("data").shape == "instruction"


def read(file: Path, *rows: dict[str, str], **options: Any) -> RecordSet:
    with file.open("w", newline="") as stream:
        table = csv.DictWriter(stream, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return read_files(
        find_files(file, "data.path"), "data", options.pop("columns", None), **options
    )


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("true", "false"), [("true", "false"), ("True", "False"), ("TRUE", "FALSE"), ("1", "0"),
                        ("1.0", "0.0"), (" true", "false ")]
)  # fmt: skip
def test_a_label_in_a_cell_is_one(tmp_path: Path, true: str, false: str) -> None:
    rows = [{"prompt": "2 + 2?", "completion": "4", "label": label} for label in (true, false)]
    found = read(tmp_path / "a.csv", *rows, preference="labels")
    assert [record["target"] for record in found.train] == [[1], [0]]


@pytest.mark.extensions
def test_a_label_in_a_cell_that_says_neither_is_refused_as_in_every_format(tmp_path: Path) -> None:
    row = {"prompt": "2 + 2?", "completion": "4", "label": "good"}
    message = message_of(read, tmp_path / "a.csv", row, preference="labels")
    assert says(message, 'label is "good"', "true or false")
    message = message_of(read, tmp_path / "a.csv", row | {"label": "True"})
    assert says(message, "label ... unwanted", "--objective kto")


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": "red?", "output": "007", "loss_weight": "0.5"},
         {"instruction": "red?", "output": "007", "weight": 0.5}),
        ({"prompt": '[{"a": 1}]', "completion": "[1]"},
         {"prompt": '[{"a": 1}]', "completion": "[1]"}),
        ({"prompt": json.dumps([USER]), "completion": json.dumps([ANSWER])},
         {"messages": [USER, ANSWER]}),
        ({"messages": json.dumps([USER, ANSWER | {"content": [TEXT]}]), "enable_thinking": "TRUE"},
         {"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinking": True}}),
    ],
)  # fmt: skip
def test_a_cell_has_the_type_of_its_key(
    tmp_path: Path, row: dict[str, str], expected: dict[str, Any]
) -> None:
    assert read(tmp_path / "a.csv", row).train == [expected]


@pytest.mark.extensions
def test_a_cell_has_the_type_of_the_key_that_it_is_named_for(tmp_path: Path) -> None:
    said = [{"who": "user", "content": "2 + 2?"}, {"who": "assistant", "content": "4"}]
    found = read(
        tmp_path / "a.csv",
        {"dialog": json.dumps(said)},
        columns={"messages": "dialog", "role": "who"},
    )
    assert found.train == [{"messages": [USER, ANSWER]}]


@pytest.mark.extensions
def test_messages_in_a_cell_that_are_not_json_are_refused_with_what_works(tmp_path: Path) -> None:
    message = message_of(read, tmp_path / "a.csv", {"messages": str([USER, ANSWER])})
    assert says(message, "record 1", "messages is a text", "as JSON")
