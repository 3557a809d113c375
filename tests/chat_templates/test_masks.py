"""No token outside the turns that are meant carries loss, whatever templates and people write."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from chats import marked, said, write_chat_tokenizer
from drawn_templates import DrawnTemplate, Piece, drawn_conversation

from ftkit.chat_templates.options import TrainOn
from ftkit.chat_templates.template import ChatTemplate, Span
from ftkit.chat_templates.turns import TurnFinder, Written
from ftkit.pretrained.tokenizer import Tokenizer
from ftkit.records.record import Record
from ftkit.rendering.chat import LOST, OTHERS_SAID, ChatRenderer
from ftkit.rendering.renderer import Rendered, Rendering

TEMPLATES, CONVERSATIONS = 120, 5
"""Templates that are drawn, and conversations for each of them."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_chat_tokenizer(tmp_path_factory.mktemp("chats")))


def template(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(source, "drawn", tokenizer.special_tokens)


def rendering(
    source: str, tokenizer: Tokenizer, record: Record, train_on: TrainOn = "assistant"
) -> Rendering:
    renderer = ChatRenderer(tokenizer, template(source, tokenizer), train_on=train_on)
    (made,) = renderer.render([record])
    return made


def brackets(source: str, tokenizer: Tokenizer, *messages: dict[str, Any]) -> list[str] | str:
    """The samples of a conversation with brackets around what carries loss, or why it has none."""
    made = rendering(source, tokenizer, {"messages": list(messages)})
    return made.refused or [marked(sample, tokenizer) for sample in made.samples]


# --- templates and conversations that are drawn ---------------------------------------------------


class Possible(NamedTuple):
    """What a sample may be: the first messages of a conversation."""

    count: int
    pieces: list[Piece]
    offsets: Sequence[Span]


def possible(
    drawn: DrawnTemplate, record: Record, sample: Rendered, tokenizer: Tokenizer
) -> Iterator[Possible]:
    """All beginnings of a conversation that are written as a sample is."""
    for count in range(1, len(record["messages"]) + 1):
        pieces = list(drawn.pieces(record | {"messages": record["messages"][:count]}))
        encoded = tokenizer.encode_rendered("".join(piece.text for piece in pieces))
        if encoded.ids == sample.ids:
            yield Possible(count, pieces, encoded.offsets)


def says_something(message: dict[str, Any]) -> bool:
    thought = message.get("reasoning_content", "")
    return bool(message.get("tool_calls") or message["content"].strip() or thought.strip())


def turns_that_are_meant(messages: list[dict[str, Any]], train_on: TrainOn) -> set[int]:
    """The turns that are to be learned, by the rules of data.train_on."""
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and says_something(m)]
    asked = [i for i, m in enumerate(messages) if m["role"] == "user"][0]
    by_rule = {i for i in turns if i > asked}
    if train_on == "last":
        by_rule &= {turns[-1]} if turns else set()
    return {i for i in turns if messages[i].get("train", i in by_rule)}


def is_meant(drawn: DrawnTemplate, piece: Piece, messages: list[Any], turns: set[int]) -> bool:
    """Whether a piece belongs to one of these turns.

    Without a prompt, an answer begins itself. An answer that says nothing is written as an end
    alone, which may be the one that the turn before it ends with.
    """
    if piece.message is None:
        return False
    message = messages[piece.message]
    ends = piece.part in ("end", "space", "final")
    if message["role"] == "assistant" and not says_something(message) and ends:
        return message.get("train") is not False
    belongs = ends or piece.part == "said" or (piece.part == "header" and not drawn.prompts)
    return belongs and piece.message in turns


def is_masked(piece: Piece, messages: list[dict[str, Any]]) -> bool:
    if piece.message is None or messages[piece.message].get("train") is not False:
        return False
    return piece.part in ("said", "end")


def outside(drawn: DrawnTemplate, found: Possible, record: Record, train_on: TrainOn, alone: bool,
            sample: Rendered) -> list[Span]:  # fmt: skip
    """The tokens of a sample that carry loss and should not.

    White space behind a turn may belong to its last token.
    """
    messages = record["messages"]
    turns = turns_that_are_meant(messages, train_on)
    if alone:
        turns &= {found.count - 1}
    characters = [
        (
            character,
            not is_masked(piece, messages)
            if train_on == "all"
            else is_meant(drawn, piece, messages, turns),
        )
        for piece in found.pieces
        for character in piece.text
    ]
    bad: list[Span] = []
    for first, end in sample.trained:
        for start, stop in found.offsets[first:end]:
            (_, begins_inside), *rest = characters[start:stop]
            if not begins_inside or any(c.strip() for c, is_inside in rest if not is_inside):
                bad.append((start, stop))
    return bad


@pytest.mark.parametrize("seed", range(TEMPLATES))
def test_no_token_outside_the_turns_that_are_meant_carries_loss(
    seed: int, tokenizer: Tokenizer
) -> None:
    drawn = DrawnTemplate.drawn(seed)
    for number in range(CONVERSATIONS):
        record = drawn_conversation(seed * CONVERSATIONS + number)
        options: tuple[TrainOn, ...] = ("assistant", "last", "all")
        for train_on in options:
            made = rendering(drawn.source, tokenizer, record, train_on)
            for sample in made.samples:
                alone = len(made.samples) > 1
                bad = [
                    outside(drawn, found, record, train_on, alone, sample)
                    for found in possible(drawn, record, sample, tokenizer)
                ]
                assert [] in bad, (drawn, record, train_on, marked(sample, tokenizer), bad)


def test_what_is_drawn_becomes_samples_often_enough_to_show_anything(tokenizer: Tokenizer) -> None:
    whole = alone = refused = 0
    for seed in range(TEMPLATES):
        made = rendering(DrawnTemplate.drawn(seed).source, tokenizer, drawn_conversation(seed))
        whole += len(made.samples) == 1
        alone += len(made.samples) > 1
        refused += made.refused is not None
    assert whole > TEMPLATES / 3 and alone > TEMPLATES / 20 and refused > TEMPLATES / 20
