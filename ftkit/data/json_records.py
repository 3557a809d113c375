"""JSON and JSON Lines files of records with instruction, input and output."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ftkit.errors import UserError

Record = dict[str, str]
"""The texts of one example: instruction and output; input and sys_prompt where given."""

ANSWERED = ("instruction", "output")
"""Texts that a record must have to be learned from."""

_RULE = "A record is an object with the texts instruction, output and, if needed, input."


def read_records(file: Path, *, required: Sequence[str] = ANSWERED) -> list[Record]:
    """Read a .json file (a list of records) or a .jsonl file (a record per line).

    A byte order mark, CRLF line ends and empty lines of a .jsonl file are accepted.

    Args:
        file: what to read.
        required: texts that every record must have.

    Raises:
        UserError: with file, place and reason.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}.\n"
            "Save it with the encoding UTF-8."
        ) from None
    except OSError as error:
        raise UserError(
            f"{file} cannot be read: {error.strerror}.\nSet data.json_path to a readable file."
        ) from None
    if not text.strip():
        raise UserError(f"{file} is empty. {_RULE}\nSet data.json_path to a file with records.")
    read = _READERS.get(file.suffix.lower(), _read_list)
    return read(file, text, required)


def as_record(value: object, where: str, required: Sequence[str] = ANSWERED) -> Record:
    """The texts of a record; other keys are dropped.

    Args:
        value: what was read.
        where: file and place, for the error.
        required: texts that it must have.

    Raises:
        UserError: not an object, a text missing or not a text.
    """
    if not isinstance(value, dict):
        raise UserError(f"{where} is {_name_type(value)}. {_RULE}\nCorrect or remove it.")
    record = {}
    for key in ("instruction", "input", "output", "sys_prompt"):
        text = value.get(key)
        if isinstance(text, str):
            _check_encodes(text, key, where)
            record[key] = text
        elif key not in value and key in required:
            keys = ", ".join(str(key) for key in value) or "none"
            raise UserError(f"{where} has no {key}; its keys: {keys}. {_RULE}\nAdd {key}.")
        elif text is not None or key in required:
            raise UserError(
                f"{where}: {key} is {_name_type(text)}. {_RULE}\nMake {key} a text, or remove "
                "the record."
            )
    return record


def _read_list(file: Path, text: str, required: Sequence[str]) -> list[Record]:
    value = _parse(text, f"{file}, ", ".json")
    if not isinstance(value, list):
        raise UserError(
            f"{file} holds {_name_type(value)}, but has to hold a list of records. {_RULE}\n"
            "Put the records between [ and ]."
        )
    if not value:
        raise UserError(f"{file} holds an empty list. {_RULE}\nAdd records.")
    return [as_record(item, f"{file}, record {n}", required) for n, item in enumerate(value, 1)]


def _read_lines(file: Path, text: str, required: Sequence[str]) -> list[Record]:
    if text.lstrip().startswith("["):
        raise UserError(
            f"{file} holds a list, but a .jsonl file has one record per line.\n"
            f"Try renaming it to {file.with_suffix('.json').name}."
        )
    # Not splitlines: it also splits at U+2028 and others, which JSON allows inside texts.
    return [
        as_record(_parse(line, f"{file}, ", ".jsonl", line=n), f"{file}, line {n}", required)
        for n, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]


_READERS: dict[str, Callable[[Path, str, Sequence[str]], list[Record]]] = {
    ".json": _read_list,
    ".jsonl": _read_lines,
}
SUFFIXES = tuple(_READERS)
"""Of files that can be read, in the order in which they are looked for."""


def _parse(text: str, where: str, suffix: str, line: int = 1) -> Any:
    """The JSON value of a text that starts at the given line of its file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {line + error.lineno - 1}, column {error.colno}"
        advice = "Correct it there."
        if suffix == ".json" and error.msg == "Extra data" and text.lstrip().startswith("{"):
            advice = "If it has one record per line, rename it to end in .jsonl."
        raise UserError(f"{where}{place}, is not valid JSON: {error.msg}.\n{advice}") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{where}line {line}, cannot be read: {reason}.\nRemove it.") from None


def _check_encodes(text: str, key: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: {key} is not valid text: character {error.start + 1} is half of a "
            "surrogate pair.\nCorrect or remove the record."
        ) from None


def _name_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
