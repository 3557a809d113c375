"""Answers with a label, in the formats of other programs."""

from typing import Any

import pytest
from messages import message_of, says

from ftkit.data.records.shapes import RecordReader, reader_of

USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
COMPLETION = {"prompt": "2 + 2?", "completion": "4"}
SHAREGPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]

FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "TRL": (COMPLETION | {"label": True}, "completion"),
    "TRL, conversations": ({"prompt": [USER], "completion": [ANSWER], "label": True}, "messages"),
    "LLaMA-Factory": ({"instruction": "2 + 2?", "output": "4", "kto_tag": True}, "instruction"),
    "LLaMA-Factory, ShareGPT": ({"conversations": SHAREGPT, "kto_tag": True}, "messages"),
    "ms-swift": ({"messages": [USER, ANSWER], "label": True}, "messages"),
    "a table": (COMPLETION | {"label": 1}, "completion"),
    "a table of pandas, with gaps": (COMPLETION | {"label": 1.0}, "completion"),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("desirable", [True, False])
def test_labels_of_other_programs_are_read(name: str, desirable: bool) -> None:
    row, shape = FORMATS[name]
    key = "kto_tag" if "kto_tag" in row else "label"
    row = row | {key: type(row[key])(desirable)}
    reader = reader_of(preference="labels")
    (record,) = reader.records([(1, row)], str)
    form = reader.finish("data")
    assert record["target"] == [desirable]
    assert form.shape == shape
    assert form.keys.endswith(key)
    assert not reader.unused.names
    plain = {name: value for name, value in row.items() if name != key}
    (expected,) = RecordReader().records([(1, plain)], str)
    assert record == expected | {"target": [desirable]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        pytest.param(COMPLETION, ["label", "prompt, completion"], id="none"),
        pytest.param(
            COMPLETION | {"label": "good"}, ["label", '"good"', "true or false"], id="text"
        ),
        pytest.param(COMPLETION | {"label": 0.5}, ["label", "0.5", "true or false"], id="number"),
        pytest.param(
            COMPLETION | {"label": True, "kto_tag": False}, ["label", "kto_tag"], id="both"
        ),
        pytest.param(
            {"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "label": True},
            ["chosen", "--objective dpo"],
            id="a pair",
        ),
        pytest.param(
            {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
            ["chosen", "label", "--objective dpo"],
            id="a pair without one",
        ),
        pytest.param(COMPLETION | {"label": True, "loss_weight": 0.5}, ["weights"], id="weight"),
    ],
)
def test_records_without_a_sound_label_are_refused(row: dict[str, Any], words: list[str]) -> None:
    reader = reader_of(preference="labels")
    assert says(message_of(reader.records, [(1, row)], str), *words)


def test_a_label_is_refused_where_answers_are_only_imitated() -> None:
    message = message_of(RecordReader().records, [(1, COMPLETION | {"label": False})], str)
    assert says(message, "label", "--objective kto")
