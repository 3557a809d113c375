"""Marks of messages: keys that say what of a conversation is learned, and how much.

They are honoured or refused, so that nothing is trained in another way than intended.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ftkit.data.records.keys import (
    ARGUMENT_KEYS,
    LABEL_KEYS,
    MEDIA,
    TEMPLATE_VALUES,
    Refusal,
    check_label,
    explain_differing,
    explain_media,
    is_argument,
    is_empty,
    is_turns,
    short,
    weight_among,
)
from ftkit.data.records.media import kind_of_column
from ftkit.models.chat_templates.arguments import (
    ARGUMENTS,
    RULE,
    arguments_problem,
    given_arguments,
)

_FLAGS = ("train", "loss")
"""Keys of a message or content part that say whether it is trained: 0 or 1, false or true."""
_WEIGHTS = ("weight", "loss_weight", "loss_scale")
"""Keys that say how much its tokens count: 0, 1 or another weight."""
TRAIN_MARKS = (*_FLAGS, *_WEIGHTS)
_OF_MESSAGES = (*MEDIA, *LABEL_KEYS)


def check_beside_messages(row: Mapping[str, Any]) -> None:
    """Refuse a record with a key beside its messages that changes what is meant to be learned.

    Raises:
        Refusal: names the key, and what to do.
    """
    if row.keys().isdisjoint(_BESIDE):
        return
    for key in sorted(_BESIDE & row.keys()):
        if is_empty(row[key]):
            continue
        # A number of an ordinary table, such as a count of images.
        is_media = key in MEDIA and not isinstance(row[key], bool | int | float)
        if is_media and kind_of_column(key) is None:
            raise Refusal(explain_media(key, ""))
        if key == "history" and is_turns(row[key]):
            raise Refusal(
                ": history holds turns beside the messages, and their position is not defined.\n"
                "Put them into the messages, or remove history."
            )


_BESIDE = frozenset((*MEDIA, "history"))


def check_message_keys(turn: Mapping[str, Any], role: str, where: str) -> None:
    """Refuse a message with a key that changes what is meant to be learned from it.

    Raises:
        Refusal: names the key, and what to do.
    """
    if turn.keys().isdisjoint(_OF_MESSAGES):
        return
    for key in _OF_MESSAGES:
        if is_empty(turn.get(key)):
            continue
        if key in MEDIA:
            raise Refusal(explain_media(key, where))
        if role == "assistant":
            check_label(turn[key], key, where)


def unused_of(objects: Iterable[Any], used: frozenset[str], prefix: str) -> Iterator[str]:
    """The keys of messages or content parts that have a value but no use.

    Args:
        objects: messages or parts; anything else is passed over.
        used: keys that are read.
        prefix: before each name.
    """
    for one in objects:
        if isinstance(one, dict) and (others := one.keys() - used):
            named = (key for key in one if key in others and not is_empty(one[key]))
            yield from (f"{prefix}.{key}" for key in named)


def mark_of(turn: Mapping[str, Any], where: str) -> float | None:
    """Return the weight of a message or a part; 0: it is not trained; None: it is not marked.

    Args:
        turn: the message or the part.
        where: its place within the record.

    Raises:
        Refusal: a value is out of range, or two differ.
    """
    if turn.keys().isdisjoint(TRAIN_MARKS):
        return None
    said = {key: turn[key] for key in TRAIN_MARKS if not is_empty(turn.get(key))}
    for key in _FLAGS:
        if key in said and (not isinstance(said[key], int | float) or said[key] not in (0, 1)):
            raise Refusal(
                f"{where}: {key} is {said[key]!r}, but it says whether a text is trained: 0 or 1, "
                f"false or true.\nMake {key} 0 or 1, or write a number as weight."
            )
    weights = {key: value for key, value in said.items() if key in _WEIGHTS}
    weight = weight_among(weights, where) if weights else None
    if len({bool(value) for value in said.values()}) > 1:
        raise Refusal(explain_differing(said, where, bool))
    return next(map(float, said.values()), None) if weight is None else weight


def arguments_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a conversation for its chat template, by name.

    Raises:
        Refusal: they are none, or two differ.
    """
    if row.keys().isdisjoint(ARGUMENT_KEYS):
        return {}
    of_row = {
        key: row[key]
        for key in TEMPLATE_VALUES
        if not is_empty(row.get(key)) and is_argument(row[key], key)
    }
    given = _parsed_arguments(row.get(ARGUMENTS))
    for name, arguments in ((f"{ARGUMENTS} ", given), ("", of_row)):
        if (problem := arguments_problem(arguments)) is not None:
            raise Refusal(
                f": {name}{problem}; arguments of the chat template are {RULE}.\nCorrect it."
            )
    for key, value in of_row.items():
        if given.get(key, value) not in (None, value):
            raise Refusal(
                f" has {key} {short(value)}, but {ARGUMENTS} with {key} {short(given[key])}.\n"
                "Remove one of the two."
            )
    return given_arguments(given) | of_row


def _parsed_arguments(value: Any) -> Any:
    if is_empty(value):
        return {}
    if not isinstance(value, str):
        return value
    # Tables often store objects as JSON text.
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
