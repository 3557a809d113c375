"""Every key of a record is honoured, refused by name, or named once as not used."""

import json
from typing import Any

import pytest
from messages import message_of, says

from ftkit.data.records.keys import UnusedKeys
from ftkit.data.records.record import Record
from ftkit.data.records.shapes import RecordReader, reader_of

ASKED: Record = {"role": "user", "content": "?"}
SAID: Record = {"role": "assistant", "content": "!"}
CHAT = [ASKED, SAID]
SHAREGPT = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]
INSTRUCTION = {"instruction": "a", "output": "b"}
COMPLETION = {"prompt": "a", "completion": "b"}
TEXT = {"text": "a"}


def read(*rows: Record, columns: dict[str, str] | None = None, answered: bool = True) -> Any:
    """The canonical records, and the names of the keys that are not used."""
    reader = RecordReader(columns, answered=answered)
    records = reader.records(enumerate(rows, 1), "a.jsonl, line {}".format)
    return records, list(reader.unused.names)


def refusal(*rows: Record, columns: dict[str, str] | None = None) -> str:
    return message_of(read, *rows, columns=columns)


def chat(**last: Any) -> Record:
    return {"messages": [ASKED, SAID | last]}


# Honoured

THOUGHT = {"reasoning_content": "Hm."}
PARTS = [{"type": "text", "text": "Hm, "}, {"type": "text", "text": "3"}]
QUERY = {"query": "a", "response": "b"}
TURNS = [["q", "r"], ["s", "t"]]
BEFORE = {"history": TURNS}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


