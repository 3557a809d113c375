"""Shapes of records: recognised by the keys of the first one, and kept by all others."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ftkit.data.records.bad import BadRecords
from ftkit.data.records.forms import Form, columns_for, form_of
from ftkit.data.records.keys import (
    ANSWER_KEYS,
    CONVERSATION_KEYS,
    KeyCounter,
    Refusal,
    UnusedKeys,
    check_record_keys,
    is_empty,
    is_record_weight,
    record_weight,
)
from ftkit.data.records.media import MEDIA_KINDS, BadMedium, with_references
from ftkit.data.records.record import Misfit, Record, has_weights, keys_of, kind_of
from ftkit.data.records.rows import until_filled, values_of_cells, without_nulls
from ftkit.data.records.shape_rows import (
    CONVERSATION,
    RECORD_SHAPES,
    ShapeRow,
    known_shapes,
    lacks_extension,
    preference_options,
    preference_row,
    shape_row,
)
from ftkit.errors import UserError
from ftkit.recipe.objectives import Preference
from ftkit.utils.registry import imported


def reader_of(
    columns: Mapping[str, str] | None = None,
    *,
    preference: Preference | None = None,
    answered: bool = True,
    takes_tokens: bool = False,
    keeps_bad: bool = False,
) -> "RecordReader":
    """Make the reader of records.

    Args:
        columns: their names of keys, by ours.
        preference: how records say which answers are better; None: they do not.
        answered: as `RecordReader`.
        takes_tokens: as `RecordReader`.
        keeps_bad: as `RecordReader`.

    Raises:
        UserError: the extension that reads such records is missing.
    """
    made: Callable[..., RecordReader] = RecordReader
    if preference is not None:
        options = preference_options(preference)
        made = partial(imported(preference_row(preference).reader_place), **options)
    return made(columns, answered=answered, takes_tokens=takes_tokens, keeps_bad=keeps_bad)


class RecordReader:
    """Converts rows to canonical records, all in the form of the first.

    A subclass makes records that say which answers are better of rows that hold more than one.
    """

    _is_one_answer = True
    """Whether a row may be a record of any shape, as others are."""
    names_files = True
    """Whether rows may name files of this machine; rows that were downloaded may not."""

    def __init__(
        self,
        columns: Mapping[str, str] | None = None,
        *,
        answered: bool = True,
        takes_tokens: bool = False,
        keeps_bad: bool = False,
    ) -> None:
        """Take options; the first record decides the form.

        Args:
            columns: their names of keys, by ours.
            answered: whether a record must have its answer.
            takes_tokens: whether records may be token ids: these mean nothing without the tokenizer
                that made them.
            keeps_bad: whether bad records are collected as `bad` and no error.
        """
        self._takes_tokens = takes_tokens
        self._keeps_bad, self.bad = keeps_bad, BadRecords()
        every = dict(columns or {})
        inside = {name for one in RECORD_SHAPES for name in one.inside}
        self._columns = {ours: name for ours, name in every.items() if ours not in inside}
        # Names inside values say nothing about the shape.
        self._inside = {ours: name for ours, name in every.items() if ours in inside}
        self._deciding = frozenset(key for one in RECORD_SHAPES for key in one.keys)
        self._media_columns = frozenset(key for kind in MEDIA_KINDS for key in kind.columns)
        self._found: set[str] = set()
        self._answered = answered
        self._form: Form | None = None
        self._empty: set[str] = set()
        """Deciding keys that no record has a value for."""
        self._unused = KeyCounter()

    def records(self, rows: Iterable[tuple[Any, Any]], place: Callable[[Any], str]) -> list[Record]:
        """Convert rows to canonical records; `bad` then has those that are none.

        Args:
            rows: each with its number, or what stands for it; a Misfit is a row that cannot be
                read.
            place: file and place of a row with this number, for errors.

        Raises:
            UserError: some do not fit, and they are not kept; names each kind, and the reason.
        """
        rows, self.bad = iter(rows), BadRecords()
        first = list[tuple[Any, Any]]()
        if self._form is None:
            first, self._empty = until_filled(rows, self._deciding)
        records = []
        for number, value in chain(first, rows):
            known = self._form
            try:
                if isinstance(value, Misfit):
                    raise value
                record = self._record(value, self._renamed(value))
                folder = _folder_of(number)
                records.append(with_references(record, folder, names_files=self.names_files))
            except (Misfit, RecursionError) as error:
                if isinstance(error, Misfit):
                    message = self._explained(error, value)
                else:
                    message, value = ", cannot be read: nested too deeply.\nRemove it.", Misfit("")
                file = error.file if isinstance(error, BadMedium) else None
                self.bad.add(place(number), message, value, file)
                self._form = known  # a bad record decides nothing
        if self.bad.count and not self._keeps_bad:
            raise self.bad.refusal(len(records) + self.bad.count, may_skip=False)
        return records

    def values_of_cells(self, row: Any) -> Any:
        """A row of a format in which all values are texts, with what they stand for."""
        return values_of_cells(row, self._columns | self._inside) if isinstance(row, dict) else row

    def finish(self, where: str) -> Form:
        """Return the form of the records after all have been read.

        Args:
            where: what they were read from, for errors.

        Raises:
            UserError: there was none, or no record had a key that columns name.
        """
        if self._form is None:
            raise UserError(
                f"{where} is empty. {known_shapes()}\nSet data.path to data with records."
            )
        for ours, theirs in (self._columns | self._inside).items():
            if ours not in self._found:
                what = "role" if ours.endswith("_role") else "key"
                which = "message" if ours in self._inside else "record"
                raise UserError(
                    f"data.columns.{ours} is {theirs}, but no {which} of {where} has this {what}.\n"
                    f"Correct or remove data.columns.{ours}."
                )
        return self._form

    @property
    def unused(self) -> UnusedKeys:
        """Keys of the records so far that are not used."""
        return self._unused.unused

    def _record(self, value: dict[str, Any], row: dict[str, Any]) -> Record:
        """Convert a row; the first one decides the form.

        Args:
            value: as it was read.
            row: the same with our names of keys.
        """
        if self._form is None:
            self._form = self._recognised(row)
        # The first record decides the form, but a preference pair among the others would be read as
        # an ordinary record, by its chosen answer or by neither.
        elif not self._columns and is_preference(row):
            raise Refusal(_explain_preference(row))
        shape, checked = shape_row(self._form.shape), row
        if shape.takes_media and not self._media_columns.isdisjoint(row):
            checked = {key: row[key] for key in row if key not in self._media_columns}
        named = bool(self._columns)
        check_record_keys(checked, shape.uses, answered=self._answered, named=named)
        record = self._form.convert(row)
        if (weight := record_weight(row)) != 1:
            record["weight"] = weight
        self._count_unused(value, row, record)
        return record

    def _recognised(self, row: dict[str, Any]) -> Form:
        if self._takes_tokens:
            for shape in RECORD_SHAPES:
                if shape.is_of_plugins and shape.claim(row.keys()):
                    return form_of(shape, row, {}, answered=self._answered)
        return recognise(self._decisive(row), self._columns, answered=self._answered)

    def _count_unused(self, value: dict[str, Any], row: dict[str, Any], record: Record) -> None:
        form = self._form
        assert form is not None
        # A key of ours that another one stands for is not read.
        used = (form.used - self._columns.keys()) | {*self._columns.values()}
        others = value.keys() - used
        for key in filter(others.__contains__, value) if others else ():
            item = value[key]
            if not (is_empty(item) or is_record_weight(key, item) or form.keeps(key, item, record)):
                self._unused.add(key)
        for name in form.unused_inside(row, self._columns):
            self._unused.add(name)

    def _decisive(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row without the keys that only stand in it because a table has such a column."""
        kept = {k: item for k, item in row.items() if k not in self._empty or not is_empty(item)}
        return kept if kept.keys() & (self._deciding | ANSWER_KEYS) else row

    def _renamed(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Misfit(f" is {kind_of(value)}. {known_shapes()}\nCorrect or remove it.")
        row = {
            key: without_nulls(item) if isinstance(item, dict | list) else item
            for key, item in value.items()
        }
        if self._columns:
            row, found = with_our_names(row, self._columns)
            self._found |= found
        for shape in RECORD_SHAPES if self._inside else ():
            if shape.inside_place:
                row, found = imported(shape.inside_place)(row, self._inside)
                self._found |= found
        return row

    def _explained(self, misfit: Misfit, value: Any) -> str:
        """Explain why a row does not fit; it may have another shape."""
        if isinstance(misfit, Refusal | BadMedium) or misfit is value:
            return str(misfit)
        if columns := self._columns | self._inside:
            read = ", ".join(f"{ours} from {theirs}" for ours, theirs in columns.items())
            text, _, advice = str(misfit).partition("\n")
            return f"{text} data.columns takes {read}.\nCorrect data.columns. {advice}"
        if self._form is None or not self._is_one_answer:
            return str(misfit)
        try:
            other = recognise(value, {}, answered=True)
            other.convert(value)
        # Any value may be tried here, also one that no check has seen.
        except (Misfit, AttributeError, TypeError):
            return str(misfit)
        return (
            f" is {other.one}, but the first record is {self._form.one}.\n"
            "Give each kind as a source of its own: data.sources."
        )


def _folder_of(number: Any) -> Path | None:
    """Directory of the file of a row, given its number; None: it is of no file."""
    return number[0].parent if isinstance(number, tuple) and isinstance(number[0], Path) else None


def with_our_names(
    value: dict[str, Any], columns: Mapping[str, str]
) -> tuple[dict[str, Any], set[str]]:
    """Return an object with our names of keys, and those of them that it has.

    Args:
        value: any object.
        columns: its names of keys, by ours.
    """
    theirs, found = columns.values(), set[str]()
    made = {key: item for key, item in value.items() if key not in theirs}
    for ours, name in columns.items():
        if name in value:
            found.add(ours)
            made[ours] = value[name]
    return made, found


def recognise(row: dict[str, Any], columns: Mapping[str, str], *, answered: bool) -> Form:
    """Recognise the form of records by one of them.

    Args:
        row: a record with our names of keys.
        columns: requested names of keys by ftkit's; they take precedence.
        answered: whether a record must have its answer.

    Raises:
        Misfit: no form that can be trained on.
    """
    named = next((one for one in RECORD_SHAPES if columns.keys() & set(one.columns)), None)
    return form_of(named or _shape_of(row), row, columns, answered=answered)


def _shape_of(row: dict[str, Any]) -> ShapeRow:
    if is_preference(row):
        raise Refusal(_explain_preference(row))
    shapes = (one for one in RECORD_SHAPES if not one.is_of_plugins)
    best = max(shapes, key=lambda one: one.claim(row.keys()))
    if best.claim(row.keys()):
        return best
    # Last, so that nothing that is installed changes what a record means.
    for other in RECORD_SHAPES.installed:
        of_package = shape_row(other.name)
        if of_package.claim(row.keys()):
            return of_package
    if RECORD_SHAPES.get(CONVERSATION) is None and row.keys() & set(CONVERSATION_KEYS):
        raise Refusal(f" is a conversation, and {lacks_extension(CONVERSATION)}")
    raise Misfit(_explain_unknown(row))


def is_preference(row: Mapping[str, Any]) -> bool:
    """Return whether a row is a preference pair."""
    # Empty keys are common where a table has columns for several kinds of rows.
    return "chosen" in row and not is_empty(row["chosen"]) and not is_empty(row.get("rejected"))


def check_unweighted(row: Mapping[str, Any], answers: Iterable[Record], why: str) -> None:
    """Refuse weights where they mean nothing."""
    if record_weight(row) not in (0, 1) or any(map(has_weights, answers)):
        raise Refusal(f" has weights, but {why}.\nRemove the weights, or make them 0 or 1.")


PAIR = (
    " is a preference pair (chosen and rejected), but the objective learns from {}.\n"
    "To learn which of the two is better, train with --objective dpo."
)
"""Refusal of a preference pair; {} is what the objective learns from."""


def _explain_preference(row: dict[str, Any]) -> str:
    chosen, pair = row["chosen"], PAIR.format("one answer")
    if isinstance(chosen, dict):
        return (
            f"{pair} To train only on the chosen answers, put each into the messages of its "
            "record, and remove chosen and rejected."
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
    return f"{pair} To train only on the chosen answers, try {works}."


def _explain_unknown(row: dict[str, Any]) -> str:
    (only, *more) = [*row, ""]
    if not any(more) and (mark := next((mark for mark in ";\t|" if mark in only), None)):
        works = "Name the file .tsv" if mark == "\t" else "Save it with commas between the values"
        return f" has one key, {only!r}, with {mark!r} inside. {known_shapes()}\n{works}."
    question, answer = columns_for("instruction", row), columns_for("output", row)
    works = f"{question or '--data.columns.instruction KEY'} "
    works += answer or "--data.columns.output KEY"
    if not answer:
        works = columns_for("text", row) or works
    return (
        f" has no keys of a record that ftkit knows; its keys: {keys_of(row)}. {known_shapes()}\n"
        f"Say which keys are meant: {works}."
    )
