"""Turns that end with the token which begins the next message."""

import json
from pathlib import Path
from typing import Any

import pytest
from chats import TOOLS, TURNS, marked, said, write_chat_tokenizer
from thinking_templates import THINKERS

from ftkit.data.cache import rendering_of
from ftkit.data.records.record import Record
from ftkit.data.rendering import Rendering
from ftkit.data.spec import Part, Rules
from ftkit.extensions.chats.rendering import ChatRenderer
from ftkit.models.chat_templates.template import ChatTemplate
from ftkit.models.pretrained.tokenizer import Tokenizer

GLM = (
    "{% if tools %}{{ '<|system|>weather' }}{% endif %}{% for m in messages %}"
    "{{ ('<|end|>' if m.role == 'tool' else '<|' + m.role + '|>') + '\\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Nothing stands behind an answer; `<|end|>` begins a tool's message."""
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
STOPS = ("</s>", "<|user|>", "<|end|>")


def tokenizer(directory: Path, *stops: str) -> Tokenizer:
    """One whose generation settings stop at tokens."""
    write_chat_tokenizer(directory)
    ids = [Tokenizer(directory).added_tokens[stop] for stop in stops]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return Tokenizer(directory)


def rendering(source: str, known: Tokenizer, record: Record, **options: Any) -> Rendering:
    template = ChatTemplate(source, "a template", known.special_tokens)
    renderer = ChatRenderer(known, template, **{"train_on": "assistant"} | options)
    (made,) = renderer.render([record])
    return made


def learned(source: str, known: Tokenizer, record: Record, **options: Any) -> list[str]:
    """Samples, with brackets around what carries loss."""
    made = rendering(source, known, record, **options)
    assert not made.refused
    return [marked(sample, known) for sample in made.samples]


CASES = {
    "at the end, and before a user": (
        GLM,
        TURNS,
        {},
        (
            "<|system|>\nBe brief.<|user|>\nHi<|assistant|>\n⟦Hello.<|user|>⟧\nBye<|assistant|>\n"
            "⟦So long 👋<|user|>⟧"
        ),
    ),
    "before a tool": (
        GLM,
        TOOLS,
        {},
        (
            "<|system|>weather<|user|>\nBonn?<|assistant|>\n⟦weather<|end|>⟧\nsun<|assistant|>\n"
            "⟦Sunny.<|user|>⟧"
        ),
    ),
    "a call at the end": (
        GLM,
        {"messages": TOOLS["messages"][:2], "tools": TOOLS["tools"]},
        {},
        "<|system|>weather<|user|>\nBonn?<|assistant|>\n⟦weather<|end|>⟧",
    ),
    "the last turn alone": (
        GLM,
        TURNS,
        {"train_on": "last"},
        (
            "<|system|>\nBe brief.<|user|>\nHi<|assistant|>\nHello.<|user|>\nBye<|assistant|>\n"
            "⟦So long 👋<|user|>⟧"
        ),
    ),
    "every token": (
        GLM,
        {"messages": TURNS["messages"][1:3]},
        {"train_on": "all"},
        "⟦<|user|>\nHi<|assistant|>\nHello.<|user|>⟧",
    ),
    "a turn that is left out": (
        GLM,
        {
            "messages": [
                said("user", "Hi"),
                said("assistant", "No", train=False),
                said("user", "Hi"),
                said("assistant", "Yes"),
            ]
        },
        {"train_on": "all"},
        "⟦<|user|>\nHi<|assistant|>\n⟧No<|user|>⟦\nHi<|assistant|>\nYes<|user|>⟧",
    ),
    "a part without loss": (
        GLM,
        {"messages": [said("user", "Hi"), said("assistant", "No yes", spans=[(0, 2, 0.0)])]},
        {},
        "<|user|>\nHi<|assistant|>\nNo⟦ yes<|user|>⟧",
    ),
    "a turn with an end of its own": (
        CHATML,
        {"messages": TURNS["messages"][1:]},
        {},
        (
            "<|im_start|>Hi<|im_end|><|im_start|>⟦Hello.<|im_end|>⟧<|im_start|>Bye<|im_end|>"
            "<|im_start|>⟦So long 👋<|im_end|>⟧"
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_token_that_begins_the_next_message_ends_a_turn(case: str, tmp_path: Path) -> None:
    source, record, options, expected = CASES[case]
    known = tokenizer(tmp_path, *STOPS, "<|im_start|>")
    assert learned(source, known, record, **options) == [expected]


def test_turns_that_are_samples_of_their_own_end_so_too(tmp_path: Path) -> None:
    thinker = THINKERS["glm 4.7"]
    write_chat_tokenizer(tmp_path)
    processor = Tokenizer(tmp_path).processor
    processor.add_special_tokens([*thinker.tokens])
    processor.save(str(tmp_path / "tokenizer.json"))
    ids = [processor.token_to_id(stop) for stop in ("</s>", "<|user|>", "<|tool|>")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    known = Tokenizer(tmp_path)
    thought = {"reasoning_content": "one more"}
    turns = [said("user", "1+1?"), said("assistant", "2", **thought)] * 2
    samples = learned(thinker.source, known, {"messages": turns})
    assert len(samples) == 2
    assert all(sample.endswith(f"⟦{thinker.thinking}<|user|>⟧") for sample in samples)
    called, answered = learned(thinker.source, known, TOOLS)
    assert called.endswith(f"⟦{thinker.call}<|tool|>⟧") and answered.endswith("Sunny.<|user|>⟧")


@pytest.mark.parametrize(
    ("stops", "end"),
    [((), ""), (("</s>",), ""), (("</s>", "<|user|>"), "<|user|>"), (("<|system|>",), "")],
)
def test_only_a_stop_of_the_models_settings_is_learned(
    stops: tuple[str, ...], end: str, tmp_path: Path
) -> None:
    known = tokenizer(tmp_path, *stops)
    record = {"messages": [said("user", "Hi"), said("assistant", "Hello.")]}
    (text,) = learned(GLM, known, record)
    assert text == f"<|user|>\nHi<|assistant|>\n⟦Hello.{end}⟧"


def test_generation_stops_where_answers_end(tmp_path: Path) -> None:
    known = tokenizer(tmp_path, *STOPS)
    template = ChatTemplate(GLM, "a template", known.special_tokens)
    renderer = ChatRenderer(known, template, train_on="assistant")
    assert renderer.stop_ids == {known.added_tokens[stop] for stop in STOPS}
    record = {"messages": TOOLS["messages"][:2], "tools": TOOLS["tools"]}
    example = renderer.example(record)
    assert known.text_of(example.expected) == "weather"


def test_the_cache_tells_samples_apart_by_these_tokens(tmp_path: Path) -> None:
    rules = Rules(chat_template=GLM)
    part = Part(name="chats", shape="messages", rules=rules, train=[], val=[])
    with_user, without = (
        tokenizer(tmp_path / name, *stops)
        for name, stops in (("with", ("</s>", "<|user|>")), ("without", ("</s>",)))
    )
    assert rendering_of(part, with_user) != rendering_of(part, without)
