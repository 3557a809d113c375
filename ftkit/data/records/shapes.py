"""Shapes of records: recognised by the keys of the first one, and kept by all others."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from ftkit.data.records.bad import BadRecords
from ftkit.data.records.conversations import (
    CONVERSATION_KEYS,
    conversation_record,
    prompted_conversation,
    unused_in,
)
from ftkit.data.records.keys import (
    LABEL_KEYS,
    LEAST_WEIGHT,
    MOST_WEIGHT,
    KeyCounter,
    Refusal,
    UnusedKeys,
    check_record_keys,
    history_of,
    is_empty,
    is_record_weight,
    is_turns,
    label_of,
    record_weight,
)
from ftkit.data.records.pairs import ANSWER_KEYS, PAIR_KEYS, pair_rows
from ftkit.data.records.record import (
    Misfit,
    Record,
    Shape,
    check_text,
    has_weights,
    keys_of,
    kind_of,
)
from ftkit.data.records.rows import until_filled, values_of_cells, without_nulls
from ftkit.errors import UserError
from ftkit.models.chat_templates.arguments import ARGUMENTS
from ftkit.recipe.objectives import Preference

INSTRUCTION = ("instruction", "output")
"""Texts that an instruction record must have to be trained on."""

_RULES = {
    "instruction": "A record is an object with the texts instruction, output and, if needed, "
    "input.",
    "completion": "A record is an object with the texts prompt and completion.",
    "text": "A record is an object with a text.",
}
_ALIASES = {
    "instruction": ("question", "query", "problem", "prompt", "input", "inputs"),
    "output": ("answer", "response", "completion", "target", "targets", "solution"),
    "prompt": ("question", "query", "instruction", "input"),
    "completion": ("response", "answer", "output", "target", "targets"),
    "text": ("content", "document", "article", "body"),
}
"""Names of the same keys in other data."""


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
    return record


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
_TOKENS_RULE = (
    "A token sequence has input_ids, and may have labels (the same ids, and -100 where there is no "
    "loss) and weights (a number for each token)."
)


def token_record(row: dict[str, Any]) -> Record:
    """Convert a row to a token sequence.

    Raises:
        Misfit: there are no ids, or labels or weights do not fit them.
    """
    ids, labels, weights = (row.get(key) for key in (INPUT_IDS, LABELS, WEIGHTS))
    # Types themselves, not subclasses: in Python, true is an int.
    if not (isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids)):
        raise Misfit(f": input_ids is no list of token ids. {_TOKENS_RULE}\nCorrect it.")
    for key, values in ((LABELS, labels), (WEIGHTS, weights)):
        if values is not None and (not isinstance(values, list) or len(values) != len(ids)):
            raise Misfit(
                f": {key} has no value for each of {len(ids)} tokens. {_TOKENS_RULE}\nCorrect it."
            )
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
                    f"labels are not shifted. {_TOKENS_RULE}\nCorrect it."
                )
    return {INPUT_IDS: ids, WEIGHTS: of_tokens}


def columns_for(key: str, row: dict[str, Any]) -> str | None:
    """Suggest the option that reads a text from another key; None: no key is likely."""
    found = next((alias for alias in _ALIASES.get(key, ()) if alias in row), None)
    return found and f"--data.columns.{key} {found}"


def _texts(rule: str, row: dict[str, Any], required: Sequence[str], keys: Sequence[str]) -> Record:
    record = {}
    for key in keys:
        text = row.get(key)
        if isinstance(text, str):
            check_text(text, key)
            record[key] = text
        elif key not in row and key in required:
            option = columns_for(key, row)
            advice = f", or name the key that holds it: {option}" if option else ""
            raise Misfit(
                f" has no {key}; its keys: {keys_of(row)}. {_RULES[rule]}\nAdd {key}{advice}."
            )
        elif text is not None or key in required:
            raise Misfit(
                f": {key} is {kind_of(text)}. {_RULES[rule]}\nMake {key} a text, or remove "
                "the record."
            )
    return record


COLUMNS: dict[str, tuple[str, ...]] = {
    "instruction": ("instruction", "input", "output", "sys_prompt", "history"),
    "completion": ("prompt", "completion"),
    "messages": ("messages", "tools", "system"),
    "text": ("text",),
    "pair": ("chosen", "rejected"),
}
"""Canonical keys of each shape, as data.columns names them."""
_ROLES = {f"{role}_role": role for role in ("system", "user", "assistant", "tool")}
TURN_COLUMNS = ("role", "content", *_ROLES)
"""What data.columns names inside messages: their keys, and the names of roles."""
_WITH_TURNS = (PAIR_KEYS | {"completion"}) - {"tools", "functions", "system"}
"""Keys of a row that may hold messages."""

KNOWN = (
    "A record has instruction and output, prompt and completion, messages, conversations "
    "(ShareGPT), or text."
)
_DECIDING = frozenset((*INSTRUCTION, *CONVERSATION_KEYS, *COLUMNS["completion"], *COLUMNS["text"]))
"""Keys of a row that decide its shape."""
_BESIDE_MESSAGES = ("tools", "functions", "system", ARGUMENTS)
_NOUNS: dict[Shape, str] = {
    "instruction": "instruction",
    "completion": "completion",
    "messages": "conversation",
    "text": "document",
    "tokens": "token sequence",
}


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
    messages: tuple[str, ...] = ()
    """Keys among them that hold messages."""
    is_pair: bool = False
    """Whether two such records, under chosen and rejected, are one preference pair."""

    def counted(self, count: int) -> str:
        """Count such records in words: "300 conversations (messages)"."""
        return f"{count:,} {self._noun(count)} ({self.keys})"

    @property
    def plural(self) -> str:
        """Noun for such records."""
        return self._noun(2)

    def _noun(self, count: int) -> str:
        ending = "" if count == 1 else "s"
        noun = _NOUNS[self.shape]
        return f"preference pair{ending} of {noun}s" if self.is_pair else f"{noun}{ending}"


_TOKENS = Form(
    shape="tokens",
    keys=INPUT_IDS,
    convert=token_record,
    used=frozenset((INPUT_IDS, LABELS, WEIGHTS)),
)


class RecordReader:
    """Converts rows to canonical records, all in the form of the first."""

    def __init__(
        self,
        columns: Mapping[str, str] | None = None,
        *,
        answered: bool = True,
        preference: Preference | None = None,
        takes_tokens: bool = False,
        keeps_bad: bool = False,
    ) -> None:
        """Take options; the first record decides the form.

        Args:
            columns: their names of keys, by ours.
            answered: whether a record must have its answer.
            preference: how records say which answers are better; None: they do not.
            takes_tokens: whether records may be token ids: these mean nothing without the tokenizer
                that made them.
            keeps_bad: whether bad records are collected as `bad` and no error.
        """
        self._preference, self._takes_tokens = preference, takes_tokens
        self._keeps_bad, self.bad = keeps_bad, BadRecords()
        every = dict(columns or {})
        self._columns = {ours: name for ours, name in every.items() if ours not in TURN_COLUMNS}
        # Names inside messages say nothing about the shape.
        self._of_turns = {ours: name for ours, name in every.items() if ours in TURN_COLUMNS}
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
            first, self._empty = until_filled(rows, _DECIDING)
        records = []
        for number, value in chain(first, rows):
            known = self._form
            try:
                if isinstance(value, Misfit):
                    raise value
                records.append(self._record(value))
            except (Misfit, RecursionError) as error:
                if isinstance(error, Misfit):
                    message = self._explained(error, value)
                else:
                    message, value = ", cannot be read: nested too deeply.\nRemove it.", Misfit("")
                self.bad.add(place(number), message, value)
                self._form = known  # a bad record decides nothing
        if self.bad.count and not self._keeps_bad:
            raise self.bad.refusal(len(records) + self.bad.count, may_skip=False)
        return records

    def values_of_cells(self, row: Any) -> Any:
        """A row of a format in which all values are texts, with what they stand for."""
        return (
            values_of_cells(row, self._columns | self._of_turns) if isinstance(row, dict) else row
        )

    def finish(self, where: str) -> Form:
        """Return the form of the records after all have been read.

        Args:
            where: what they were read from, for errors.

        Raises:
            UserError: there was none, or no record had a key that columns name.
        """
        if self._form is None:
            raise UserError(f"{where} is empty. {KNOWN}\nSet data.path to data with records.")
        for ours, theirs in (self._columns | self._of_turns).items():
            if ours not in self._found:
                what = "role" if ours in _ROLES else "key"
                which = "message" if ours in TURN_COLUMNS else "record"
                raise UserError(
                    f"data.columns.{ours} is {theirs}, but no {which} of {where} has this {what}.\n"
                    f"Correct or remove data.columns.{ours}."
                )
        return self._form

    @property
    def unused(self) -> UnusedKeys:
        """Keys of the records so far that are not used."""
        return self._unused.unused

    def _record(self, value: Any) -> Record:
        row = self._renamed(value)
        if self._preference == "pairs":
            return self._pair(value, row)
        if self._preference == "labels":
            return self._labelled(value, row)
        return self._answer(value, row)

    def _labelled(self, value: dict[str, Any], row: dict[str, Any]) -> Record:
        if _is_preference(row):
            raise Refusal(_PAIR.format("answers with a label"))
        desirable = label_of(row)
        rest, others = (
            {key: item for key, item in of.items() if key not in LABEL_KEYS} for of in (row, value)
        )
        is_first = self._form is None
        # Without the label, for which other objectives refuse a record.
        record = self._answer(others, rest)
        if is_first and self._form is not None:
            keys = f"{self._form.keys}, {next(key for key in LABEL_KEYS if key in row)}"
            self._form = dataclasses.replace(self._form, keys=keys)
        _check_unweighted(rest, [record], "an answer with a label counts as a whole")
        return record | {"desirable": desirable}

    def _answer(self, value: dict[str, Any], row: dict[str, Any]) -> Record:
        if self._form is None and self._takes_tokens and INPUT_IDS in row:
            self._form = _TOKENS
        elif self._form is None:
            decisive = self._decisive(row)
            self._form = recognise(decisive, self._columns, answered=self._answered)
        # The first record decides the form, but a preference pair among the others would be read as
        # an ordinary record, by its chosen answer or by neither.
        elif not self._columns and _is_preference(row):
            raise Refusal(_explain_preference(row))
        shape, named = self._form.shape, bool(self._columns)
        check_record_keys(row, shape, answered=self._answered, named=named)
        record = self._form.convert(row)
        if (weight := record_weight(row)) != 1:
            record["weight"] = weight
        self._count_unused(value, row, record)
        return record

    def _pair(self, value: dict[str, Any], row: dict[str, Any]) -> Record:
        # First, because programs name the keys of pairs differently. A half is an ordinary record.
        halves = pair_rows(row)
        if self._form is None:
            form = recognise(pair_rows(self._decisive(row))[0], {}, answered=True)
            keys = ", ".join(key for key in self._decisive(row) if key in PAIR_KEYS)
            self._form = dataclasses.replace(form, keys=keys, is_pair=True)
        for half in halves:
            # `named`: there is no doubt which of two answers is meant.
            check_record_keys(half, self._form.shape, answered=True, named=True)
        chosen, rejected = map(self._form.convert, halves)
        # What is left beside the answers and the prompt that a half was made of.
        for key, item in halves[0].items():
            if not (key in self._form.used or is_empty(item) or _is_kept(key, item, chosen)):
                self._unused.add(key)
        _check_unweighted(
            row, (chosen, rejected), "the answers of a preference pair are compared as wholes"
        )
        return {"chosen": chosen, "rejected": rejected}

    def _count_unused(self, value: dict[str, Any], row: dict[str, Any], record: Record) -> None:
        assert self._form is not None
        # A key of ours that another one stands for is not read.
        used = (self._form.used - self._columns.keys()) | {*self._columns.values()}
        others = value.keys() - used
        for key in filter(others.__contains__, value) if others else ():
            item = value[key]
            if not (is_empty(item) or is_record_weight(key, item) or _is_kept(key, item, record)):
                self._unused.add(key)
        for key in self._form.messages:
            for name in unused_in(row.get(key), self._columns.get(key, key)):
                self._unused.add(name)

    def _decisive(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row without the keys that only stand in it because a table has such a column."""
        kept = {k: item for k, item in row.items() if k not in self._empty or not is_empty(item)}
        return kept if kept.keys() & (_DECIDING | ANSWER_KEYS) else row

    def _renamed(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Misfit(f" is {kind_of(value)}. {KNOWN}\nCorrect or remove it.")
        row = {
            key: without_nulls(item) if isinstance(item, dict | list) else item
            for key, item in value.items()
        }
        row = self._of_ours(row, self._columns) if self._columns else row
        if not self._of_turns:
            return row
        turns = {key: row[key] for key in _WITH_TURNS if isinstance(row.get(key), list)}
        return row | {key: [self._turn(turn) for turn in of] for key, of in turns.items()}

    def _turn(self, turn: Any) -> Any:
        """A message with our names of its keys and of its role."""
        if not isinstance(turn, dict):
            return turn
        keys = {ours: name for ours, name in self._of_turns.items() if ours not in _ROLES}
        named = self._of_ours(turn, keys)
        # A message has OpenAI's keys or ShareGPT's, not one of each.
        for ours, theirs in (("role", "from"), ("content", "value")) if keys else ():
            if ours not in named and theirs in named:
                named[ours] = named.pop(theirs)
        sender = "role" if "role" in named else "from"
        for ours, name in self._of_turns.items():
            if ours in _ROLES and named.get(sender) == name:
                self._found.add(ours)
                return named | {sender: _ROLES[ours]}
        return named

    def _of_ours(self, value: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
        """An object with our names of the keys that columns name."""
        theirs = columns.values()
        made = {key: item for key, item in value.items() if key not in theirs}
        for ours, name in columns.items():
            if name in value:
                self._found.add(ours)
                made[ours] = value[name]
        return made

    def _explained(self, misfit: Misfit, value: Any) -> str:
        """Explain why a row does not fit; it may have another shape."""
        if isinstance(misfit, Refusal) or misfit is value:
            return str(misfit)
        if columns := self._columns | self._of_turns:
            read = ", ".join(f"{ours} from {theirs}" for ours, theirs in columns.items())
            text, _, advice = str(misfit).partition("\n")
            return f"{text} data.columns takes {read}.\nCorrect data.columns. {advice}"
        if self._form is None or self._preference == "pairs":
            return str(misfit)
        try:
            other = recognise(value, {}, answered=True)
            other.convert(value)
        # Any value may be tried here, also one that no check has seen.
        except (Misfit, AttributeError, TypeError):
            return str(misfit)
        return (
            f" is {_article(other)}, but the first record is {_article(self._form)}.\n"
            "Give each kind as a source of its own: data.sources."
        )


def recognise(row: dict[str, Any], columns: Mapping[str, str], *, answered: bool) -> Form:
    """Recognise the form of records by one of them.

    Args:
        row: a record with our names of keys.
        columns: requested names of keys by ftkit's; they take precedence.
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
    # Prompts for ftkit generate may come without answers.
    required = INSTRUCTION if answered else INSTRUCTION[:1]
    shown = ("instruction", "input", "output", "history")
    return Form(
        shape="instruction",
        keys=", ".join(columns.get(key, key) for key in shown if key in row),
        convert=partial(instruction_record, required=required, has_history="history" in columns),
        # Whether history is used depends on the record: some data keep something else under it.
        used=frozenset(COLUMNS["instruction"]) - {"history"},
    )


def _shape_of(row: dict[str, Any]) -> Shape:
    keys = row.keys()
    if _is_preference(row):
        raise Refusal(_explain_preference(row))
    # Before messages: a record with both texts is an instruction, whatever else it has.
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
    # By the turns, not by the key: either form stands under either name.
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
    # Empty keys are common where a table has columns for several kinds of rows.
    return "chosen" in row and not is_empty(row["chosen"]) and not is_empty(row.get("rejected"))


def _is_kept(key: str, item: Any, record: Record) -> bool:
    """Return whether a key that may hold anything was read into the record."""
    if key in record.get(ARGUMENTS, {}):
        return True
    kept = {"history": "history", "system": "sys_prompt"}.get(key)
    return kept in record and (key == "history" or record["sys_prompt"] == item)


def _check_unweighted(row: Mapping[str, Any], answers: Iterable[Record], why: str) -> None:
    """Refuse weights where they mean nothing."""
    if record_weight(row) not in (0, 1) or any(map(has_weights, answers)):
        raise Refusal(f" has weights, but {why}.\nRemove the weights, or make them 0 or 1.")


_PAIR = (
    " is a preference pair (chosen and rejected), but the objective learns from {}.\n"
    "To learn which of the two is better, train with --objective dpo."
)


def _explain_preference(row: dict[str, Any]) -> str:
    chosen, pair = row["chosen"], _PAIR.format("one answer")
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
