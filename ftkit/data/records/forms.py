"""Forms of records: how rows of a data set become canonical records of a shape."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from ftkit.data.records.keys import (
    LEAST_WEIGHT,
    MOST_WEIGHT,
    Refusal,
    history_of,
    is_empty,
    is_turns,
)
from ftkit.data.records.media import MEDIA, column_values, is_column, with_marks
from ftkit.data.records.record import Misfit, Record, Shape, check_text, keys_of, kind_of
from ftkit.data.records.shape_rows import (
    CONVERSATION,
    RECORD_SHAPES,
    ShapeRow,
    lacks_extension,
    shape_row,
)
from ftkit.utils.registry import imported

INSTRUCTION = ("instruction", "output")
"""Texts that an instruction record must have to be trained on."""


def _nothing_inside(row: Mapping[str, Any], columns: Mapping[str, str]) -> Iterable[str]:
    return ()


def _keeps_no_other(key: str, item: Any, record: Record) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Form:
    """How the rows of a data set become canonical records."""

    shape: Shape
    """Shape of the canonical records."""
    keys: str
    """Layout of the rows, for people: "instruction, output" or "ShareGPT"."""
    convert: Callable[[dict[str, Any]], Record]
    """The canonical record of a row; raises Misfit."""
    used: frozenset[str]
    """Keys of a row that are read."""
    keeps: Callable[[str, Any, Record], bool] = _keeps_no_other
    """Whether the value of another key was read into a record."""
    unused_inside: Callable[[Mapping[str, Any], Mapping[str, str]], Iterable[str]] = _nothing_inside
    """The names of keys inside the values of a row that have a value but no use."""
    group: str = ""
    """What several such records are together, for people; "": each stands alone."""

    def counted(self, count: int) -> str:
        """Count such records in words: "300 conversations (messages)"."""
        return f"{count:,} {self._noun(count)} ({self.keys})"

    @property
    def plural(self) -> str:
        """Noun for such records."""
        return self._noun(2)

    @property
    def one(self) -> str:
        """One such record with its keys, for people: "a document (text)"."""
        noun = shape_row(self.shape).noun
        return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun} ({self.keys})"

    def _noun(self, count: int) -> str:
        ending = "" if count == 1 else "s"
        noun = shape_row(self.shape).noun
        return f"{self.group}{ending} of {noun}s" if self.group else f"{noun}{ending}"


def form_of(
    shape: ShapeRow, row: dict[str, Any], columns: Mapping[str, str], *, answered: bool
) -> Form:
    """Return the form of records like a row.

    Args:
        shape: of the records.
        row: with our names of keys.
        columns: requested names of keys, by ours.
        answered: whether a record must have its answer.

    Raises:
        Misfit: it has no form that can be used.
    """
    found: Form = imported(shape.form_place)(row, columns, answered=answered)
    return found


def instruction_form(row: dict[str, Any], columns: Mapping[str, str], *, answered: bool) -> Form:
    """The form of instruction records like a row."""
    # Prompts for ftkit generate may come without answers.
    required = INSTRUCTION if answered else INSTRUCTION[:1]
    shown = ("instruction", "input", "output", "history")
    return Form(
        shape="instruction",
        keys=", ".join(columns.get(key, key) for key in shown if key in row),
        convert=partial(instruction_record, required=required, has_history="history" in columns),
        # Whether history is used depends on the record: some data keep something else under it.
        used=frozenset(shape_row("instruction").columns) - {"history"},
        keeps=_keeps_beside_instruction,
    )


def _keeps_beside_instruction(key: str, item: Any, record: Record) -> bool:
    if is_column(key, record):
        return True
    kept = {"history": "history", "system": "sys_prompt"}.get(key)
    # Placing images may have changed the text of the system prompt.
    is_same = key == "history" or MEDIA in record or record.get("sys_prompt") == item
    return kept in record and is_same


def completion_form(row: dict[str, Any], columns: Mapping[str, str], *, answered: bool) -> Form:
    """The form of completions like a row; where its prompt is a list, that of conversations.

    Raises:
        Misfit: it is a conversation, which nothing here reads.
    """
    if isinstance(row.get("prompt"), list):
        conversation = RECORD_SHAPES.get(CONVERSATION)
        if conversation is None:
            raise Refusal(
                f" has a list of messages as its prompt, and {lacks_extension(CONVERSATION)}"
            )
        found: Form = imported(conversation.prompted_place)(row, columns, answered=answered)
        return found
    return Form(
        shape="completion",
        keys=", ".join(columns.get(key, key) for key in ("prompt", "completion")),
        convert=partial(
            completion_record, required=("prompt", "completion") if answered else ("prompt",)
        ),
        used=frozenset(shape_row("completion").columns),
    )


def text_form(row: dict[str, Any], columns: Mapping[str, str], *, answered: bool) -> Form:
    """The form of documents."""
    return Form(
        shape="text",
        keys=columns.get("text", "text"),
        convert=text_record,
        used=frozenset(shape_row("text").columns),
    )


def tokens_form(row: dict[str, Any], columns: Mapping[str, str], *, answered: bool) -> Form:
    """The form of token sequences."""
    return Form(
        shape="tokens",
        keys=INPUT_IDS,
        convert=token_record,
        used=frozenset((INPUT_IDS, LABELS, WEIGHTS)),
    )


def instruction_record(
    row: dict[str, Any], required: Sequence[str] = INSTRUCTION, *, has_history: bool = False
) -> Record:
    """Convert a row to an instruction record with the turns before it.

    Args:
        row: what was read.
        required: texts that it must have.
        has_history: whether data.columns names the key that is its history; else a key of that name
            that holds something else is not one.

    Raises:
        Misfit: a text is missing, or is not a text.
    """
    record = _texts("instruction", row, required, ("instruction", "input", "output", "sys_prompt"))
    system = row.get("system")
    if isinstance(system, str) and system:
        check_text(system, "system")
        if record.get("sys_prompt") not in (None, "", system):
            raise Refusal(
                " has sys_prompt and system, which differ, but only one system prompt is used.\n"
                "Keep one of them."
            )
        record["sys_prompt"] = system
    history = row.get("history")
    if not is_empty(history) and (has_history or is_turns(history)):
        record["history"] = history_of(history)
        for pair in record["history"]:
            for text in pair:
                check_text(text, "history")
    return _with_media(record, row)


def _with_media(record: Record, row: dict[str, Any]) -> Record:
    """An instruction record with the media of its row, in the order of its conversation."""
    if not column_values(row):
        return record
    named = [key for key in ("instruction", "input", "output") if key in record]
    history = record.get("history", [])
    texts = [record.get("sys_prompt", ""), *chain.from_iterable(history)]
    made, media = with_marks([*texts, *(record[key] for key in named)], row)
    if not media:
        return record
    system, *turns = made[: len(texts)]
    return (
        record
        | ({"sys_prompt": system} if "sys_prompt" in record else {})
        | (
            {"history": [list(pair) for pair in zip(turns[::2], turns[1::2], strict=True)]}
            if history
            else {}
        )
        | dict(zip(named, made[len(texts) :], strict=True))
        | {MEDIA: media}
    )


def completion_record(row: dict[str, Any], required: Sequence[str]) -> Record:
    """Convert a row to a record of prompt and completion.

    Raises:
        Misfit: one is missing, or is not a text.
    """
    return _texts("completion", row, required, ("prompt", "completion"))


def text_record(row: dict[str, Any]) -> Record:
    """Convert a row to a document.

    Raises:
        Misfit: there is no text.
    """
    return _texts("text", row, ("text",), ("text",))


INPUT_IDS, LABELS, WEIGHTS = "input_ids", "labels", "weights"
"""Keys of a token sequence."""
_NO_LABEL = -100


def token_record(row: dict[str, Any]) -> Record:
    """Convert a row to a token sequence.

    Raises:
        Misfit: there are no ids, or labels or weights do not fit them.
    """
    rule = shape_row("tokens").rule
    ids, labels, weights = (row.get(key) for key in (INPUT_IDS, LABELS, WEIGHTS))
    # Types themselves, not subclasses: in Python, true is an int.
    if not (isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids)):
        raise Misfit(f": input_ids is no list of token ids. {rule}\nCorrect it.")
    for key, values in ((LABELS, labels), (WEIGHTS, weights)):
        if values is not None and (not isinstance(values, list) or len(values) != len(ids)):
            raise Misfit(f": {key} has no value for each of {len(ids)} tokens. {rule}\nCorrect it.")
    of_tokens: list[float] = [1.0] * len(ids)
    if weights is not None:
        for weight in weights:
            is_number = isinstance(weight, int | float)
            if not is_number or not (weight == 0 or LEAST_WEIGHT <= weight <= MOST_WEIGHT):
                raise Misfit(
                    f": a weight is {weight!r}, but has to be 0, or a number from {LEAST_WEIGHT:g} "
                    f"to {MOST_WEIGHT:,.0f}.\nCorrect it."
                )
        of_tokens = [float(weight) for weight in weights]
    if labels is not None:
        for place, (one, label) in enumerate(zip(ids, labels, strict=True)):
            if label == _NO_LABEL:
                of_tokens[place] = 0.0
            elif label != one:
                raise Misfit(
                    f": label {place} (counted from 0) is {label!r}, but the token is {one}: "
                    f"labels are not shifted. {rule}\nCorrect it."
                )
    return {INPUT_IDS: ids, WEIGHTS: of_tokens}


def columns_for(key: str, row: dict[str, Any]) -> str | None:
    """Suggest the option that reads a text from another key; None: no key is likely."""
    aliases = (alias for one in RECORD_SHAPES for alias in one.aliases.get(key, ()))
    found = next((alias for alias in aliases if alias in row), None)
    return found and f"--data.columns.{key} {found}"


def _texts(shape: str, row: dict[str, Any], required: Sequence[str], keys: Sequence[str]) -> Record:
    record, rule = {}, shape_row(shape).rule
    for key in keys:
        text = row.get(key)
        if isinstance(text, str):
            check_text(text, key)
            record[key] = text
        elif key not in row and key in required:
            option = columns_for(key, row)
            advice = f", or name the key that holds it: {option}" if option else ""
            raise Misfit(f" has no {key}; its keys: {keys_of(row)}. {rule}\nAdd {key}{advice}.")
        elif text is not None or key in required:
            raise Misfit(
                f": {key} is {kind_of(text)}. {rule}\nMake {key} a text, or remove the record."
            )
    return record
