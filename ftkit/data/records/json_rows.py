"""JSON and JSON Lines files as rows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftkit.data.records.conversations import CONVERSATION_KEYS
from ftkit.data.records.opening import COMPRESSED, lines_of, text_of
from ftkit.data.records.record import keys_of, kind_of
from ftkit.data.records.shapes import KNOWN
from ftkit.errors import UserError


def list_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """The values of a .json file, from 1: a list, or an object that holds one under a key.

    Raises:
        UserError: it is none, or cannot be read.
    """
    text = text_of(file)
    if not text.strip():
        raise UserError(explain_empty(file))
    value = _parse(text, file)
    del text
    values = value if isinstance(value, list) else _list_in(value, file)
    if not values:
        raise UserError(f"{file} holds an empty list. {KNOWN}\nAdd records.")
    for i in range(len(values)):
        row, values[i] = values[i], None  # what is read twice is not held twice
        yield i + 1, row


def line_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """The values of a .jsonl file, each with its line, from 1; empty lines are passed over.

    Raises:
        UserError: a line is no JSON, or the file cannot be read.
    """
    is_empty = True
    for number, line in enumerate(lines_of(file), 1):
        line = line.rstrip("\n")
        if not line.strip():
            continue
        if is_empty and line.lstrip().startswith("["):
            raise UserError(
                f"{file} holds a list, but a .jsonl file has one record per line.\n"
                f"Try renaming it to {_renamed(file, '.json')}."
            )
        is_empty = False
        yield number, _parse(line, file, line=number)
    if is_empty:
        raise UserError(explain_empty(file))


def explain_empty(file: Path) -> str:
    """Why a file without anything in it is refused."""
    return f"{file} is empty. {KNOWN}\nSet data.path to a file with records."


def _list_in(value: Any, file: Path) -> list[Any]:
    """The list of an object that has one under a key, and is no record itself."""
    lists = {}
    if isinstance(value, dict) and not value.keys() & set(CONVERSATION_KEYS):
        lists = {
            key: item
            for key, item in value.items()
            if isinstance(item, list) and item and all(isinstance(row, dict) for row in item)
        }
    if len(lists) == 1:
        return next(iter(lists.values()))
    what = kind_of(value)
    works = "Put the records between [ and ]."
    if lists:
        what = f"lists under the keys {keys_of(lists)}"
        works = "Save each list as a file of its own, such as " + " and ".join(
            str(file.with_name(f"{key}.json")) for key in list(lists)[:2]
        )
    raise UserError(f"{file} holds {what}, but has to hold a list of records. {KNOWN}\n{works}")


def _parse(text: str, file: Path, line: int | None = None) -> Any:
    """The JSON value of a text that starts at the given line of its file; None: it is all of it."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {(line or 1) + error.lineno - 1}, column {error.colno}"
        advice = "Correct it there."
        if error.pos == 0:
            advice = "Correct it there, or rename the file to what it is: .csv, .tsv or .txt."
        if line is None and error.msg == "Extra data" and text.lstrip().startswith("{"):
            advice = "If it has one record per line, rename it to end in .jsonl."
        raise UserError(f"{file}, {place}, is not valid JSON: {error.msg}.\n{advice}") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(
            f"{file}, line {line or 1}, cannot be read: {reason}.\nRemove it."
        ) from None


def _renamed(file: Path, ending: str) -> str:
    packed = file.suffix if file.suffix.lower() in COMPRESSED else ""
    return Path(file.name.removesuffix(packed)).with_suffix(ending).name + packed
