"""Canonical records: their shapes, and checks of their values."""

import json
from itertools import islice
from typing import Any

Record = dict[str, Any]
"""One example in canonical form: JSON values, made when data is read and never changed."""

Shape = str
"""Kind of a record, a name in `ftkit.data.records.shape_rows.RECORD_SHAPES`. Of ours, instruction
has instruction, output and, if needed, input and sys_prompt. completion: prompt and completion,
taken as they are. messages: a conversation and, if needed, its tools. text: a document, every token
of which is learned. tokens: token ids and, if needed, the weight of the loss of each; only a plugin
gives these."""

_MOST_KEYS = 20
"""Most keys in a message."""


class Misfit(Exception):
    """A value is not a record; the message completes a sentence that begins with its place.

    Where it stands for a row, the row cannot be read.
    """

    def __init__(self, message: str, row: str = "") -> None:
        """Take the message and, of a row that cannot be read, its text."""
        super().__init__(message)
        self.row = row


def has_weights(record: Record) -> bool:
    """Return whether some text of a canonical record has a weight other than 0 and 1."""
    weights = [record.get("weight", 1), *record.get("weights", ())]
    for message in record.get("messages", ()):
        weights += [message.get("weight", 1), *(span[2] for span in message.get("spans", ()))]
    return any(weight not in (0, 1) for weight in weights)


def check_text(text: str, key: str, where: str = "") -> None:
    """Refuse text that cannot be encoded.

    Args:
        text: any.
        key: whose text it is.
        where: place within the record, as ", message 2".

    Raises:
        Misfit: it holds half of a surrogate pair.
    """
    try:
        # JSON can escape half of a surrogate pair, which Python reads and no tokenizer encodes.
        text.encode()
    except UnicodeEncodeError as error:
        raise Misfit(
            f"{where}: {key} is not valid text: character {error.start + 1} is half of a "
            "surrogate pair.\nCorrect or remove the record."
        ) from None


def check_json(value: object, key: str, where: str = "") -> None:
    """Refuse a value that JSON does not have, such as a date of a table.

    Args:
        value: any.
        key: whose value it is.
        where: place within the record, as ", message 2".

    Raises:
        Misfit: it holds one, or text that cannot be encoded.
    """
    try:
        # Unescaped, so that all texts inside are checked at once.
        text = json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise Misfit(
            f"{where}: {key} holds a value that JSON does not have: {error}.\n"
            "Make it a text, or remove the record."
        ) from None
    check_text(text, key, where)


def kind_of(value: object) -> str:
    """Name the type of a JSON value: a list, a number."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    # By type and not isinstance: bool is an int.
    return names.get(type(value), type(value).__name__)


def keys_of(row: dict[str, Any]) -> str:
    """List the keys of an object, for messages."""
    shown = ", ".join(map(str, islice(row, _MOST_KEYS)))
    return (shown or "none") + (" ..." if len(row) > _MOST_KEYS else "")
