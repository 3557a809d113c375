"""Preference pairs in the forms of other programs."""

from typing import Any

import pytest
from messages import message_of, says

from ftkit.data.records.record import Misfit
from ftkit.data.records.shapes import reader_of
from ftkit.extensions.preference.pairs import pair_rows

USER = {"role": "user", "content": "2 + 2?"}
RIGHT = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
HUMAN, GPT = {"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}
SYSTEM = {"role": "system", "content": "Add."}
MESSAGES = {"prompt": [USER]}

FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "texts": (
        {"prompt": "2 + 2?", "chosen": " 4", "rejected": " 5"},
        {"prompt": "2 + 2?", "completion": " 4"},
        {"prompt": "2 + 2?", "completion": " 5"},
    ),
    "texts that begin with the prompt": (
        {"chosen": "What is 2 + 2? It is 4.", "rejected": "What is 2 + 2? It is 5."},
        {"prompt": "What is 2 + 2? It is", "completion": " 4."},
        {"prompt": "What is 2 + 2? It is", "completion": " 5."},
    ),
    "an empty text": (
        {"prompt": "2 + 2?", "chosen": " 4", "rejected": ""},
        {"prompt": "2 + 2?", "completion": " 4"},
        {"prompt": "2 + 2?", "completion": ""},
    ),
    "conversations": (
        {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]},
        MESSAGES | {"completion": [RIGHT]},
        MESSAGES | {"completion": [WRONG]},
    ),
    "whole conversations": (
        {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        MESSAGES | {"completion": [RIGHT]},
        MESSAGES | {"completion": [WRONG]},
    ),
    "whole conversations beside a text of the prompt": (
        {"prompt": "2 + 2?", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        MESSAGES | {"completion": [RIGHT]},
        MESSAGES | {"completion": [WRONG]},
    ),
    "messages behind a text of the prompt": (
        {"prompt": "2 + 2?", "chosen": [RIGHT], "rejected": [WRONG]},
        MESSAGES | {"completion": [RIGHT]},
        MESSAGES | {"completion": [WRONG]},
    ),
    "one message each behind an instruction": (
        {"instruction": "2 + 2?", "chosen": RIGHT, "rejected": WRONG},
        MESSAGES | {"completion": [RIGHT]},
        MESSAGES | {"completion": [WRONG]},
    ),
    "messages behind a system prompt and a text": (
        {"prompt": "2 + 2?", "chosen": [SYSTEM, RIGHT], "rejected": [SYSTEM, WRONG]},
        {"prompt": [SYSTEM, USER], "completion": [RIGHT]},
        {"prompt": [SYSTEM, USER], "completion": [WRONG]},
    ),
    "whole conversations beside all of their prompt as a text": (
        {"prompt": "System: Add.\nUser: 2 +\n2?"}
        | {"chosen": [SYSTEM, USER, RIGHT], "rejected": [SYSTEM, USER, WRONG]},
        {"prompt": [SYSTEM, USER], "completion": [RIGHT]},
        {"prompt": [SYSTEM, USER], "completion": [WRONG]},
    ),
    "UltraFeedback, with a copy of the chosen conversation": (
        {"prompt": "2 + 2?", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]}
        | {"messages": [USER, RIGHT]},
        MESSAGES | {"completion": [RIGHT]},
        MESSAGES | {"completion": [WRONG]},
    ),
    "whole conversations beside their prompt": (
        {"prompt": [USER], "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        MESSAGES | {"completion": [RIGHT]},
        MESSAGES | {"completion": [WRONG]},
    ),
    "a prompt that only one of the conversations has": (
        {"prompt": [USER], "chosen": [USER, RIGHT], "rejected": [WRONG]},
        MESSAGES | {"completion": [RIGHT]},
        MESSAGES | {"completion": [WRONG]},
    ),
    "answers beside the chosen conversation": (
        {"messages": [USER, RIGHT], "chosen": [RIGHT], "rejected": [WRONG]},
        MESSAGES | {"completion": [RIGHT]},
        MESSAGES | {"completion": [WRONG]},
    ),
    "texts with a copy of the chosen conversation": (
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "messages": [USER, RIGHT]},
        {"prompt": "2 + 2?", "completion": "4"},
        {"prompt": "2 + 2?", "completion": "5"},
    ),
    "instructions": (
        {"instruction": "Add.", "input": "2, 2", "chosen": "4", "rejected": "5"},
        {"instruction": "Add.", "input": "2, 2", "output": "4"},
        {"instruction": "Add.", "input": "2, 2", "output": "5"},
    ),
    "questions with a system prompt": (
        {"system": "Add.", "question": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"system": "Add.", "instruction": "2 + 2?", "output": "4"},
        {"system": "Add.", "instruction": "2 + 2?", "output": "5"},
    ),
    "ShareGPT with one message each": (
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "5"}},
        {"prompt": [HUMAN], "completion": [GPT]},
        {"prompt": [HUMAN], "completion": [{"from": "gpt", "value": "5"}]},
    ),
    "a rejected response beside messages": (
        {"messages": [USER, RIGHT], "rejected_response": "5"},
        MESSAGES | {"completion": [RIGHT]},
        MESSAGES | {"completion": [WRONG]},
    ),
    "rejected messages beside messages": (
        {"messages": [USER, RIGHT], "rejected_messages": [USER, WRONG]},
        MESSAGES | {"completion": [RIGHT]},
        MESSAGES | {"completion": [WRONG]},
    ),
    "OpenAI": (
        {
            "input": {"messages": [USER]},
            "preferred_output": [RIGHT],
            "non_preferred_output": [WRONG],
        },
        MESSAGES | {"completion": [RIGHT]},
        MESSAGES | {"completion": [WRONG]},
    ),
    "torchtune": (
        {"chosen_conversations": [USER, RIGHT], "rejected_conversations": [USER, WRONG]},
        MESSAGES | {"completion": [RIGHT]},
        MESSAGES | {"completion": [WRONG]},
    ),
}


