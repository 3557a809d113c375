"""Shapes of records: recognised by the keys of the first one, and kept by all others."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ftkit.data.records.conversations import (
    CONVERSATION_KEYS,
    conversation_record,
    prompted_conversation,
    unused_in,
)
from ftkit.data.records.keys import (
    KeyCounter,
    Refusal,
    UnusedKeys,
    check_record_keys,
    is_empty,
    is_used_weight,
)
from ftkit.data.records.record import Misfit, Record, Shape, keys_of, kind_of
from ftkit.data.records.texts import (
    INSTRUCTION,
    columns_for,
    completion_record,
    instruction_record,
    text_record,
)
from ftkit.errors import UserError

COLUMNS: dict[str, tuple[str, ...]] = {
    "instruction": ("instruction", "input", "output", "sys_prompt", "history"),
    "completion": ("prompt", "completion"),
    "messages": ("messages", "tools", "system"),
    "text": ("text",),
}
"""Keys that each shape of record has, by which data.columns calls them."""

KNOWN = (
    "A record has instruction and output, prompt and completion, messages, conversations "
    "(ShareGPT), or text."
)
_BESIDE_MESSAGES = ("tools", "functions", "system")
_NOUNS: dict[Shape, str] = {
    "instruction": "instruction",
    "completion": "completion",
    "messages": "conversation",
    "text": "document",
}


@dataclass(frozen=True, kw_only=True)
class Form:
    """How the records of a data set are written."""

    shape: Shape
    """What they become."""
    keys: str
    """For people: how they are written, as "instruction, output" or "ShareGPT"."""
    convert: Callable[[dict[str, Any]], Record]
    """The canonical record of a row; raises Misfit."""
    used: frozenset[str]
    """Keys of a row that are read."""
    messages: tuple[str, ...] = ()
    """Those of them that hold messages."""

    def counted(self, count: int) -> str:
        """A number of such records for people: "300 conversations (messages)"."""
        noun = _NOUNS[self.shape] if count == 1 else self.plural
        return f"{count:,} {noun} ({self.keys})"

    @property
    def plural(self) -> str:
        """What such records are called."""
        return f"{_NOUNS[self.shape]}s"


class RecordReader:
    """Makes canonical records of what is read, all in the form of the first."""

    def __init__(self, columns: Mapping[str, str] | None = None, *, answered: bool = True) -> None:
        """Prepare; nothing is known of the form yet.

        Args:
            columns: their names of keys, by ours.
            answered: whether a record must have its answer.
        """
        self._columns = dict(columns or {})
        self._found: set[str] = set()
        self._answered = answered
        self._form: Form | None = None
        self._unused = KeyCounter()

    def records(self, rows: Iterable[tuple[int, Any]], place: Callable[[int], str]) -> list[Record]:
        """The canonical records of rows.

        Args:
            rows: each with its number.
            place: file and place of a row with this number, for errors.

        Raises:
            UserError: one does not fit; names it, and the reason.
        """
        records = []
        for number, value in rows:
            try:
                records.append(self._record(value))
            except Misfit as misfit:
                raise UserError(f"{place(number)}{self._explained(misfit, value)}") from None
        return records

    def finish(self, where: str) -> Form:
        """The form of the records, once all have been read.

        Args:
            where: what they were read from, for errors.

        Raises:
            UserError: there was none, or no record had a key that columns name.
        """
        if self._form is None:
            raise UserError(f"{where} is empty. {KNOWN}\nSet data.path to data with records.")
        for ours, theirs in self._columns.items():
            if theirs not in self._found:
                raise UserError(
                    f"data.columns.{ours} is {theirs}, but no record of {where} has this key.\n"
                    f"Correct or remove data.columns.{ours}."
                )
        return self._form

    @property
    def unused(self) -> UnusedKeys:
        """The keys that records so far have, and of which nothing is known."""
        return self._unused.unused

    def _record(self, value: Any) -> Record:
        row = self._renamed(value)
        if self._form is None:
            self._form = recognise(row, self._columns, answered=self._answered)
        elif not self._columns and _is_preference(row):
            raise Refusal(_explain_preference(row))
        shape, named = self._form.shape, bool(self._columns)
        check_record_keys(row, shape, answered=self._answered, named=named)
        record = self._form.convert(row)
        self._count_unused(value, row, record)
        return record

    def _count_unused(self, value: dict[str, Any], row: dict[str, Any], record: Record) -> None:
        assert self._form is not None
        # A key of ours that another one stands for is not read.
        used = (self._form.used - self._columns.keys()) | {*self._columns.values()}
        others = value.keys() - used
        for key in filter(others.__contains__, value) if others else ():
            item = value[key]
            if not (is_empty(item) or is_used_weight(key, item) or _is_kept(key, item, record)):
                self._unused.add(key)
        for key in self._form.messages:
            for name in unused_in(row.get(key), self._columns.get(key, key)):
                self._unused.add(name)

    def _renamed(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Misfit(f" is {kind_of(value)}. {KNOWN}\nCorrect or remove it.")
        if not self._columns:
            return value
        theirs = self._columns.values()
        row = {key: item for key, item in value.items() if key not in theirs}
        for ours, name in self._columns.items():
            if name in value:
                self._found.add(name)
                row[ours] = value[name]
        return row

    def _explained(self, misfit: Misfit, value: Any) -> str:
        """Why a value is no such record: it may be of another shape."""
        if isinstance(misfit, Refusal):
            return str(misfit)
        if self._columns:
            read = ", ".join(f"{ours} from {theirs}" for ours, theirs in self._columns.items())
            text, _, advice = str(misfit).partition("\n")
            return f"{text} data.columns takes {read}.\nCorrect data.columns. {advice}"
        try:
            other = recognise(value, {}, answered=True)
            other.convert(value)
        except (Misfit, AttributeError, TypeError):
            return str(misfit)
        assert self._form is not None
        return (
            f" is {_article(other)}, but the first record is {_article(self._form)}.\n"
            "Give each kind as a source of its own: data.sources."
        )


def recognise(row: dict[str, Any], columns: Mapping[str, str], *, answered: bool) -> Form:
    """The form of records like this one.

    Args:
        row: a record with our names of keys.
        columns: those that were asked for, by ours: they decide.
        answered: whether a record must have its answer.

    Raises:
        Misfit: no form that can be trained on.
    """
    shape = next((shape for shape, keys in COLUMNS.items() if columns.keys() & set(keys)), None)
    if shape is None:
        shape = _shape_of(row)
    if shape == "messages":
        return _conversations(row, columns)
    if shape == "completion":
        return _completions(row, columns, answered=answered)
    if shape == "text":
        return Form(
            shape="text",
            keys=columns.get("text", "text"),
            convert=text_record,
            used=frozenset(COLUMNS["text"]),
        )
    required = INSTRUCTION if answered else INSTRUCTION[:1]
    shown = ("instruction", "input", "output", "history")
    return Form(
        shape="instruction",
        keys=", ".join(columns.get(key, key) for key in shown if key in row),
        convert=partial(instruction_record, required=required, has_history="history" in columns),
        used=frozenset(COLUMNS["instruction"]) - {"history"},
    )


def _shape_of(row: dict[str, Any]) -> Shape:
    keys = row.keys()
    if _is_preference(row):
        raise Refusal(_explain_preference(row))
    if keys >= set(INSTRUCTION):
        return "instruction"
    if keys & set(CONVERSATION_KEYS):
        return "messages"
    if keys & set(INSTRUCTION):
        return "instruction"
    if keys & {"prompt", "completion"}:
        return "completion"
    if "text" in keys:
        return "text"
    raise Misfit(_explain_unknown(row))


def _conversations(row: dict[str, Any], columns: Mapping[str, str]) -> Form:
    key = next((key for key in CONVERSATION_KEYS if key in row), CONVERSATION_KEYS[0])
    turns = row.get(key)
    first = turns[0] if isinstance(turns, list) and turns else None
    is_sharegpt = isinstance(first, dict) and "from" in first and "role" not in first
    return Form(
        shape="messages",
        keys="ShareGPT" if is_sharegpt else columns.get(key, key),
        convert=partial(conversation_record, key=key),
        used=frozenset((key, *_BESIDE_MESSAGES)),
        messages=(key,),
    )


def _completions(row: dict[str, Any], columns: Mapping[str, str], *, answered: bool) -> Form:
    keys = ", ".join(columns.get(key, key) for key in ("prompt", "completion"))
    if isinstance(row.get("prompt"), list):
        return Form(
            shape="messages",
            keys=keys,
            convert=partial(prompted_conversation, answered=answered),
            used=frozenset((*COLUMNS["completion"], *_BESIDE_MESSAGES)),
            messages=COLUMNS["completion"],
        )
    required = ("prompt", "completion") if answered else ("prompt",)
    return Form(
        shape="completion",
        keys=keys,
        convert=partial(completion_record, required=required),
        used=frozenset(COLUMNS["completion"]),
    )


def _is_preference(row: dict[str, Any]) -> bool:
    return "chosen" in row and not is_empty(row["chosen"]) and not is_empty(row.get("rejected"))


def _is_kept(key: str, item: Any, record: Record) -> bool:
    """Whether a key that may hold anything is one of the record's."""
    kept = {"history": "history", "system": "sys_prompt"}.get(key)
    return kept in record and (key == "history" or record["sys_prompt"] == item)


