"""No token outside the turns that are meant carries loss, whatever templates and people write."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from chats import marked, said, write_chat_tokenizer
from drawn_templates import DrawnTemplate, Piece, drawn_conversation

from ftkit.data.records.record import Record
from ftkit.data.rendering import Rendered, Rendering
from ftkit.extensions.chats.rendering import LOST, OTHERS_SAID, ChatRenderer
from ftkit.extensions.chats.turns import TurnFinder, Written
from ftkit.models.chat_templates import TrainOn
from ftkit.models.chat_templates.template import ChatTemplate, Span
from ftkit.models.pretrained.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEMPLATES, CONVERSATIONS = 80, 4
"""Templates that are drawn, and conversations for each of them."""
MARKED = [seed for seed in range(TEMPLATES) if DrawnTemplate.drawn(seed).marks_stay_in_turns]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_chat_tokenizer(tmp_path_factory.mktemp("chats")))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    file = write_chat_tokenizer(tmp_path_factory.mktemp("theirs")) / "tokenizer.json"
    return PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token="<s>", eos_token="</s>")


def template(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(source, "drawn", tokenizer.special_tokens)


def rendering(
    source: str, tokenizer: Tokenizer, record: Record, train_on: TrainOn = "assistant"
) -> Rendering:
    renderer = ChatRenderer(tokenizer, template(source, tokenizer), train_on=train_on)
    (made,) = renderer.render([record])
    return made


def brackets(
    source: str,
    tokenizer: Tokenizer,
    *messages: dict[str, Any],
    train_on: TrainOn = "assistant",
) -> list[str] | str:
    """The samples of a conversation with brackets around what carries loss, or why it has none."""
    made = rendering(source, tokenizer, {"messages": list(messages)}, train_on)
    return made.refused or [marked(sample, tokenizer) for sample in made.samples]


# --- templates and conversations that are drawn ---------------------------------------------------


def as_learned(drawn: DrawnTemplate, record: Record) -> Record:
    """A conversation without the ends that its answers have and the template writes as well."""
    if not drawn.learned_end:
        return record
    ends = re.compile(rf"(?:\A\s+)?(?:{re.escape(drawn.learned_end)}\s*)+\Z")
    messages = [
        m | {"content": ends.sub("", m["content"])} if m["role"] == "assistant" else m
        for m in record["messages"]
    ]
    return record | {"messages": messages}


def places(sample: Rendered, tokenizer: Tokenizer) -> tuple[str, list[Span]]:
    """The text of a sample, and the characters of each of its tokens.

    By the bytes of the tokens and not by the encoding of a text: a prompt and its answer may be
    encoded apart.
    """
    text = tokenizer.processor.decode(sample.ids, skip_special_tokens=False)
    character_of = [i for i, character in enumerate(text) for _ in character.encode()]
    spans: list[Span] = []
    at = 0
    for token in sample.ids:
        name = tokenizer.token_text(token)
        # The vocabulary writes each byte as a character.
        is_added = token in tokenizer.added_tokens.values()
        end = at + len(name.encode() if is_added else name)
        spans.append((character_of[at], character_of[end - 1] + 1))
        at = end
    assert at == len(character_of)
    return text, spans


def possible(drawn: DrawnTemplate, record: Record, text: str) -> Iterator[list[Piece]]:
    """The pieces of all beginnings of a conversation that may be written as a sample is."""
    for count in range(1, len(record["messages"]) + 1):
        pieces = list(drawn.pieces(record | {"messages": record["messages"][:count]}))
        # Where the whole has other tokens than a prompt and its answer, a sample ends behind that.
        if "".join(piece.text for piece in pieces).startswith(text):
            yield pieces


def says_something(message: dict[str, Any]) -> bool:
    thought = message.get("reasoning_content", "")
    return bool(message.get("tool_calls") or message["content"].strip() or thought.strip())


def turns_that_are_meant(messages: list[dict[str, Any]], train_on: TrainOn) -> set[int]:
    """The turns that are to be learned, by the rules of data.train_on."""
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and says_something(m)]
    asked = next(i for i, m in enumerate(messages) if m["role"] == "user")
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


class Learned(NamedTuple):
    """What carries loss in a sample."""

    outside: list[Span]
    """Characters of tokens that should not; white space behind a turn may be in its last token."""
    turns: set[int]
    """Turns that are meant and do."""


def learned(
    drawn: DrawnTemplate,
    pieces: list[Piece],
    record: Record,
    train_on: TrainOn,
    sample: Rendered,
    spans: list[Span],
) -> Learned:
    messages = record["messages"]
    turns = turns_that_are_meant(messages, train_on)
    characters = [
        (
            character,
            not is_masked(piece, messages)
            if train_on == "all"
            else is_meant(drawn, piece, messages, turns),
            piece.message,
        )
        for piece in pieces
        for character in piece.text
    ]
    bad: list[Span] = []
    found: set[int] = set()
    for first, end in sample.trained:
        for start, stop in spans[first:end]:
            (_, begins_inside, message), *rest = characters[start:stop]
            if not begins_inside or any(c.strip() for c, is_inside, _ in rest if not is_inside):
                bad.append((start, stop))
            found |= {message} & turns if message is not None else set()
    return Learned(bad, found)


@pytest.mark.parametrize("seed", range(TEMPLATES))
def test_no_token_outside_the_turns_that_are_meant_carries_loss(
    seed: int, tokenizer: Tokenizer
) -> None:
    drawn = DrawnTemplate.drawn(seed)
    for number in range(CONVERSATIONS):
        record = drawn_conversation(seed * CONVERSATIONS + number)
        meant = as_learned(drawn, record)
        options: tuple[TrainOn, ...] = ("assistant", "last", "all")
        for train_on in options:
            made = rendering(drawn.source, tokenizer, record, train_on)
            turns: list[int] = []
            for sample in made.samples:
                text, spans = places(sample, tokenizer)
                found = [
                    learned(drawn, pieces, meant, train_on, sample, spans)
                    for pieces in possible(drawn, meant, text)
                ]
                fitting = [one for one in found if not one.outside]
                assert fitting, (drawn, record, train_on, marked(sample, tokenizer), found)
                turns += min((one.turns for one in fitting), key=len)
            if train_on != "all":
                assert len(turns) == len(set(turns)), "a turn is learned twice"


@pytest.mark.parametrize("seed", MARKED)
def test_where_marks_stay_in_turns_the_mask_is_that_of_transformers(
    seed: int, tokenizer: Tokenizer, theirs: "PreTrainedTokenizerFast"
) -> None:
    drawn = DrawnTemplate.drawn(seed)
    for number in range(CONVERSATIONS):
        record = as_learned(drawn, drawn_conversation(seed * CONVERSATIONS + number))
        messages = [{k: v for k, v in m.items() if k != "train"} for m in record["messages"]]
        said_by_it = {i for i, m in enumerate(messages) if m["role"] == "assistant"}
        made = rendering(drawn.source, tokenizer, record | {"messages": messages})
        if turns_that_are_meant(messages, "assistant") != said_by_it or len(made.samples) != 1:
            continue
        (sample,) = made.samples
        expected: Any = theirs.apply_chat_template(
            messages,
            tools=record.get("tools"),
            chat_template=drawn.source,
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
        mask = [0] * len(sample.ids)
        for first, end in sample.trained:
            mask[first:end] = [1] * (end - first)
        if expected["input_ids"] != sample.ids:
            continue  # it is a beginning of the conversation: others have nothing marked
        text = template(drawn.source, tokenizer).render(messages, tools=record.get("tools"))
        spans = tokenizer.encode_rendered(text).offsets
        for i, (start, stop) in enumerate(spans):
            of_theirs = expected["assistant_masks"][i]
            if of_theirs == mask[i]:
                continue
            # They take words that reach beyond a mark, and leave out the later bytes of the
            # character that a mark ends with.
            is_word = stop - start > 1 and sample.ids[i] not in tokenizer.added_tokens.values()
            is_later_byte = spans[i - 1] == (start, stop)
            assert is_word if of_theirs else is_later_byte


def test_what_is_drawn_becomes_samples_often_enough_to_show_anything(tokenizer: Tokenizer) -> None:
    whole = alone = refused = 0
    for seed in range(TEMPLATES):
        made = rendering(DrawnTemplate.drawn(seed).source, tokenizer, drawn_conversation(seed))
        whole += len(made.samples) == 1
        alone += len(made.samples) > 1
        refused += made.refused is not None
    assert whole > TEMPLATES / 3 and alone > TEMPLATES / 20 and refused


# --- by hand --------------------------------------------------------------------------------------

USER = "{{ '<|user|>\\n' + m.content + '<|end|>\\n' }}"
HEADER = "{{ '<|assistant|>\\n' }}"
ANSWER = "{{ m.content + '<|end|>\\n' }}"
FINAL = "{% if loop.last %}{{ eos_token }}{% endif %}"
CONVERSATION = (
    said("user", "Hi"),
    said("assistant", "Red."),
    said("user", "Tell"),
    said("assistant", "Blue."),
)
ASKED = "<|user|>\nHi<|end|>\n"
TOLD = "<|user|>\nTell<|end|>\n"


def of_turns(turn: str, *, user: str = USER, end: str = "") -> str:
    """A template that writes turns of the assistant so."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + turn + "{% else %}" + user
        + "{% endif %}{% endfor %}" + end
        + "{% if add_generation_prompt %}" + HEADER + "{% endif %}"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        pytest.param(
            HEADER + "{% generation %}" + ANSWER + FINAL + "{% endgeneration %}",
            ["⟦Red.<|end|>\n⟧", "⟦Blue.<|end|>\n</s>⟧"],
            id="the end of the text",
        ),
        pytest.param(
            "{% generation %}" + HEADER + ANSWER + "{% endgeneration %}",
            ["⟦Red.<|end|>\n⟧", "⟦Blue.<|end|>\n⟧"],
            id="the header",
        ),
        pytest.param(
            HEADER + "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|end|>\\n' }}",
            ["⟦Red.⟧<|end|>\n", "⟦Blue.⟧<|end|>\n"],
            id="no end",
        ),
        pytest.param(
            HEADER + "{% generation %}{% generation %}{{ m.content }}{% endgeneration %}"
            "{{ '<|end|>' }}{% endgeneration %}{{ '\\n' }}",
            ["⟦Red.<|end|>⟧\n", "⟦Blue.<|end|>⟧\n"],
            id="a mark",
        ),
    ],
)
def test_a_mark_is_cut_to_its_turn_that_holds_as_well(
    turn: str, expected: list[str], tokenizer: Tokenizer
) -> None:
    first, second = (f"<|assistant|>\n{text}" for text in expected)
    assert brackets(of_turns(turn), tokenizer, *CONVERSATION) == [ASKED + first + TOLD + second]


