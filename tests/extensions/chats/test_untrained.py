"""Parts of messages that are not to be learned carry no loss, in whatever template."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chats import marked, said, write_chat_tokenizer

from ftkit.data.prepare import make_renderer
from ftkit.data.records.record import Record
from ftkit.data.records.shapes import RecordReader
from ftkit.data.spec import Part, Rules
from ftkit.extensions.chats.span_weights import PARTS_CHANGED
from ftkit.models.pretrained.tokenizer import Tokenizer

TRIMMED = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COUNTED = TRIMMED.replace("{{ m.content | trim }}", "{{ m.content | length }}{{ m.content }}")
PARTS = [
    {"type": "text", "text": " Wait, no. ", "weight": 0},
    {"type": "text", "text": "Red", "weight": 1},
    {"type": "text", "text": " or blue ", "train": False},
]
CHAT = [said("user", "Red or blue?"), {"role": "assistant", "content": PARTS}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_chat_tokenizer(tmp_path_factory.mktemp("chats")))


def rendered(
    tokenizer: Tokenizer, template: str, messages: Sequence[Record], tmp_path: Path, **rules: Any
) -> list[str]:
    """The samples of messages as they are read, with what carries loss in brackets.

    Or the reason why there is none, as the only text.
    """
    if "{" in template:
        file = tmp_path / "own.jinja"
        file.write_text(template)
        template = str(file)
    (record,) = RecordReader().records([(1, {"messages": messages})], str)
    part = Part(
        name="mine",
        shape="messages",
        rules=Rules(chat_template=template, **rules),
        train=[record],
        val=[],
    )
    (rendering,) = make_renderer(part, tokenizer).render([record])
    if rendering.refused:
        return [rendering.refused]
    return [marked(sample, tokenizer) for sample in rendering.samples]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("chatml", "<|im_start|>assistant\n Wait, no.⟦ Red⟧ or blue ⟦<|im_end|>⟧\n"),
        (TRIMMED + "{% if add_generation_prompt %}<|assistant|>{% endif %}", None),
        (MARKED, "<|assistant|> Wait, no.⟦ Red⟧ or blue ⟦<|end|>⟧"),
    ],
)
def test_an_untrained_part_carries_no_loss(
    template: str, expected: str | None, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (text,) = rendered(tokenizer, template, CHAT, tmp_path)
    assert text.endswith(expected or "<|assistant|>Wait, no.⟦ Red⟧ or blue⟦<|end|>⟧")
    assert "⟦" not in text.partition("assistant")[0]


def test_where_everything_is_trained_turns_of_others_can_be_left_out(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    question = said("user", "Red or blue?", weight=0)
    (text,) = rendered(
        tokenizer, MARKED, [question, said("assistant", "Red")], tmp_path, train_on="all"
    )
    assert text == "⟦<|user|>⟧Red or blue?⟦<|end|><|assistant|>Red<|end|>⟧"
    question = said("user", "Red or blue?", weight=0)
    (text,) = rendered(tokenizer, MARKED, [question, said("assistant", "Red")], tmp_path)
    assert text == "<|user|>Red or blue?<|end|><|assistant|>⟦Red<|end|>⟧"


def test_each_turn_of_a_conversation_that_is_split_keeps_its_parts(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    thought = CHAT[1] | {"thinking": "Hm."}
    first, last = rendered(
        tokenizer, "qwen", [CHAT[0], thought, said("user", "Sure?"), thought], tmp_path
    )
    for text in (first, last):
        before, _, turn = text.rpartition("assistant\n")
        assert "⟦" not in before
        assert turn == "⟦<think>\nHm.\n</think>⟧\n\n Wait, no.⟦ Red⟧ or blue ⟦<|im_end|>⟧\n"


@pytest.mark.parametrize(
    ("template", "content", "reason"),
    [
        (COUNTED, PARTS, PARTS_CHANGED),
        (MARKED, [PARTS[0] | {"text": "\ue010"}, PARTS[1]], PARTS_CHANGED),
        (MARKED, [PARTS[0]], "no turn to train on"),
    ],
)
def test_an_ambiguous_part_is_not_guessed(
    template: str, content: list[Record], reason: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    messages = [CHAT[0], {"role": "assistant", "content": content}]
    added = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    template += "" if "add_generation" in template else added
    assert rendered(tokenizer, template, messages, tmp_path) == [reason]