def _explain_preference(row: dict[str, Any]) -> str:
    chosen = row["chosen"]
    if isinstance(chosen, dict):
        return (
            " is a preference pair (chosen and rejected), which preference optimisation such as "
            "DPO needs; ftkit trains on one answer.\nTo train on the chosen answers alone, put "
            "each into the messages of its record, and remove chosen and rejected."
        )
    if isinstance(chosen, list):
        ours = "completion" if isinstance(row.get("prompt"), list) else "messages"
        works = f"--data.columns.{ours} chosen"
    elif isinstance(row.get("prompt"), str):
        works = "--data.columns.completion chosen"
    elif "instruction" in row:
        works = "--data.columns.output chosen"
    elif question := columns_for("instruction", row):
        works = f"{question} --data.columns.output chosen"
    else:
        works = "--data.columns.text chosen"
    return (
        " is a preference pair (chosen and rejected), which preference optimisation such as DPO "
        "needs; ftkit trains on one answer.\nTo train on the chosen answers alone, try "
        f"{works}."
    )


def _explain_unknown(row: dict[str, Any]) -> str:
    (only, *more) = [*row, ""]
    if not any(more) and (mark := next((mark for mark in ";\t|" if mark in only), None)):
        works = "Name the file .tsv" if mark == "\t" else "Save it with commas between the values"
        return f" has one key, {only!r}, with {mark!r} inside. {KNOWN}\n{works}."
    question, answer = columns_for("instruction", row), columns_for("output", row)
    works = f"{question or '--data.columns.instruction KEY'} "
    works += answer or "--data.columns.output KEY"
    if not answer:
        works = columns_for("text", row) or works
    return (
        f" has no keys of a record that ftkit knows; its keys: {keys_of(row)}. {KNOWN}\n"
        f"Say which keys are meant: {works}."
    )


def _article(form: Form) -> str:
    article = "an" if form.shape == "instruction" else "a"
    return f"{article} {_NOUNS[form.shape]} ({form.keys})"