@pytest.mark.parametrize(
    ("turn", "end"),
    [
        pytest.param(HEADER + ANSWER, "⟧\n", id="no marks"),
        pytest.param(
            HEADER + "{% generation %}" + ANSWER + "{% endgeneration %}", "\n⟧", id="marks"
        ),
        pytest.param(
            "{% generation %}" + HEADER + ANSWER + "{% endgeneration %}", "\n⟧", id="the header"
        ),
        pytest.param(
            HEADER + "{{ '> ' }}{% generation %}" + ANSWER + "{% endgeneration %}",
            "\n⟧",
            id="a text before the mark",
        ),
    ],
)
def test_messages_are_learned_with_their_headers(turn: str, end: str, tokenizer: Tokenizer) -> None:
    found = brackets(of_turns(turn), tokenizer, *CONVERSATION, train_on="messages")
    between = "⟧> ⟦" if "> " in turn else ""
    first, second = (f"⟦<|assistant|>\n{between}{text}<|end|>{end}" for text in ("Red.", "Blue."))
    assert found == [ASKED + first + TOLD + second]


def test_a_mark_around_everything_teaches_turns_alone(tokenizer: Tokenizer) -> None:
    source = "{% generation %}" + of_turns(HEADER + ANSWER) + "{% endgeneration %}"
    assert brackets(source, tokenizer, *CONVERSATION) == [
        f"{ASKED}<|assistant|>\n⟦Red.<|end|>\n⟧{TOLD}<|assistant|>\n⟦Blue.<|end|>\n⟧"
    ]