def part(index: int, **mark: Any) -> list[Record]:
    return [one | mark if i == index else one for i, one in enumerate(PARTS)]


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        pytest.param(
            chat(thinking="Hm."), None, chat(thinking="Hm.", **THOUGHT), id="TRL thinking"
        ),
        pytest.param(chat(reasoning="Hm."), None, chat(reasoning="Hm.", **THOUGHT), id="vLLM"),
        pytest.param(chat(**THOUGHT), None, chat(**THOUGHT), id="reasoning_content"),
        pytest.param(
            chat(thinking="Hm.", **THOUGHT), None, chat(thinking="Hm.", **THOUGHT), id="twice"
        ),
        pytest.param(INSTRUCTION | BEFORE, None, INSTRUCTION | BEFORE, id="LLaMA-Factory alpaca"),
        pytest.param(
            INSTRUCTION | {"history": '[["q", "r"], ["s", "t"]]'},
            None,
            INSTRUCTION | BEFORE,
            id="history as the text of a table",
        ),
        pytest.param(
            QUERY | BEFORE | {"system": "c"},
            {"instruction": "query", "output": "response"},
            INSTRUCTION | BEFORE | {"sys_prompt": "c"},
            id="ms-swift query and response",
        ),
        pytest.param(
            INSTRUCTION | {"dialog": TURNS}, {"history": "dialog"}, INSTRUCTION | BEFORE, id="named"
        ),
        pytest.param(
            INSTRUCTION | {"system": "c"}, None, INSTRUCTION | {"sys_prompt": "c"}, id="system"
        ),
        *(
            pytest.param(chat(**{key: value}), None, chat(train=bool(value)), id=f"{key} {value}")
            for key in ("train", "weight", "loss", "loss_weight", "loss_scale")
            for value in (0, 1, 0.0, 1.0, False, True)
        ),
        pytest.param(
            {"conversations": [SHAREGPT[0], SHAREGPT[1] | {"loss": False}]},
            None,
            chat(train=False),
            id="a mark of ShareGPT",
        ),
        *(
            pytest.param(
                chat(content=part(0, **{key: 0})),
                None,
                chat(content="Hm, 3", spans=[[0, 4, 0]]),
                id=f"axolotl, {key} of a part",
            )
            for key in ("train", "weight", "loss")
        ),
        pytest.param(
            chat(content=part(1, train=True)),
            None,
            chat(content="Hm, 3", train=True),
            id="a part that is learned",
        ),
        pytest.param(
            chat(content=[one | {"train": False} for one in PARTS]),
            None,
            chat(content="Hm, 3", train=False),
            id="no part is learned",
        ),
        pytest.param(
            chat(content=[{"type": "text", "content": "Hm, ", "weight": 0}, PARTS[1]]),
            None,
            chat(content="Hm, 3", spans=[[0, 4, 0]]),
            id="torchtune, a part with content",
        ),
        pytest.param(
            chat(
                content="Hm, 3",
                train_detail=[
                    {"begin_offset": 4, "end_offset": 4, "train": True},
                    {"begin_offset": 0, "end_offset": 3, "train": False},
                ],
            ),
            None,
            chat(content="Hm, 3", train=True, spans=[[0, 4, 0]]),
            id="axolotl train_detail",
        ),
        *(
            pytest.param(
                chat(**{key: value}), None, chat(train=True, weight=value), id=f"{key} {value}"
            )
            for key in ("weight", "loss_weight", "loss_scale")
            for value in (0.5, 2, 1e-6)
        ),
        pytest.param(
            chat(loss=True, loss_scale=0.5, weight=0.5),
            None,
            chat(train=True, weight=0.5),
            id="a mark and two equal weights",
        ),
        pytest.param(
            chat(content=part(0, weight=0.5)),
            None,
            chat(content="Hm, 3", train=True, spans=[[0, 4, 0.5]]),
            id="the weight of a part",
        ),
        pytest.param(
            chat(content=[PARTS[0] | {"weight": 1}, PARTS[1]], weight=2),
            None,
            chat(content="Hm, 3", train=True, weight=2, spans=[[0, 4, 1]]),
            id="a part with a weight of its own in a turn with another",
        ),
        pytest.param(
            chat(content=[one | {"weight": 2} for one in PARTS], weight=2),
            None,
            chat(content="Hm, 3", train=True, weight=2),
            id="parts with the weight of their turn",
        ),
        pytest.param(
            chat(
                content="Hm, 3",
                train_detail=[
                    {"begin_offset": 0, "end_offset": 1, "weight": 0.5},
                    {"begin_offset": 2, "end_offset": 3, "train": True, "weight": 0.5},
                    {"begin_offset": 4, "end_offset": 4, "train": True},
                ],
            ),
            None,
            chat(content="Hm, 3", train=True, spans=[[0, 4, 0.5]]),
            id="train_detail with weights",
        ),
        pytest.param(
            {"messages": [ASKED | {"train": False}, SAID]},
            None,
            {"messages": [ASKED | {"spans": [[0, 1, 0]]}, SAID]},
            id="a question that is not learned",
        ),
        pytest.param(
            {"prompt": [*CHAT, ASKED], "completion": [SAID], "system": "c"},
            None,
            {
                "messages": [
                    {"role": "system", "content": "c"},
                    *(ASKED, SAID | {"train": False}, ASKED, SAID),
                ]
            },
            id="TRL prompt and completion",
        ),
        pytest.param(
            {
                "messages": [ASKED, {"role": "assistant", "function_call": CALL["function"]}],
                "functions": [TOOL["function"]],
            },
            None,
            {
                "messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
                "tools": [TOOL],
            },
            id="OpenAI functions",
        ),
        *(
            pytest.param(record | {key: 1}, None, record, id=f"{key} 1 of {next(iter(record))}")
            for record in (chat(), INSTRUCTION, COMPLETION, TEXT)
            for key in ("loss_weight", "loss_scale")
        ),
        *(
            pytest.param(record | {key: value}, None, record | {"weight": value})
            for record in (chat(), INSTRUCTION, COMPLETION, TEXT)
            for key, value in (("loss_weight", 0.5), ("loss_scale", 0))
        ),
    ],
)
def test_a_key_with_a_meaning_has_its_effect(
    row: Record, columns: dict[str, str] | None, expected: Record
) -> None:
    assert read(row, columns=columns) == ([expected], [])


# Refused

