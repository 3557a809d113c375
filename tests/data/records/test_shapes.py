"""Records of every shape become canonical ones, and what is none is refused with the reason."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from messages import message_of, says

from ftkit.data.records.forms import Form
from ftkit.data.records.record import Record
from ftkit.data.records.shapes import RecordReader, reader_of

DATE = datetime.date(2026, 1, 1)
"""As tables have them."""
SAID = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


def read(
    *rows: Any, columns: dict[str, str] | None = None, answered: bool = True
) -> tuple[list[Record], Form]:
    reader = RecordReader(columns, answered=answered)
    records = reader.records(enumerate(rows, 1), "a.jsonl, line {}".format)
    return records, reader.finish("a.jsonl")


def refusal(*rows: Any, **options: Any) -> str:
    return message_of(read, *rows, **options)


NAMES = {"messages": "dialog", "role": "speaker", "content": "text"}
ROLES = {"user_role": "Customer", "assistant_role": "Bot"}


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("row", "columns"),
    [
        (
            {"dialog": [{"speaker": "user", "text": "?"}, {"speaker": "assistant", "text": "!"}]},
            NAMES,
        ),
        # The text of the record itself is not a message's.
        (
            {"text": "Once.", "dialog": [{"speaker": "Customer", "text": "?"}]}
            | {"messages": [], "tools": []},
            NAMES | ROLES,
        ),
        (
            {"messages": [{"role": "Customer", "content": "?"}, {"role": "Bot", "content": "!"}]},
            ROLES,
        ),
        (
            {"conversations": [{"from": "Customer", "value": "?"}, {"from": "Bot", "value": "!"}]},
            ROLES,
        ),
        # One key named, the other known.
        ({"conversations": [{"who": "human", "value": "?"}]}, {"role": "who"}),
        ({"conversations": [{"from": "gpt", "says": "!"}]}, {"content": "says"}),
        (
            {"messages": [{"content": "user", "role": "?"}, {"content": "assistant", "role": "!"}]},
            {"role": "content", "content": "role"},
        ),
        (
            {"prompt": [{"who": "user", "says": "?"}], "completion": [{"who": "bot", "says": "!"}]},
            {"role": "who", "content": "says"},
        ),
    ],
)
def test_keys_and_roles_of_messages_may_have_other_names(
    row: Record, columns: dict[str, str]
) -> None:
    reader = RecordReader(columns)
    bot = {"speaker": "Bot", "text": "!"}
    filled = row | ({"dialog": [*row["dialog"], bot]} if columns.keys() > NAMES.keys() else {})
    (record,) = reader.records([(1, filled)], "a.jsonl, line {}".format)
    assert all(message in SAID for message in record["messages"])
    assert len(record["messages"]) == sum(
        len(turns) for turns in filled.values() if isinstance(turns, list)
    )
    reader.finish("a.jsonl")
    assert set(reader.unused.names) <= {"text"}


@pytest.mark.extensions
def test_answers_of_pairs_may_have_other_names_of_keys() -> None:
    reader = reader_of({"role": "who", "assistant_role": "Bot"}, preference="pairs")
    halves = [[{"who": "Bot", "content": text}] for text in "!."]
    row = {"prompt": [{"who": "user", "content": "?"}], "chosen": halves[0], "rejected": halves[1]}
    (found,) = reader.records([(1, row)], "a.jsonl, line {}".format)
    assert found["chosen"]["messages"] == SAID
    assert found["rejected"]["messages"][1]["content"] == "."


@pytest.mark.extensions
def test_names_inside_messages_do_not_choose_the_answer_of_a_pair() -> None:
    row = {"messages": SAID, "rejected_response": "."}
    assert "rejected" in refusal(row, columns={"assistant_role": "Bot"})


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"role": "speaker"}, "data.columns.role is speaker, but no message ... this key"),
        ({"assistant_role": "Bot"}, "data.columns.assistant_role is Bot ... no message ... role"),
    ],
)
def test_a_name_inside_messages_that_none_has_is_refused(
    columns: dict[str, str], reason: str
) -> None:
    assert says(refusal({"messages": SAID}, columns=columns), reason)


@pytest.mark.extensions
def test_an_unknown_role_is_refused_with_how_to_name_it() -> None:
    row = {"messages": [{"role": "Bot", "content": "!"}]}
    assert says(refusal(row), "role is 'Bot' ... --data.columns.assistant_role")


# Recognised


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("row", "shape", "counted"),
    [
        (
            {"instruction": "a", "input": "", "output": "b"},
            "instruction",
            "1 instruction (instruction, input, output)",
        ),
        (
            {"output": "b", "instruction": "a", "text": "of both", "id": 1},
            "instruction",
            "1 instruction (instruction, output)",
        ),
        (
            {"instruction": "a", "output": "b", "messages": SAID},
            "instruction",
            "1 instruction (instruction, output)",
        ),
        (
            {"prompt": "a", "completion": "b"},
            "completion",
            "1 completion (prompt, completion)",
        ),
        (
            {"prompt": SAID[:1], "completion": SAID[1:]},
            "messages",
            "1 conversation (prompt, completion)",
        ),
        ({"prompt": "a", "messages": SAID}, "messages", "1 conversation (messages)"),
        (
            {"conversations": [{"from": "human", "value": "?"}]},
            "messages",
            "1 conversation (ShareGPT)",
        ),
        ({"conversation": SAID}, "messages", "1 conversation (conversation)"),
        ({"text": "a"}, "text", "1 document (text)"),
    ],
)
def test_the_keys_of_the_first_record_tell_the_shape(row: Record, shape: str, counted: str) -> None:
    (record,), form = read(row)
    assert form.shape == shape
    assert form.counted(1) == counted
    assert record.keys() <= {*row, "messages"} - {"id"}
    assert form.counted(52_002).startswith("52,002 ")


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("columns", "row", "expected", "keys"),
    [
        (
            {"instruction": "question", "output": "answer"},
            {"question": "a", "answer": "b", "input": "c"},
            {"instruction": "a", "output": "b", "input": "c"},
            "question, input, answer",
        ),
        (
            {"instruction": "input"},
            {"input": "a", "output": "b"},
            {"instruction": "a", "output": "b"},
            "input, output",
        ),
        ({"text": "body"}, {"body": "a", "instruction": "b"}, {"text": "a"}, "body"),
        ({"messages": "chat"}, {"chat": SAID}, {"messages": SAID}, "chat"),
        ({"messages": "chosen"}, {"chosen": SAID, "rejected": []}, {"messages": SAID}, "chosen"),
        (
            {"completion": "chosen"},
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": "a", "completion": "b"},
            "prompt, chosen",
        ),
    ],
)
def test_columns_give_other_names_and_decide_the_shape(
    columns: dict[str, str], row: Record, expected: Record, keys: str
) -> None:
    (record,), form = read(row, columns=columns)
    assert record == expected
    assert form.keys == keys


def test_a_named_column_must_be_in_some_record() -> None:
    rows = [{"q": "a", "output": "b"}, {"q": "a", "output": "b", "context": "c"}]
    columns = {"instruction": "q", "input": "context"}
    records, _ = read(*rows, columns=columns)
    assert [record.get("input") for record in records] == [None, "c"]
    reason = refusal(rows[0], columns=columns)
    assert says(reason, "data.columns.input is context ... a.jsonl")


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("row", "answered"),
    [
        ({"instruction": "a"}, {"instruction": "a"}),
        ({"prompt": "a"}, {"prompt": "a"}),
        ({"prompt": SAID[:1]}, {"messages": SAID[:1]}),
        ({"messages": SAID[:1]}, {"messages": SAID[:1]}),
    ],
)
def test_a_prompt_needs_no_answer(row: Record, answered: Record) -> None:
    assert read(row, answered=False)[0] == [answered]


# Refused


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("row", "works"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "--data.columns.completion chosen"),
        ({"prompt": "a", "chosen": SAID, "rejected": SAID}, "--data.columns.messages chosen"),
        (
            {"prompt": SAID[:1], "chosen": SAID[1:], "rejected": SAID[1:]},
            "--data.columns.completion chosen",
        ),
        ({"chosen": "Human: a", "rejected": "Human: b"}, "--data.columns.text chosen"),
        ({"instruction": "a", "chosen": "b", "rejected": "c"}, "--data.columns.output chosen"),
        (
            {"question": "a", "chosen": "b", "rejected": "c"},
            "--data.columns.instruction question --data.columns.output chosen",
        ),
    ],
)
def test_preference_pairs_are_refused_by_name_with_what_trains_on_the_chosen_ones(
    row: Record, works: str
) -> None:
    reason = refusal(row)
    assert says(reason, "a.jsonl, line 1 ... chosen and rejected ... --objective dpo")
    assert reason.endswith(f"try {works}.")
    words = works.split()
    options = zip(words[::2], words[1::2], strict=True)
    columns = {option.removeprefix("--data.columns."): theirs for option, theirs in options}
    assert len(read(row, columns=columns)[0]) == 1


def test_wanted_and_unwanted_completions_are_refused() -> None:
    row = {"prompt": "a", "completion": "b", "label": False}
    assert says(refusal(row), "train on unwanted")
    assert len(read(row | {"label": 3})[0]) == 1


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("row", "reason", "works"),
    [
        ({"a": "b"}, "its keys: a", "--data.columns.instruction KEY --data.columns.output KEY"),
        (
            {"id": 1, "question": "a", "answer": "b"},
            "no keys ... id, question, answer",
            "--data.columns.instruction question --data.columns.output answer",
        ),
        ({"title": "a", "content": "b"}, "its keys: title, content", "--data.columns.text content"),
        ({}, "its keys: none", "--data.columns.instruction KEY"),
        (
            {"instruction": "a", "context": "c", "response": "b"},
            "output ... instruction, context, response",
            "Add output ... --data.columns.output response",
        ),
        ({"input": "a", "output": "b"}, "has no instruction", "--data.columns.instruction input"),
        ({"prompt": "a", "response": "b"}, "no completion", "--data.columns.completion response"),
        ({"prompt": 1, "completion": "b"}, ": prompt is a number", "Make prompt a text"),
        ({"text": None}, ": text is null", "Make text a text"),
        ({"text": "\ud800"}, "text ... character 1", "Correct or remove"),
        ({"prompt": SAID, "completion": "b"}, "completion is a text", "Correct or remove"),
        (["a"], "is a list", "Correct or remove"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_with_what_works(
    row: Any, reason: str, works: str
) -> None:
    text, _, advice = refusal(row).partition("\n")
    assert text.startswith("a.jsonl, line 1")
    assert says(text, reason) and says(advice, works)


@pytest.mark.extensions
def test_a_record_of_another_shape_is_refused() -> None:
    rows = [{"instruction": "a", "output": "b"}, {"messages": SAID}]
    reason = refusal(*rows)
    assert says(reason, "a.jsonl, line 2 ... messages ... instruction, output")
    assert "data.sources" in reason


def test_a_missing_key_is_shown_with_the_column_names() -> None:
    columns = {"instruction": "question", "output": "answer"}
    reason = refusal({"question": "a"}, columns=columns)
    assert "has no output" in reason
    assert says(reason, "data.columns ... instruction from question, output from answer")


def test_data_without_records_are_refused() -> None:
    assert refusal().startswith("a.jsonl is empty.")


# Conversations


def conversation(*messages: Any, **others: Any) -> Record:
    return read({"messages": list(messages), **others})[0][0]


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *((name, "user") for name in ("human", "user", "prompter")),
        *((name, "assistant") for name in ("gpt", "assistant", "model", "chatgpt", "bing")),
        *((name, "tool") for name in ("tool", "observation", "function", "tool_response")),
        *((name, name) for name in ("system", "developer")),
    ],
)
def test_roles_are_known_by_their_names_elsewhere(theirs: str, ours: str) -> None:
    ((record,), _) = read({"conversations": [{"from": theirs, "value": "a"}]})
    assert record == {"messages": [{"role": ours, "content": "a"}]}
    assert conversation({"role": theirs, "content": "a"}) == record


@pytest.mark.extensions
def test_what_a_message_may_hold_is_kept_and_nothing_else() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}, "id": "c1"}
    messages: list[Record] = [
        {"role": "user", "content": "?", "name": "Ann", "timestamp": 5},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "f"},
        {"role": "assistant", "content": "!", "train": True, "tool_calls": [], "name": None},
    ]
    expected = [dict(message) for message in messages]
    del expected[0]["timestamp"], expected[3]["tool_calls"], expected[3]["name"]
    assert conversation(*messages)["messages"] == expected


@pytest.mark.extensions
def test_parts_of_texts_are_joined() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    (message,) = conversation({"role": "user", "content": parts})["messages"]
    assert message["content"] == "a b"


ARGUMENTS = {"city": "Köln", "days": [1, None]}
CALL = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}


@pytest.mark.extensions
@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        [{"function": CALL["function"]}],
        [CALL["function"]],
        CALL["function"],
        [{"name": "weather", "arguments": json.dumps(ARGUMENTS)}],
    ],
)
def test_tool_calls_have_one_form(calls: object) -> None:
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    assert conversation(said)["messages"] == [said | {"content": "", "tool_calls": [CALL]}]


@pytest.mark.extensions
def test_calls_alone_may_say_whether_they_are_trained() -> None:
    said = {"role": "assistant", "tool_calls": [CALL], "train": False}
    assert conversation(said)["messages"] == [said | {"content": ""}]


@pytest.mark.extensions
def test_calls_and_results_may_be_turns_of_their_own() -> None:
    """As ms-swift writes them: turns behind each other are calls at one time."""
    text = json.dumps(CALL["function"])
    called, result = {"role": "tool_call", "content": text}, {"role": "tool_response"}
    messages = [SAID[0], called, called, result | {"content": "1"}, result | {"content": "2"}]
    found = conversation(*messages, called | {"content": f"[{text}, {text}]"}, SAID[1])
    twice = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    assert found["messages"] == [SAID[0], twice, *results, twice, SAID[1]]
    # One that is not trained stays apart.
    found = conversation(SAID[0], called, called | {"loss": False})
    assert [len(message["tool_calls"]) for message in found["messages"][1:]] == [1, 1]
    turns = [{"role": "function_call", "content": text}, {"role": "function_call", "content": text}]
    assert len(conversation(SAID[0], *turns)["messages"]) == 3


def part_of(kind: str, text: str, **others: Any) -> Record:
    return {"type": kind, "value": text, **others}


@pytest.mark.extensions
def test_parts_may_be_thoughts_and_calls() -> None:
    """As LLaMA-Factory v1 writes them."""
    parts = [
        part_of("reasoning", "Hm."),
        part_of("text", "Let me "),
        part_of("text", "look."),
        part_of("tool_call", json.dumps(CALL["function"])),
    ]
    (message,) = conversation({"role": "assistant", "content": parts, "loss_weight": 0.5})[
        "messages"
    ]
    assert message == {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "Hm.",
        "tool_calls": [CALL],
        "train": True,
        "weight": 0.5,
    }
    (message,) = conversation({"role": "assistant", "content": parts[3:]})["messages"]
    assert (message["content"], message["tool_calls"]) == ("", [CALL])
    # Weights of texts are at their places without the other parts.
    weighed = [parts[0], parts[1], part_of("text", "look.", weight=0.5)]
    (message,) = conversation({"role": "assistant", "content": weighed})["messages"]
    assert message["spans"] == [[7, 12, 0.5]]


@pytest.mark.extensions
def test_turns_of_sharegpt_may_be_calls_of_tools() -> None:
    turns = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": "Rain."},
        {"from": "gpt", "value": "It rains.", "weight": 1},
    ]
    tools = [{"name": "weather", "parameters": {}}]
    row = {"conversations": turns, "tools": json.dumps(tools), "system": "Be brief."}
    assert read(row)[0] == [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "Rain."},
                {"role": "assistant", "content": "It rains.", "train": True},
            ],
            "tools": [{"type": "function", "function": tools[0]}],
        }
    ]


@pytest.mark.extensions
def test_a_system_prompt_beside_the_messages_is_their_first_unless_they_have_one() -> None:
    first = {"role": "system", "content": "Own."}
    assert conversation(*SAID, system="Other.")["messages"][0]["content"] == "Other."
    assert conversation(first, *SAID, system="Other.")["messages"] == [first, *SAID]
    assert conversation(*SAID, system="")["messages"] == SAID


@pytest.mark.extensions
@pytest.mark.parametrize("tools", [None, [], "[]", ""])
def test_empty_tools_are_left_out(tools: object) -> None:
    assert conversation(*SAID, tools=tools) == {"messages": SAID}


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        ({}, {}),
        ({"train": False}, {"train": False}),
        ({"weight": 0}, {"train": False}),
        ({"weight": 1.0}, {"train": True}),
        ({"weight": None, "train": None}, {}),
        ({"weight": 1, "train": True}, {"train": True}),
    ],
)
def test_a_turn_may_say_whether_it_is_trained(mark: Record, expected: Record) -> None:
    said = {"role": "assistant", "content": "!"}
    assert conversation(SAID[0], said | mark)["messages"][1] == said | expected


@pytest.mark.extensions
def test_turns_of_a_prompt_are_not_trained() -> None:
    prompt = [*SAID, {"role": "user", "content": "And?"}]
    ((record,), _) = read({"prompt": prompt, "completion": [SAID[1]]})
    marks = [message.get("train") for message in record["messages"]]
    assert marks == [None, False, None, None]


@pytest.mark.extensions
@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": "?"}]])
def test_a_conversation_without_an_answer_is_read(messages: list[Record]) -> None:
    """As a record with an empty output is: it becomes no sample, and is counted."""
    assert conversation(*messages) == {"messages": messages}


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("message", "others", "reason"),
    [
        ("hello", {}, ", message 2 is a text"),
        ({"content": "a"}, {}, "message 2 ... role ... content"),
        ({"rol": "user", "content": "a"}, {}, "message 2 ... Rename rol to role"),
        ({"from": 1, "value": "a"}, {}, "message 2 ... from is 1 ... system"),
        ({"role": "robot", "content": "a"}, {}, "role is 'robot' ... system"),
        ({"role": "user"}, {}, "content is null ... text"),
        ({"role": "user", "content": {"a": 1}}, {}, "content is an object"),
        ({"role": "user", "content": "\udfff"}, {}, "message 2 ... content ... valid text"),
        (
            {"role": "user", "content": [{"type": "video", "video": "a.mp4"}]},
            {},
            "'video' ... text parts",
        ),
        ({"role": "user", "content": ["a"]}, {}, "has a part that is 'a text'"),
        ({"role": "user", "content": "a", "name": 5}, {}, "name is a number"),
        ({"role": "assistant", "tool_calls": 5}, {}, "tool_calls is a number"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, {}, "a tool call has no name"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{a}"}]},
            {},
            "arguments ... valid JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
            {},
            "the arguments of f are a list",
        ),
        (
            {"role": "user", "content": "a", "tool_calls": [{"name": "f"}]},
            {},
            "only the assistant has tool_calls",
        ),
        ({"from": "function_call", "value": "f()"}, {}, "value ... valid JSON"),
        (
            {"role": "assistant", "content": [part_of("reasoning", "Hm.", weight=0.5)]},
            {},
            "part 1 is a reasoning with a weight",
        ),
        (
            {"role": "assistant", "content": [part_of("reasoning", "a")], "reasoning_content": "b"},
            {},
            "reasoning_content and reasoning, which differ",
        ),
        ({"role": "user", "content": [part_of("tool_call", "{}")]}, {}, "tool call has no name"),
        ({"role": "assistant", "content": "a", "weight": -0.5}, {}, "weight is -0.5"),
        ({"role": "assistant", "content": "a", "train": "no"}, {}, "train is 'no'"),
        (
            {"role": "assistant", "content": "a", "train": True, "weight": 0},
            {},
            "train is True ... weight is 0",
        ),
        ({"role": "user", "content": "a", "train": True}, {}, "only ... assistant"),
        (SAID[1], {"tools": {"name": "f"}}, ": tools is an object"),
        (SAID[1], {"tools": [{"parameters": {}}]}, "tools ... no name"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"on": DATE}}]},
            {},
            "tool_calls ... JSON ... date",
        ),
        (SAID[1], {"tools": [{"name": "f", "since": DATE}]}, ": tools holds a value that JSON"),
        (SAID[1], {"tools": "f()"}, "tools ... valid JSON"),
        (SAID[1], {"system": 5}, ", system: content is a number"),
    ],
)
def test_an_invalid_message_is_refused(message: Any, others: Record, reason: str) -> None:
    text = refusal({"messages": SAID}, {"messages": [SAID[0], message], **others})
    assert text.startswith("a.jsonl, line 2")
    assert says(text, reason) and "\n" in text


@pytest.mark.extensions
def test_messages_are_a_list() -> None:
    assert says(refusal({"messages": "[]"}), "messages ... list")
    assert says(refusal({"messages": SAID}, {"id": 1}), "messages ... id")


def test_nothing_in_a_record_is_executed(tmp_path: Path) -> None:
    made = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch()"
    read({"instruction": made, "output": "!!python/object/apply:os.system [exit]"})
    refusal({"from": "function_call", "value": made})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("row", "pairs", "one", "several"),
    [
        ({"text": "a"}, False, "1 document (text)", "2 documents (text)"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            True,
            "1 preference pair of completions (prompt, chosen, rejected)",
            "2 preference pairs of completions (prompt, chosen, rejected)",
        ),
    ],
)
def test_records_are_counted_in_words(
    row: dict[str, Any], pairs: bool, one: str, several: str
) -> None:
    reader = reader_of(preference="pairs" if pairs else None)
    reader.records([(1, row)], str)
    form = reader.finish("data")
    assert (form.counted(1), form.counted(2)) == (one, several)
