"""Advice about records that are left out works on them, or says that nothing does."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chats import THINKING, TOOLS, TURNS, said, write_chat_tokenizer
from messages import key_words, message_of, says

from ftkit.data.dataset import load_data
from ftkit.data.prepare import NO_REASONING, advice_for, make_renderer
from ftkit.data.records.record import Record
from ftkit.data.rendering import NO_OUTPUT, NO_TEXT, Rendering
from ftkit.data.spec import Part, Rules
from ftkit.errors import UserError
from ftkit.extensions.chats.rendering import LOST, OTHERS_SAID
from ftkit.extensions.chats.turns import (
    CHANGED,
    NO_TURN,
    NOT_MARKED,
    OTHER_PROMPT,
    REFUSED,
)
from ftkit.models.chat_templates import NO_TOOLS
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component

ONE = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
SOURCES = {
    "plain": ONE + PROMPT,
    "opens a thought": ONE + PROMPT.replace("|>'", "|><think>'"),
    "alternating": "{% if messages[1].role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + ONE + PROMPT,
    "marks nothing": "{% if false %}{% generation %}{% endgeneration %}{% endif %}" + ONE + PROMPT,
    "marks in macros": "{% macro one(m) %}{{ m.content }}{% endmacro %}{% macro said(m) %}"
    "{{ 'x' }}{% generation %}{{ one(m) }}{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}{{ said(m) + eos_token }}{% endfor %}",
    "glued": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "system behind": ONE + "{% if not add_generation_prompt %}{{ messages[0].content + eos_token }}"
    "{% endif %}" + PROMPT,
}
QUESTION = said("user", "Hi")
TWICE: Record = {"messages": [QUESTION, said("user", "th"), said("assistant", "e")]}
JOINED: Record = {"messages": [QUESTION, said("assistant", "th"), said("user", "e answer")]}
MASKED: Record = {
    "messages": [
        QUESTION,
        said("assistant", "2", reasoning_content="one more", train=False),
        QUESTION,
        said("assistant", "3"),
    ]
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_chat_tokenizer(tmp_path_factory.mktemp("chats")))


def part(chat_template: str, **rules: Any) -> Part:
    rules = {"chat_template": chat_template, **rules}
    return Part(name="mine", shape="messages", rules=Rules(**rules), train=(), val=())


def rendering(made_by: Part, record: Record, tokenizer: Tokenizer) -> Rendering:
    (made,) = make_renderer(made_by, tokenizer).render([record])
    return made


def options(advice: str) -> dict[str, str]:
    """The keys of data that it names, with their values."""
    return dict(re.findall(r"--data\.(\w+) ([\w-]+)", advice))


@pytest.mark.parametrize(
    ("template", "record", "reason", "rules"),
    [
        ("alternating", TWICE, REFUSED + "roles must alternate", {}),
        ("zephyr", TOOLS, REFUSED + "zephyr ... tools ... qwen", {}),
        ("plain", TOOLS, NO_TOOLS, {}),
        ("plain", THINKING, NO_REASONING, {}),
        ("opens a thought", TURNS, OTHER_PROMPT, {}),
        ("marks nothing", TURNS, NOT_MARKED, {}),
        ("marks in macros", TURNS, "generation ... macros", {}),
        ("glued", JOINED, LOST, {}),
        ("system behind", TURNS, OTHERS_SAID, {}),
        ("qwen", THINKING, CHANGED, {"reasoning": "refuse"}),
        ("qwen", MASKED, CHANGED, {"train_on": "all"}),
        ("qwen", THINKING, CHANGED, {"train_on": "all", "reasoning": "refuse"}),
    ],
)
def test_what_is_advised_takes_the_records(
    template: str,
    record: Record,
    reason: str,
    rules: dict[str, str],
    tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(SOURCES.get(template, ""))
    if rules.get("train_on") == "all" and record is THINKING:
        first, turn, *rest = record["messages"]
        record = {"messages": [first, turn | {"train": False}, *rest]}
    before = part(str(file) if template in SOURCES else template, **rules)
    made = rendering(before, record, tokenizer)
    found = made.refused or (NO_REASONING if made.omits_reasoning else "")
    assert says(found, reason)
    advice = advice_for(found, [record], before, tokenizer)
    assert set(options(advice)) <= {"chat_template", "reasoning", "train_on"}
    after = {"chat_template": str(before.rules.chat_template), **rules} | options(advice)
    works = rendering(part(**after), record, tokenizer)
    assert options(advice) and works.samples and not works.omits_reasoning


def test_arguments_are_not_for_the_advised_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(SOURCES["alternating"] + "{{ mood }}")
    ours = part(str(file), chat_template_kwargs={"mood": ""})
    advice = advice_for(REFUSED, [TWICE], ours, tokenizer)
    assert says(advice, "--data.chat_template ... Remove data.chat_template_kwargs")


def test_a_template_that_loses_what_is_trained_on_is_not_advised(tokenizer: Tokenizer) -> None:
    before = part("gemma")
    assert options(advice_for(REFUSED, [TWICE], before, tokenizer))
    advice = advice_for(REFUSED, [TWICE], before, tokenizer, used=[TOOLS])
    assert options(advice)["chat_template"] in ("qwen", "llama3", "mistral")


def test_without_a_suitable_template_none_is_suggested(tokenizer: Tokenizer) -> None:
    for reason in (NO_TOOLS, NO_REASONING, NOT_MARKED, REFUSED + "no", LOST):
        advice = advice_for(reason, [{"messages": [QUESTION]}], part("chatml"), tokenizer)
        assert advice.endswith("--data.chat_template FILE.")


@pytest.mark.parametrize(
    ("reason", "works"),
    [(NO_OUTPUT, "Add an output"), (NO_TEXT, "Add a text"), (NO_TURN, "Add an answer")],
)
def test_records_without_trained_text_have_to_be_changed(
    reason: str, works: str, tokenizer: Tokenizer
) -> None:
    assert advice_for(reason, [], part("chatml"), tokenizer).startswith(works)


def data_of(tmp_path: Path, records: Sequence[Record], **more: Any) -> Component:
    file = tmp_path / "chats.json"
    file.write_text(json.dumps(records))
    init_args = {"path": str(file), "val_split_fraction": 0.5, **more}
    return Component(class_path="JSON", init_args=init_args)


def test_data_that_a_template_refuses_are_refused_with_its_reason_and_a_remedy(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    data = data_of(tmp_path, [TWICE] * 4, chat_template="gemma")
    message = message_of(load_data, data, tokenizer, 1000)
    assert says(message, "2 are left out ... gemma ... user and assistant")
    assert "output" not in message
    loaded = load_data(data_of(tmp_path, [TWICE] * 4, **options(message)), tokenizer, 1000)
    assert len(loaded.train) == len(loaded.val) == 2


def test_conversations_without_an_answer_are_refused_with_what_to_add(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    unanswered = {"messages": [QUESTION]}
    with pytest.raises(UserError, match=key_words("no turn to train on ... assistant")):
        load_data(data_of(tmp_path, [unanswered] * 4, chat_template="chatml"), tokenizer, 100)