PREFERENCE = "the objective learns from one answer"


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("row", "key", "works"),
    [
        *(
            pytest.param(record | {key: value}, f"has a {key}", f"Remove the records whose {key}")
            for record in (chat(), {"conversations": SHAREGPT}, INSTRUCTION, COMPLETION)
            for key in ("label", "kto_tag")
            for value in (False, True)
        ),
        (chat(label=False), "message 2 has a label", "Remove the records"),
        *(
            (record | {key: value}, f": {key} holds", f"or {key} with its place")
            for record in (chat(), {"conversations": SHAREGPT}, INSTRUCTION, COMPLETION)
            for key, value in (
                ("images", ["a.jpg"]),
                ("images", [{"bytes": b"\xff"}]),
                ("videos", ["a.mp4"]),
                ("audios", ["a.wav"]),
                ("image", {"path": "a.jpg"}),
            )
            if record is COMPLETION or key == "videos"
        ),
        *(
            (record | {key: value}, f": {key} has 1, but ... 0 places", f"Correct {key}")
            for record in (chat(), {"conversations": SHAREGPT}, INSTRUCTION)
            for key, value in (
                ("images", ["a.jpg"]),
                ("images", [{"bytes": b"\xff"}]),
                ("image", {"path": "a.jpg"}),
                ("image", "a.jpg"),
                ("audios", ["a.wav"]),
            )
            # Of a table, it may be the name of a file that is not used.
            if record is not INSTRUCTION or value != "a.jpg"
        ),
        (chat(images=["a.jpg"]), "message 2: images holds", "Remove the record"),
        *(
            (record | {"image": "a.jpg"}, ": image holds", "place in the text (<image>)")
            for record in (
                {"prompt": "<image>a", "completion": "b"},
                {"text": "<image>a"},
            )
        ),
        *(
            (chat(content=[{"type": kind}]), f"a part that is '{kind}'", "Remove the part")
            for kind in ("input_audio", "video")
        ),
        *(
            (
                chat(content=[{"type": kind}]),
                f"message 2, part 1 is an {kind.removesuffix('_url')} without",
                "Correct",
            )
            for kind in ("image", "image_url", "audio", "audio_url")
        ),
        *(
            (INSTRUCTION | {key: value}, f": {key} is", "with messages ... chat_template_kwargs")
            for key, value in (
                ("chat_template_kwargs", {"enable_thinking": False}),
                ("enable_thinking", False),
                ("reasoning_effort", "high"),
                ("model_identity", "You are Ann."),
                ("thinking", True),
            )
        ),
        *(
            (chat() | {"chat_template_kwargs": value}, f"chat_template_kwargs {why}", "Correct it")
            for value, why in (
                (["high"], "is not such an object"),
                ({"a-b": 1}, "has 'a-b', which cannot be the name"),
                ({"loop": 1}, "has 'loop', which cannot be the name"),
                ({"messages": "a"}, "has messages, which conversation"),
                ({"eos_token": "a"}, "has eos_token, which conversation"),
            )
        ),
        (
            chat() | {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "has enable_thinking true, but chat_template_kwargs with enable_thinking false",
            "Remove one",
        ),
        *(
            (record | {"loss_weight": value}, f": loss_weight is {value}", "Make loss_weight such")
            for record in (chat(), INSTRUCTION, COMPLETION, TEXT)
            for value in (-0.5, 1e9)
        ),
        (chat() | {"loss_weight": 1, "loss_scale": 2}, "loss_weight is 1 ... loss_scale", "Remove"),
        *(
            (
                chat(**{key: value}),
                f"message 2: {key} is {value!r}",
                f"Make {key} 0 or 1 ... weight",
            )
            for key in ("train", "loss")
            for value in (0.5, 2, -1, "yes", [1])
        ),
        *(
            (chat(**{key: value}), f"message 2: {key} is {value!r}", f"Make {key} such a number")
            for key in ("weight", "loss_weight", "loss_scale")
            for value in (-1, 1e-9, 1e9, float("nan"), "yes", [1])
        ),
        (chat(content=part(0, weight=-2)), "message 2, part 1: weight is -2", "Make weight such"),
        (chat(loss=True, weight=0), "loss is True ... weight is 0", "Remove one of the two"),
        (chat(weight=1, loss_weight=2), "weight is 1 ... loss_weight is 2", "Remove one of"),
        (chat(train=False, content=part(0, train=True)), "train excludes", "Remove one of the two"),
        (
            {"messages": [ASKED | {"loss": True}, SAID]},
            "message 1 ... trained on ... assistant",
            "Remove loss",
        ),
        (chat(thinking="Hm.", reasoning="So."), "thinking and reasoning, which", "Keep one"),
        (chat(thinking={"a": 1}), "thinking is an object", "Make thinking a text"),
        *(
            (chat(content="abc", train_detail=detail), "train_detail has", "remove train_detail")
            for detail in (
                [{"begin_offset": 0, "end_offset": 3, "train": False}],
                [{"begin_offset": 0, "end_offset": 1}],
                [{"begin_offset": "0", "end_offset": 1, "train": False}],
                [{"begin_offset": 0, "end_offset": 1, "train": False}] * 2,
                [5],
            )
        ),
        (chat(content=PARTS, train_detail=[{"a": 1}]), "list of parts", "with train instead"),
        (chat() | BEFORE, "history ... messages", "Put them into"),
        (COMPLETION | BEFORE, "history holds turns", "--data.columns.instruction prompt"),
        (INSTRUCTION | {"history": [["q"]]}, "one of its entries is", "Correct history"),
        (INSTRUCTION | {"history": [["q", None]]}, "one of its entries is", "Correct history"),
        (INSTRUCTION | {"system": "a", "sys_prompt": "b"}, "which differ", "Keep one"),
        (INSTRUCTION | {"tools": [TOOL]}, "tools holds functions", "Write the record with"),
        (COMPLETION | {"tools": [TOOL]}, "tools holds functions", "Write the record with"),
        (chat() | {"rejected_response": "c"}, PREFERENCE, "--data.columns.messages messages"),
        (COMPLETION | {"rejected_response": "c"}, PREFERENCE, "--data.columns.completion"),
        (INSTRUCTION | {"chosen": "b", "rejected": "c"}, PREFERENCE, "--data.columns.output"),
        (chat() | {"chosen": SAID, "rejected": SAID}, PREFERENCE, "put each into the messages"),
    ],
)
def test_a_key_that_is_not_supported_yet_is_refused_by_name(
    row: Record, key: str, works: str
) -> None:
    text, _, advice = refusal(row).partition("\n")
    assert text.startswith("a.jsonl, line 1")
    assert says(text, key) and says(advice, works)