def test_users_who_say_what_the_assistant_says_are_not_learned(tokenizer: Tokenizer) -> None:
    marked_turn = HEADER + "{% generation %}" + ANSWER + FINAL + "{% endgeneration %}"
    same = [said(one["role"], "Red.<|end|>\n<|assistant|>\nRed.") for one in CONVERSATION]
    for source in (of_turns(marked_turn), of_turns(HEADER + ANSWER + FINAL)):
        found = brackets(source, tokenizer, *same)
        learned = re.findall("⟦(.*?)⟧", found[0], re.DOTALL)
        assert found[0].count("<|assistant|>\n⟦") == len(learned) == 2
        assert all(text.startswith("Red.<|end|>\n<|assistant|>\nRed.<|end|>") for text in learned)


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        pytest.param(
            "{% for m in messages %}{{ m.content }}{% endfor %}{% if not add_generation_prompt "
            "and messages[-1].role == 'assistant' %}{{ eos_token }}{% endif %}",
            [said("user", "Hi"), said("assistant", "Red."), said("user", "</s>Tell")],
            id="a user goes on with the end of the text",
        ),
        pytest.param(
            of_turns(
                HEADER + ANSWER,
                user="{% if m.role == 'user' %}" + USER + "{% endif %}",
                end="{% if not add_generation_prompt %}"
                "{{ '<|system|>' + messages[0].content + '<|end|>' }}{% endif %}",
            ),
            [said("system", "Be brief."), *CONVERSATION[:2]],
            id="the system message follows the answer",
        ),
    ],
)
def test_a_conversation_is_refused_if_what_others_say_cannot_be_told_from_a_turn(
    source: str, messages: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    assert brackets(source, tokenizer, *messages) == OTHERS_SAID


@pytest.mark.parametrize(
    ("answer", "question", "expected"),
    [
        ("Red. th", "e answer", "Hi⟦Red.⟧ the answer"),
        ("th", "e answer", LOST),
        ("Red.\n", "\nTell", "Hi⟦Red.\n⟧\nTell"),
    ],
)
def test_a_token_that_holds_letters_behind_a_turn_carries_no_loss(
    answer: str, question: str, expected: str, tokenizer: Tokenizer
) -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = said("user", "Hi"), said("assistant", answer), said("user", question)
    found = brackets(source, tokenizer, *messages)
    assert found == (LOST if expected == LOST else [expected])


def test_white_space_behind_a_turn_may_belong_to_its_last_token(tmp_path: Path) -> None:
    """Phi-3's tokens take the line end behind them."""
    file = write_chat_tokenizer(tmp_path) / "tokenizer.json"
    settings = json.loads(file.read_text())
    for token in settings["added_tokens"]:
        token["rstrip"] = True
    file.write_text(json.dumps(settings))
    found = brackets(of_turns(HEADER + ANSWER), Tokenizer(tmp_path), *CONVERSATION)
    assert not isinstance(found, str)
    assert re.findall("⟦(.*?)⟧", found[0]) == ["Red.<|end|>", "Blue.<|end|>"]


@pytest.mark.parametrize(
    ("trained", "refused"),
    [([(0, 21)], OTHERS_SAID), ([(9, 11)], OTHERS_SAID), ([(32, 36)], None)],
)
def test_samples_are_checked_without_trust_in_what_found_their_turns(
    trained: list[Span],
    refused: str | None,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sound = TurnFinder.written_each

    def broken(self: TurnFinder, records: Iterable[Record]) -> Iterator[list[Written] | str]:
        for written in sound(self, records):
            assert not isinstance(written, str)
            yield [sample._replace(trained=trained) for sample in written]

    monkeypatch.setattr(TurnFinder, "written_each", broken)
    record = {"messages": list(CONVERSATION)}
    assert rendering(of_turns(HEADER + ANSWER), tokenizer, record).refused == refused


@pytest.mark.parametrize("content", ["", "b"])
def test_a_masked_turn_carries_no_loss_where_everything_else_does(
    content: str, tokenizer: Tokenizer
) -> None:
    messages = [*CONVERSATION[:3], said("assistant", content, train=False)]
    record = {"messages": messages}
    made = rendering(of_turns(HEADER + ANSWER), tokenizer, record, train_on="all")
    (sample,) = made.samples
    assert marked(sample, tokenizer) == (
        f"⟦{ASKED}<|assistant|>\nRed.<|end|>\n{TOLD}<|assistant|>\n⟧{content}<|end|>\n"
    )
