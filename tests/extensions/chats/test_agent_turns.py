"""Traces of agents are the conversations that OpenAI's chat format has, to the rendered text."""

from typing import Any

import pytest
from chats import write_chat_tokenizer
from families import FAMILIES
from messages import key_words

from ftkit.data.records.record import Misfit, Record
from ftkit.extensions.chats.conversations import conversation_record, unused_in
from ftkit.extensions.chats.rendering import ChatRenderer
from ftkit.models.chat_templates.template import ChatTemplate
from ftkit.models.pretrained.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
ABOUT = {"name": "weather", "description": "The weather."}
TOOL = {"type": "function", "function": {**ABOUT, "parameters": SCHEMA}}


def call(number: int, city: str) -> Record:
    function = {"name": "weather", "arguments": {"city": city}}
    return {"id": f"c{number}", "type": "function", "function": function}


CHAT = {
    "tools": [TOOL],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Bonn and Rome?"},
        {
            "role": "assistant",
            "reasoning_content": "Two calls.",
            "content": "I look.",
            "tool_calls": [call(1, "Bonn"), call(2, "Rome")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
        {"role": "tool", "tool_call_id": "c2", "content": "Sun."},
        {"role": "assistant", "content": "Rain, and sun."},
        {"role": "user", "content": "Thanks!"},
        {"role": "assistant", "content": "Bye."},
    ],
}


def use(number: int, city: str) -> Record:
    return {"type": "tool_use", "id": f"c{number}", "name": "weather", "input": {"city": city}}


def text(said: str, kind: str = "text") -> Record:
    return {"type": kind, "text": said}


ANTHROPIC = {
    "tools": [{**ABOUT, "input_schema": SCHEMA}],
    "system": [text("Be "), text("brief.")],
    "messages": [
        {"role": "user", "content": [text("Bonn and Rome?")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Two calls.", "signature": "x"},
                text("I look."), use(1, "Bonn"), use(2, "Rome"),
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "Rain."},
                {"type": "tool_result", "tool_use_id": "c2", "content": [text("Sun.")]},
            ],
        },
        {"role": "assistant", "content": [text("Rain, and sun.")]},
        {"role": "user", "content": "Thanks!"},
        {"role": "assistant", "content": "Bye."},
    ],
}  # fmt: skip


def item(number: int, city: str) -> Record:
    return {
        "type": "function_call", "id": f"fc_{number}", "call_id": f"c{number}", "name": "weather",
        "arguments": f'{{"city": "{city}"}}', "status": "completed",
    }  # fmt: skip


def output(number: int, said: Any) -> Record:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": said}


def message(said: str) -> Record:
    part = text(said, "output_text") | {"annotations": [], "logprobs": []}
    return {
        "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
        "content": [part],
    }  # fmt: skip


OPENAI = {
    "tools": [{"type": "function", **ABOUT, "parameters": SCHEMA}],
    "messages": [
        {"role": "system", "content": [text("Be brief.", "input_text")]},
        {"role": "user", "content": "Bonn and Rome?"},
        {"type": "reasoning", "id": "rs_1", "summary": [text("Two calls.", "summary_text")]},
        message("I look."),
        item(1, "Bonn"),
        item(2, "Rome"),
        output(1, "Rain."),
        output(2, [text("Sun.", "input_text")]),
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
        message("Rain, and sun."),
        {"type": "message", "role": "user", "content": [text("Thanks!", "input_text")]},
        {"role": "assistant", "content": "Bye."},
    ],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_chat_tokenizer(tmp_path_factory.mktemp("chats")))


def read(row: dict[str, Any]) -> Record:
    record = conversation_record(row, "messages")
    # The thought has its own name beside the one that all templates know.
    for one in record["messages"]:
        one.pop("thinking", None)
    return record


@pytest.mark.parametrize("trace", [ANTHROPIC, OPENAI], ids=["Anthropic", "OpenAI"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_has_the_text_of_the_same_chat(
    trace: dict[str, Any], family: str, tokenizer: Tokenizer
) -> None:
    template = ChatTemplate(FAMILIES[family], family, tokenizer.special_tokens)
    renderer = ChatRenderer(tokenizer, template, train_on="assistant", reasoning="split")
    theirs, ours = read(trace), read(CHAT)
    assert theirs == ours
    assert renderer.text(theirs) == renderer.text(ours)


def test_nothing_of_a_trace_is_told_as_unused_but_what_is() -> None:
    assert list(unused_in(ANTHROPIC["messages"], "messages")) == []
    assert list(unused_in(OPENAI["messages"], "messages")) == []
    failed = {"type": "tool_result", "tool_use_id": "c1", "content": "No.", "is_error": True}
    turns = [{"role": "user", "content": [failed, text("Go on.")]}]
    assert list(unused_in(turns, "messages")) == ["messages.is_error"]
    assert read({"messages": turns})["messages"] == [
        {"role": "tool", "tool_call_id": "c1", "content": "No."},
        {"role": "user", "content": "Go on."},
    ]


def test_marks_of_messages_stay() -> None:
    turns = [{"role": "user", "content": "?"}, message("No.") | {"train": False}, item(1, "Bonn")]
    (_, said) = read({"messages": turns})["messages"]
    assert (said["content"], said["train"], len(said["tool_calls"])) == ("No.", False, 1)


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"type": "web_search_call", "id": "x"}, "message 2 ... web_search_call"),
        ({"role": "assistant", "content": [use(1, "Bonn"), text("?")]}, "message 2 ... tool_use"),
        ({"role": "assistant", "content": [use(1, "Bonn"), {"type": "redacted_thinking"}]},
         "message 2 ... tool_use"),
        ({"role": "assistant", "content": [{"type": "redacted_thinking"}]},
         "message 2 ... redacted_thinking"),
        (item(1, "Bonn") | {"train": False}, "message 2 ... function_call ... mark"),
        ({"type": "function_call", "call_id": "c1"}, "message 2 ... no name"),
        (output(1, {"a": 1}), "message 2 ... content"),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused_with_its_place(turn: Record, said: str) -> None:
    with pytest.raises(Misfit, match=key_words(said)):
        read({"messages": [output(1, "Rain."), turn]})