@pytest.mark.parametrize(
    ("key", "value"),
    [("label", False), ("images", ["a.jpg"]), ("enable_thinking", True), ("loss_weight", -1)],
)
def test_keys_are_refused_with_columns_too(key: str, value: Any) -> None:
    columns = {"instruction": "query", "output": "response"}
    assert key in refusal(QUERY | {key: value}, columns=columns)


def test_a_history_that_is_named_is_one() -> None:
    assert says(
        refusal(INSTRUCTION | {"dialog": "of kings"}, columns={"history": "dialog"}),
        "history ... list",
    )


def test_later_records_follow_the_same_rules_as_the_first() -> None:
    assert "line 2 is a preference pair" in refusal(
        COMPLETION, {"prompt": "a", "chosen": "b", "rejected": "c"}
    )
    assert "line 2 has a label" in refusal(COMPLETION, COMPLETION | {"label": True})


# Named


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("row", "unused"),
    [
        ({"id": 5, "source": "web", "score": 0.5}, ["id", "source", "score"]),
        ({"label": 3}, ["label"]),
        ({"label": "positive"}, ["label"]),
        ({"weight": 70.5, "loss": 2.3, "train": True}, ["weight", "loss", "train"]),
        ({"images": 3, "image": True}, ["images", "image"]),
        ({"history": "of kings"}, ["history"]),
        ({"loss_weight": "0.5"}, ["loss_weight"]),
    ],
)
@pytest.mark.parametrize("record", [chat(), INSTRUCTION, COMPLETION, TEXT])
def test_other_keys_are_named_and_change_nothing(
    record: Record, row: Record, unused: list[str]
) -> None:
    found, names = read(record | row)
    assert found == [record]
    assert sorted(names) == sorted(unused)


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("row", "columns", "unused"),
    [
        (TEXT | {"label": True}, None, ["label"]),
        (TEXT | {"label": 1, "image": "a.jpg"}, None, ["image", "label"]),
        (TEXT | {"images": ["a.jpg"], "history": TURNS}, None, ["history", "images"]),
        (TEXT | {"enable_thinking": True}, None, ["enable_thinking"]),
        (INSTRUCTION | {"image": "a.jpg", "tools": "hammer"}, None, ["image", "tools"]),
        (INSTRUCTION | {"thinking": "Hm.", "reasoning": "Hm."}, None, ["reasoning", "thinking"]),
        (COMPLETION | {"enable_thinking": True}, None, ["enable_thinking"]),
        ({"body": "a", "image": "b", "label": True}, {"text": "body"}, ["image", "label"]),
        ({"image": "a", "label": "cat"}, {"instruction": "image", "output": "label"}, []),
        (
            {"instruction": "of ours", "question": "a", "output": "b"},
            {"instruction": "question"},
            ["instruction"],
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"completion": "chosen"},
            ["rejected"],
        ),
        (
            INSTRUCTION | {"chosen": "b", "rejected": "c"},
            {"output": "output"},
            ["chosen", "rejected"],
        ),
        (chat(timestamp=5, id="x"), None, ["messages.id", "messages.timestamp"]),
        (
            {"conversations": [SHAREGPT[0] | {"content": "?"}, SHAREGPT[1]]},
            None,
            ["conversations.content"],
        ),
        (
            chat(content=part(0, cache_control={"type": "e"})),
            None,
            ["messages.content.cache_control"],
        ),
        ({"prompt": [ASKED], "completion": [SAID | {"id": 1}]}, None, ["completion.id"]),
    ],
)
def test_ordinary_tables_keep_working(
    row: Record, columns: dict[str, str] | None, unused: list[str]
) -> None:
    assert sorted(read(row, columns=columns)[1]) == unused


