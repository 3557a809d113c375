"""Questions: what a record of any shape asks a result, and the prompt that this becomes."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftkit.errors import UserError
from ftkit.models.chat_templates.template import ChatTemplate, Message, TemplateRefusal


@dataclass(frozen=True, kw_only=True)
class Question:
    """A conversation that is to be answered, or a text that is to be continued."""

    text: str
    """The text itself; of a conversation, what was said last, for people."""
    messages: tuple[Message, ...] = ()
    """Empty: the text is taken as it is."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """What may be called."""


def question_of(record: Mapping[str, Any]) -> Question:
    """What a record asks; where it has an answer, up to the last one.

    Args:
        record: of any shape; needs no answer.
    """
    if "messages" in record:
        messages = tuple(record["messages"])
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        said = messages[-1]["content"] if messages else ""
        return Question(text=said, messages=messages, tools=record.get("tools"))
    for key in ("prompt", "text"):
        if key in record:
            return Question(text=record[key])
    user = {"role": "user", "content": record["instruction"]}
    if record.get("input"):
        user["input"] = record["input"]
    system = system_message(record.get("sys_prompt"))
    before = (
        {"role": role, "content": text}
        for pair in record.get("history", ())
        for role, text in zip(("user", "assistant"), pair, strict=True)
    )
    return Question(text=record["instruction"], messages=(*system, *before, user))


def system_message(text: str | None) -> tuple[Message, ...]:
    """The message that a conversation begins with, if there is one."""
    return () if text is None else ({"role": "system", "content": text},)


def prompt_text(question: Question, template: ChatTemplate, system: str | None = None) -> str:
    """A conversation as the text that its answer follows.

    Args:
        question: with messages.
        template: how conversations are written.
        system: said first, where the conversation does not begin with something of the kind.

    Raises:
        UserError: the template does not take it.
    """
    messages = question.messages
    if messages[0]["role"] != "system":
        messages = (*system_message(system), *messages)
    try:
        return template.render(messages, tools=question.tools, add_generation_prompt=True)
    except TemplateRefusal as refusal:
        raise UserError(
            f"The chat template {template.name} does not take this conversation: {refusal}. "
            "Try another --chat_template."
        ) from None


def with_input(question: Question, template: ChatTemplate) -> Question:
    """The question with its input below the instruction, if the template has no place for it.

    Args:
        question: with messages.
        template: how conversations are written.

    Raises:
        UserError: the template does not take it.
    """
    *before, last = question.messages
    if "input" not in last:
        return question
    without = {key: value for key, value in last.items() if key != "input"}
    bare = dataclasses.replace(question, messages=(*before, without))
    if prompt_text(bare, template) != prompt_text(question, template):
        return question
    user = without | {"content": f"{last['content']}\n\n{last['input']}"}
    return dataclasses.replace(question, messages=(*before, user))


def check_system(template: ChatTemplate, system: str) -> None:
    """Refuse a system message that would be left out.

    Raises:
        UserError: the template has no place for it.
    """
    question = Question(text="a", messages=({"role": "user", "content": "a"},))
    if prompt_text(question, template, system) == prompt_text(question, template):
        raise UserError(
            f"--system: the chat template {template.name} leaves out what the system says. "
            "Leave out --system, or try another --chat_template."
        )
