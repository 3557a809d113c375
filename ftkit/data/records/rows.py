"""Rows of every format as the same values: without the nulls of tables, and with typed cells."""

import json
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any

from ftkit.data.records.keys import (
    ANSWER_KEYS,
    CONVERSATION_KEYS,
    LABEL_KEYS,
    MEDIA,
    RECORD_WEIGHTS,
)
from ftkit.models.chat_templates.arguments import ARGUMENTS

_VALUES = frozenset(
    (
        *(*LABEL_KEYS, *RECORD_WEIGHTS, *MEDIA, *CONVERSATION_KEYS, ARGUMENTS),
        *("history", "tools", "functions", "enable_thinking", "thinking"),
    )
)
"""Keys whose value is not a text, or not always."""
# OpenAI's pairs have their messages below input.
_TEXTS_OR_TURNS = ANSWER_KEYS | {"prompt", "completion", "input"}
"""Keys whose value is a text, or messages."""
_NOTHING: tuple[Any, ...] = (None, "", [], {})


def without_nulls(value: Any) -> Any:
    """A value without the keys of its objects that are null, however deep.

    A table gives every object all keys that any of them has, also where it is written as JSON. A
    null inside JSON text stays: no table fills a text.

    Args:
        value: any JSON value.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    # Lists without objects may be long: token ids.
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return [without_nulls(item) for item in value]
    return value


def values_of_cells(row: Mapping[str, str], columns: Mapping[str, str]) -> dict[str, Any]:
    """A row of a format in which all values are texts, with the values that its cells stand for.

    What is meant as a text stays one: an output 007 does not become 7.

    Args:
        row: texts by the names of their columns.
        columns: their names of keys, by ours.
    """
    ours = {theirs: name for name, theirs in columns.items()}
    senders = {"role", "from", columns.get("role", "role")}
    return {key: _value(cell, ours.get(key, key), senders) for key, cell in row.items()}


def _value(cell: str, key: str, senders: Collection[str]) -> Any:
    if key in _VALUES:
        word = cell.strip().lower()  # pandas writes True, spreadsheets TRUE
        return parsed_cell(word if word in ("true", "false") else cell)
    if key in _TEXTS_OR_TURNS and cell.lstrip().startswith(("[", "{")):
        value = parsed_cell(cell)
        turns = value.get("messages", value) if isinstance(value, dict) else value
        turns = turns if isinstance(turns, list) else [turns]
        # Any other JSON is a text of a record about JSON.
        if turns and all(isinstance(turn, dict) and senders & turn.keys() for turn in turns):
            return value
    return cell


def parsed_cell(cell: str) -> Any:
    """Read a cell as JSON; what is no JSON stays the text."""
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return cell


def until_filled(
    rows: Iterable[tuple[Any, Any]], keys: Set[str]
) -> tuple[list[tuple[Any, Any]], set[str]]:
    """Read rows until each of some keys has a value in one of them: mostly the first row.

    Args:
        rows: each with its number.
        keys: those that count.

    Returns:
        The rows that were read, and the keys that they have without a value in any row.
    """
    read, empty, filled = list[tuple[Any, Any]](), set[str](), set[str]()
    for number, value in rows:
        read.append((number, value))
        if isinstance(value, dict):
            filled |= {key for key in keys if value.get(key) not in _NOTHING}
            empty = (empty | (keys & value.keys())) - filled
            if filled and not empty:
                break
    return read, empty