@pytest.mark.extensions
@pytest.mark.parametrize(
    "record", [chat(), {"prompt": [ASKED], "completion": [SAID]}, {"conversations": SHAREGPT}]
)
def test_conversations_have_arguments_of_their_template(record: Record) -> None:
    arguments = {"enable_thinking": False, "reasoning_effort": "high", "builtin_tools": ["a"]}
    for row, thinking in (
        (record | {"chat_template_kwargs": arguments | {"mood": None}}, None),
        # As tables store them.
        (record | {"chat_template_kwargs": json.dumps(arguments)}, None),
        (
            record
            | {"chat_template_kwargs": {"builtin_tools": ["a"], "reasoning_effort": "high"}}
            | {"enable_thinking": False, "thinking": True, "reasoning_effort": "high"},
            True,
        ),
    ):
        ((found,), unused) = read(row)
        expected = arguments | ({} if thinking is None else {"thinking": thinking})
        assert (found["chat_template_kwargs"], unused) == (expected, [])


@pytest.mark.extensions
def test_a_text_called_thinking_is_no_argument() -> None:
    ((found,), unused) = read(chat() | {"thinking": "Hm."})
    assert "chat_template_kwargs" not in found and unused == ["thinking"]


@pytest.mark.extensions
def test_both_answers_of_a_pair_have_its_arguments() -> None:
    reader = reader_of(None, preference="pairs")
    row = {"prompt": [ASKED], "chosen": [SAID], "rejected": [SAID], "enable_thinking": False}
    (found,) = reader.records([(1, row)], "a.jsonl, line {}".format)
    for half in found.values():
        assert half["chat_template_kwargs"] == {"enable_thinking": False}
    assert reader.unused.names == ()


EMPTY: list[Any] = [None, "", [], {}, [None], [""], {"bytes": None}]


@pytest.mark.extensions
@pytest.mark.parametrize("value", EMPTY)
@pytest.mark.parametrize("record", [chat(), INSTRUCTION, COMPLETION, TEXT])
def test_an_empty_value_does_not_use_a_key(record: Record, value: Any) -> None:
    keys = (
        *("label", "kto_tag", "images", "videos", "audios", "image", "history", "id"),
        *("chat_template_kwargs", "enable_thinking", "reasoning_effort", "model_identity"),
        *("loss_weight", "loss_scale", "rejected", "rejected_response", "chosen", "thinking"),
    )
    assert read(record | dict.fromkeys(keys, value)) == ([record], [])


@pytest.mark.extensions
def test_an_empty_value_of_a_message_does_not_use_a_key() -> None:
    keys = ("thinking", "reasoning", "loss", "weight", "train", "loss_weight", "loss_scale")
    for value in (None, ""):
        row = chat(**dict.fromkeys((*keys, "train_detail", "images", "label", "id"), value))
        assert read(row) == ([chat()], [])


@pytest.mark.extensions
def test_a_prompt_without_an_answer_may_have_a_label() -> None:
    record = {"prompt": [ASKED], "label": True}
    assert read(record, answered=False)[0] == [{"messages": [ASKED]}]


def test_the_most_frequent_keys_are_named_first_and_not_all_of_many() -> None:
    rare = {f"k{i}": 1 for i in range(30)}
    rows = [TEXT | {"often": 1, "\x1b[31m": 1}, TEXT | {"often": 1, "\x1b[31m": 1} | rare]
    reader = RecordReader()
    reader.records([*enumerate(rows), (9, TEXT | {"often": 1})], str)
    unused = reader.unused
    assert unused.names[0] == "often"
    assert (len(unused.names), unused.more) == (20, 12)
    assert unused.text.startswith("often, '\\x1b[31m', k")
    assert unused.text.endswith(" and 12 more")
    assert UnusedKeys().text == ""
