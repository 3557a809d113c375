"""Records of texts: instructions with their outputs, prompts with their completions, documents."""

from collections.abc import Sequence
from typing import Any

from ftkit.data.records.keys import Refusal, history_of, is_empty, is_turns
from ftkit.data.records.record import Misfit, Record, check_text, keys_of, kind_of

INSTRUCTION = ("instruction", "output")
"""Texts that an instruction record must have to be learned from."""

_RULES = {
    "instruction": "A record is an object with the texts instruction, output and, if needed, "
    "input.",
    "completion": "A record is an object with the texts prompt and completion.",
    "text": "A record is an object with a text.",
}
_ALIASES = {
    "instruction": ("question", "query", "problem", "prompt", "input", "inputs"),
    "output": ("answer", "response", "completion", "target", "targets", "solution"),
    "prompt": ("question", "query", "instruction", "input"),
    "completion": ("response", "answer", "output", "target", "targets"),
    "text": ("content", "document", "article", "body"),
}
"""Names that keys have elsewhere."""


def instruction_record(
    row: dict[str, Any], required: Sequence[str] = INSTRUCTION, *, has_history: bool = False
) -> Record:
    """The texts of an instruction record, and the turns before it.

    Args:
        row: what was read.
        required: texts that it must have.
        has_history: whether data.columns names the key that is its history; else a key of that name
            that holds something else is not one.

    Raises:
        Misfit: a text is missing, or is no text.
    """
    record = _texts("instruction", row, required, ("instruction", "input", "output", "sys_prompt"))
    system = row.get("system")
    if isinstance(system, str) and system:
        check_text(system, "system")
        if record.get("sys_prompt") not in (None, "", system):
            raise Refusal(
                " has sys_prompt and system, which differ, but one system prompt alone is used.\n"
                "Keep one of them."
            )
        record["sys_prompt"] = system
    history = row.get("history")
    if not is_empty(history) and (has_history or is_turns(history)):
        record["history"] = history_of(history)
        for pair in record["history"]:
            for text in pair:
                check_text(text, "history")
    return record


def completion_record(row: dict[str, Any], required: Sequence[str]) -> Record:
    """Prompt and completion.

    Raises:
        Misfit: one is missing, or is no text.
    """
    return _texts("completion", row, required, ("prompt", "completion"))


def text_record(row: dict[str, Any]) -> Record:
    """A document.

    Raises:
        Misfit: there is no text.
    """
    return _texts("text", row, ("text",), ("text",))


def columns_for(key: str, row: dict[str, Any]) -> str | None:
    """The option that takes a text from the key that most likely holds it; None: none does."""
    found = next((alias for alias in _ALIASES.get(key, ()) if alias in row), None)
    return found and f"--data.columns.{key} {found}"


def _texts(rule: str, row: dict[str, Any], required: Sequence[str], keys: Sequence[str]) -> Record:
    record = {}
    for key in keys:
        text = row.get(key)
        if isinstance(text, str):
            check_text(text, key)
            record[key] = text
        elif key not in row and key in required:
            option = columns_for(key, row)
            advice = f", or name the key that holds it: {option}" if option else ""
            raise Misfit(
                f" has no {key}; its keys: {keys_of(row)}. {_RULES[rule]}\nAdd {key}{advice}."
            )
        elif text is not None or key in required:
            raise Misfit(
                f": {key} is {kind_of(text)}. {_RULES[rule]}\nMake {key} a text, or remove "
                "the record."
            )
    return record