@pytest.mark.parametrize("empty", [None, "", []])
@pytest.mark.parametrize("form", FORMS)
def test_empty_columns_of_other_shapes_change_no_pair(form: str, empty: Any) -> None:
    row = FORMS[form][0]
    keys = ("prompt", "completion", "instruction", "output", "messages", "conversations", "text")
    made = []
    for one in (row, dict.fromkeys(keys, empty) | row):
        reader = reader_of(preference="pairs")
        made.append((reader.records([(1, one)], str), reader.finish("data").shape, reader.unused))
    assert made[0] == made[1]


@pytest.mark.parametrize("form", FORMS)
def test_a_pair_becomes_a_row_for_each_answer(form: str) -> None:
    row, chosen, rejected = FORMS[form]
    before = repr(row)
    assert pair_rows(row) == (chosen, rejected)
    assert repr(row) == before


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "input": "Add."}, ("input",)),
        ({"prompt": "2 + 2?", "chosen": [RIGHT], "rejected": [WRONG], "sys_prompt": "Add."},
         ("sys_prompt",)),
        ({"prompt": "2 + 2?", "question": "2 + 2?", "chosen": "4", "rejected": "5"},
         ("question",)),
        ({"prompt": "2 + 2?", "chosen": [USER, RIGHT], "rejected": [USER, WRONG], "messages": []},
         ()),
    ],
)  # fmt: skip
def test_keys_of_other_shapes_are_named_as_not_used(
    row: dict[str, Any], unused: tuple[str, ...]
) -> None:
    reader = reader_of(preference="pairs")
    reader.records([(1, row)], str)
    assert reader.unused.names == unused


def test_other_keys_stay_in_both_rows() -> None:
    row = {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG], "tools": [], "id": 7}
    assert all(one["id"] == 7 and one["tools"] == [] for one in pair_rows(row))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "2 + 2?", "completion": "4"}, ("prompt, completion", "rejected")),
        ({"prompt": "2 + 2?", "completion": "4", "label": True}, ("--objective kto",)),
        ({"prompt": "2 + 2?", "chosen": "4"}, ("rejected is missing", "Add rejected")),
        ({"prompt": "2 + 2?", "chosen": None, "rejected": "5"}, ("chosen is empty",)),
        ({"prompt": [USER], "chosen": [RIGHT], "rejected": []}, ("rejected is empty",)),
        ({"prompt": "2 + 2?", "chosen": "", "rejected": ""}, ("chosen is empty",)),
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": [WRONG]}, ("a text", "a list")),
        ({"prompt": [USER], "chosen": "4", "rejected": "5"}, ("prompt", "lists of messages")),
        ({"chosen": "Four.", "rejected": "Five."}, ("no prompt", "Add it")),
        ({"prompt": "2 + 2?", "chosen": 4, "rejected": 5}, ("chosen is a number",)),
        ({"messages": [USER, RIGHT], "rejected_response": 5}, ("rejected_response", "a text")),
        ({"instruction": "2 + 2?", "output": "4", "rejected_response": "5"}, ("messages",)),
        (
            {"prompt": "3 + 3?", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
            ("prompt stands beside", "remove prompt"),
        ),
        (
            {"prompt": [SYSTEM], "messages": [USER], "chosen": [RIGHT], "rejected": [WRONG]},
            ("messages stands beside", "remove messages"),
        ),
        (
            {"prompt": "2 + 2?", "chosen": [USER, RIGHT], "rejected": [WRONG]},
            ("prompt stands beside",),
        ),
        (
            {"messages": [USER], "chosen": "4", "rejected": "5"},
            ("messages is a list", "lists of messages"),
        ),
    ],
)
def test_a_row_that_is_no_pair_is_refused(row: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(Misfit) as caught:
        pair_rows(row)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("place", [0, 1])
def test_records_of_another_kind_among_pairs_are_refused_as_what_they_are(place: int) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}]
    rows.insert(place, {"instruction": "2 + 2?", "output": "4"})
    reader = reader_of(preference="pairs")
    message = message_of(reader.records, enumerate(rows), str)
    assert message.startswith(f"{place} is no preference pair")
    assert says(message, "instruction, output", "Add chosen and rejected")
