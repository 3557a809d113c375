"""Arguments of chat templates: values like enable_thinking, which templates read beside messages.

Those of a run become defaults at the beginning of the template's text. So every program that
renders the template which is kept with a result asks as in training, and may still ask otherwise.
Those of a record are given to each of its renderings, and replace the run's.
"""

import json
import keyword
import math
from collections.abc import Mapping
from typing import Any

ARGUMENTS = "chat_template_kwargs"
"""Key of a record, and option of data, that has arguments; transformers' name."""

_TAKEN = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
"""Variables that ftkit gives to every template."""
_WORDS = frozenset(("true", "false", "none", "loop", "self", "varargs", "kwargs", "caller"))
"""Names with a meaning of their own in Jinja, which Python's keywords lack."""

RULE = "an object of texts, numbers, true, false, or lists and objects of these, by name"
"""What arguments have to be."""


def arguments_problem(arguments: object) -> str | None:
    """Return what is wrong with arguments, or None if they can be used.

    Args:
        arguments: from a recipe or a record.
    """
    if not isinstance(arguments, Mapping):
        return "is not such an object"
    for name, value in arguments.items():
        if not isinstance(name, str) or not _is_name(name):
            return f"has {name!r}, which cannot be the name of a variable"
        if name in _TAKEN or name.endswith("_token"):
            return f"has {name}, which conversation and tokenizer decide"
        if not _is_plain(value):
            return f"has a value that JSON does not have under {name}"
    return None


def given_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments without those that are null: tables give each record every name."""
    return {name: value for name, value in arguments.items() if value is not None}


def with_defaults(source: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of a template with default values of variables.

    Args:
        source: of the template.
        arguments: without problems, and without null.
    """
    defaults = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}"
        for name, value in arguments.items()
    )
    # The line end belongs to the block before it (trim_blocks). It makes the template begin a line,
    # as it does without defaults.
    return f"{defaults}\n{source}" if defaults else source


def _is_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name) and name not in _WORDS


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)


def _literal(value: Any) -> str:
    """A value as Jinja writes it."""
    if isinstance(value, Mapping):
        pairs = (f"{_literal(key)}: {_literal(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if value is None:
        return "none"
    # Unescaped: Jinja does not join the two halves of a character beyond U+FFFF.
    return json.dumps(value, ensure_ascii=False)
