"""Marks of training: what messages and their parts say about whether they are learned."""

from collections.abc import Mapping, Sequence
from typing import Any

from ftkit.records.keys import TRAIN_MARKS, Refusal, is_empty
from ftkit.records.record import Record

UNTRAINED = "untrained"
"""Of a message: characters of its content that carry no loss, [first, end] each, rising."""
_RULE = (
    '{"begin_offset": 0, "end_offset": 4, "train": false}, with the last character that it is for'
)


def train_marks(turn: Mapping[str, Any], role: str, content: str, value: Any, where: str) -> Record:
    """What a message says about its loss: `train`, and `untrained` parts of its content.

    A part that says nothing is learned if its turn is. A turn of which a part says that it is
    learned is one that is.

    Args:
        turn: as it was read.
        role: of the message.
        content: its text.
        value: what the text was made of: itself, or parts.
        where: place within the record, as ", message 2".

    Raises:
        Refusal: a mark is neither 0 nor 1, or is for what is not learned.
    """
    mark = _mark_of(turn, where)
    spans, some_trained = _of_parts(value, where) if isinstance(value, list) else ([], False)
    detail = turn.get("train_detail")
    if not is_empty(detail):
        if isinstance(value, list):
            raise Refusal(
                f"{where} has train_detail, but its content is a list of parts.\nMark the parts "
                "with train instead, and remove train_detail."
            )
        spans, some_trained = _of_detail(detail, content, where)
    if role != "assistant":
        if mark or some_trained:
            raise Refusal(
                f"{where} is to be trained on, but only turns of the assistant are.\n"
                f"Remove {_names(turn)} from it."
            )
        if mark is False and content:
            spans = [[0, len(content)]]
    elif mark is False:
        if some_trained:
            raise Refusal(
                f"{where}: {_names(turn)} says that it is not learned, but a part of it that it "
                "is.\nRemove one of the two."
            )
        return {"train": False}
    elif spans and mark is None and not some_trained and _says_nothing_else(turn, content, spans):
        return {"train": False}
    elif some_trained:
        mark = True
    marks: Record = {"train": True} if mark else {}
    return marks | {UNTRAINED: spans} if spans else marks


def _mark_of(turn: Mapping[str, Any], where: str) -> bool | None:
    """Whether a turn or a part is learned; None: it does not say."""
    said = {key: turn[key] for key in TRAIN_MARKS if not is_empty(turn.get(key))}
    for key, value in said.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise Refusal(
                f"{where}: {key} is {value!r}, but what is said is learned or not: ftkit takes 0 "
                f"and 1, false and true, and no weights in between yet.\nMake {key} 0 or 1."
            )
    if len({bool(value) for value in said.values()}) > 1:
        (key, value), *others = said.items()
        other = next(item for item in others if bool(item[1]) != bool(value))
        raise Refusal(
            f"{where}: {key} is {value}, but {other[0]} is {other[1]}.\nRemove one of the two."
        )
    return next((bool(value) for value in said.values()), None)


def _of_parts(parts: Sequence[Mapping[str, Any]], where: str) -> tuple[list[list[int]], bool]:
    """The characters of untrained parts, and whether some part is to be learned."""
    marks = [_mark_of(part, f"{where}, part {n}") for n, part in enumerate(parts, 1)]
    spans: list[list[int]] = []
    end = 0
    for part, mark in zip(parts, marks, strict=True):
        first, end = end, end + len(part_text(part) or "")
        if mark is False and first < end:
            _add(spans, first, end)
    return spans, True in marks


def part_text(part: Mapping[str, Any]) -> str | None:
    """The text of a content part; None: it has none."""
    texts = (part.get(key) for key in PART_TEXTS)
    return next((text for text in texts if isinstance(text, str)), None)


PART_TEXTS = ("text", "content", "value")
"""Where a content part has its text."""


def _of_detail(detail: Any, content: str, where: str) -> tuple[list[list[int]], bool]:
    """The same of axolotl's train_detail, whose end_offset is a character that counts."""
    spans: list[list[int]] = []
    some_trained, before = False, 0
    for entry in _sorted(detail, where):
        first, last = entry["begin_offset"], entry["end_offset"]
        mark = _mark_of(entry, f"{where}, train_detail")
        if not before <= first <= last < len(content) or mark is None:
            raise Refusal(
                f"{where}: train_detail has {entry}, but each entry is a part of its own of the "
                f"{len(content)} characters: {_RULE}.\nCorrect it, or remove train_detail."
            )
        before = last + 1
        if mark:
            some_trained = True
        else:
            _add(spans, first, before)
    return spans, some_trained


def _sorted(detail: Any, where: str) -> list[dict[str, Any]]:
    entries = detail if isinstance(detail, list) else [detail]
    for entry in entries:
        offsets = (
            [entry.get(key) for key in ("begin_offset", "end_offset")]
            if isinstance(entry, dict)
            else [None]
        )
        if not all(type(offset) is int for offset in offsets):
            raise Refusal(
                f"{where}: train_detail has {entry!r}, but has to be a list of {_RULE}.\n"
                "Correct it, or remove train_detail."
            )
    return sorted(entries, key=lambda entry: entry["begin_offset"])


def _add(spans: list[list[int]], first: int, end: int) -> None:
    """Add a span behind the others, to the last one if it begins where that ends."""
    if spans and spans[-1][1] == first:
        spans[-1][1] = end
    else:
        spans.append([first, end])


def _says_nothing_else(turn: Mapping[str, Any], content: str, spans: list[list[int]]) -> bool:
    """Whether nothing of a turn is left once the untrained characters are gone."""
    rest, done = "", 0
    for first, end in spans:
        rest, done = rest + content[done:first], end
    others = ("tool_calls", "function_call", "reasoning_content", "thinking", "reasoning")
    return not (rest + content[done:]).strip() and all(is_empty(turn.get(key)) for key in others)


def _names(turn: Mapping[str, Any]) -> str:
    """The keys by which a turn says whether it is learned, for people."""
    said = [key for key in (*TRAIN_MARKS, "train_detail") if not is_empty(turn.get(key))]
    return " and ".join(said) or "train"
