"""Queries with a document that answers them and others that do not, or with a label."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ftkit.data.records.forms import text_record
from ftkit.data.records.keys import (
    CONVERSATION_KEYS,
    Refusal,
    check_record_keys,
    is_empty,
    is_record_weight,
    record_weight,
    short,
)
from ftkit.data.records.media import MEDIA
from ftkit.data.records.record import Misfit, Record, keys_of, kind_of
from ftkit.data.records.rows import parsed_cell
from ftkit.data.records.shape_rows import shape_row
from ftkit.data.records.shapes import PAIR, RecordReader, check_unweighted, is_preference, recognise
from ftkit.extensions.chats.conversations import role_of

Turns = list[Any]
Part = str | Turns
"""A query or a document: a text, or messages."""

TEXTS = "texts"
"""Key of a canonical record: its texts or conversations, one for each sequence of its sample."""
QUERY_KEYS = ("query", "anchor", "question", "sentence1")
_POSITIVE = (
    *("positive", "pos", "document", "passage", "answer", "response", "sentence2"),
    "positive_messages",
)
_NEGATIVE = ("negative", "negatives", "neg", "rejected_response", "negative_messages")
_NUMBERED = re.compile(r"negative_([0-9]{1,4})")
_LABEL = ("label", "score")
_MESSAGES = ("positive_messages", "negative_messages")
_LISTS = frozenset((*_POSITIVE, *_NEGATIVE, "documents"))
_RULE = (
    "A record has a query, a document that answers it (positive) and, if needed, others that do "
    "not (negative, negative_1, negative_2, ...); or a label beside the document."
)


class Found(NamedTuple):
    """What a row says, before it is converted."""

    query: Part
    documents: list[Part]
    """The one that answers the query first."""
    label: tuple[str, Any] | None
    """Key and value of a label; None: there is none."""
    keys: tuple[str, ...]
    """Keys that were read."""


class QueryReader(RecordReader):
    """Reads queries with their documents; each record is the texts of one sample.

    A number of negatives that is not known, and whether records have a label, are what the records
    have: those to train on decide them.
    """

    _is_one_answer = False

    def __init__(
        self,
        columns: Mapping[str, str] | None = None,
        *,
        negatives: int | None = None,
        labelled: bool | None = None,
        together: bool = False,
        least: float = 0.0,
        most: float = 1.0,
        **options: bool,
    ) -> None:
        """Take options; the first record decides the form.

        Args:
            columns: their names of keys, by ours.
            negatives: documents of each record that do not answer its query; further ones are left
                out. None: all that a record has.
            labelled: whether a record has one document and a label; None: as records are.
            together: whether a sequence is a query and a document; else each has its own.
            least: smallest label.
            most: largest label.
            **options: as `RecordReader`.
        """
        super().__init__(columns, **options)
        self._negatives, self._labelled, self._together = negatives, labelled, together
        self._least, self._most = least, most

    def values_of_cells(self, row: Any) -> Any:
        made = super().values_of_cells(row)
        if not isinstance(made, dict):
            return made
        ours: dict[str, str] = {theirs: key for key, theirs in self._columns.items()}
        return {key: _value_of_cell(ours.get(key) or key, item) for key, item in made.items()}

    def _record(self, value: dict[str, Any], row: dict[str, Any]) -> Record:
        if is_preference(row):
            raise Refusal(PAIR.format("queries with documents"))
        found = self._found_in(row)
        record: Record = {TEXTS: self._texts(found, row)}
        check_unweighted(row, record[TEXTS], "a query is learned with all of its documents")
        if (weight := record_weight(row)) != 1:
            record["weight"] = weight
        self._count_others(value, found, record)
        if (target := self._target(found)) is not None:
            record["target"] = target
        return record

    def _found_in(self, row: Mapping[str, Any]) -> Found:
        return query_in(row, frozenset(self._columns))

    def _count_others(self, value: dict[str, Any], found: Found, record: Record) -> None:
        """Count keys that are not used."""
        assert self._form is not None
        used = {self._columns.get(key, key) for key in found.keys}
        for key, item in value.items():
            if key in used or is_empty(item) or is_record_weight(key, item):
                continue
            # Of a conversation also its tools, which each of its texts has.
            is_beside = "messages" in record[TEXTS][0] and (
                key in self._form.used or self._form.keeps(key, item, record[TEXTS][0])
            )
            if not is_beside:
                self._unused.add(key)

    def _texts(self, found: Found, row: dict[str, Any]) -> list[Record]:
        wanted, documents = self._negatives, found.documents
        if wanted is not None:
            if len(documents) <= wanted:
                raise Refusal(_too_few(len(documents) - 1, wanted))
            documents = documents[: 1 + wanted]
        rest = {key: item for key, item in row.items() if key not in found.keys}
        is_conversation = not isinstance(documents[0], str)
        if any(isinstance(one, str) is is_conversation for one in documents):
            raise Misfit(
                f": some documents are texts, and others messages. {_RULE}\nWrite all in one form."
            )
        if is_conversation:
            rows = _conversations(found.query, documents, rest, together=self._together)
        else:
            if not isinstance(found.query, str):
                raise Misfit(
                    f": the query is messages, but its documents are texts. {_RULE}\nWrite the "
                    "documents under positive_messages and negative_messages."
                )
            rows = [{"text": text} for text in (found.query, *documents)]
        if self._form is None:
            form = recognise(rows[0], {}, answered=True)
            keys = ", ".join(self._columns.get(key, key) for key in found.keys)
            self._form = dataclasses.replace(form, keys=keys, group="group")
        elif (self._form.shape == "text") is is_conversation:
            raise Misfit(
                f": its documents are {'messages' if is_conversation else 'texts'}, unlike those "
                "of the first record.\nGive each kind as a source of its own: data.sources."
            )
        check_record_keys(rest, shape_row(self._form.shape).uses, answered=True, named=True)
        if not is_conversation:
            made = [*map(text_record, rows)]
            if not self._together:
                return made
            return [made[0] | {"text_pair": one["text"]} for one in made[1:]]
        texts = [*map(self._form.convert, rows)]
        if any(MEDIA in one for one in texts):
            raise Refusal(
                " has images or other media, but queries and documents are learned as texts.\n"
                "Remove the media, or the record."
            )
        return texts

    def _target(self, found: Found) -> list[float] | None:
        if self._labelled is False:
            # A score of a negative that was found by another model is not a label.
            if found.label is not None and (found.label[0] == "label" or len(found.documents) == 1):
                raise Refusal(
                    f" has a label ({found.label[0]}), but the objective learns which document "
                    "answers a query: the first one, whatever its label is.\nRemove the records "
                    f"whose document does not answer, and {found.label[0]} from the others; or "
                    "learn from labels (objective.loss)."
                )
            return None
        if found.label is None:
            if self._labelled is None:
                return None
            raise Refusal(
                f" has no label. The objective learns how well a document answers a query, from "
                f"{self._least:g} to {self._most:g}.\nAdd label."
            )
        key, label = found.label
        if self._labelled is None and (len(found.documents) > 1 and key != "label"):
            return None
        if len(found.documents) > 1:
            raise Refusal(f" has a label ({key}) and negatives.\nRemove one of the two.")
        # Tables may hold true and false.
        is_number = isinstance(label, bool | int | float)
        if not is_number or not self._least <= label <= self._most:
            raise Refusal(
                f": {key} is {short(label)}, but a label is a number from {self._least:g} to "
                f"{self._most:g}.\nCorrect {key}, or remove the record."
            )
        return [float(label)]


def query_in(row: Mapping[str, Any], named: frozenset[str] = frozenset()) -> Found:
    """Return what a row says of a query and its documents.

    Known are the columns of sentence-transformers, FlagEmbedding and ms-swift.

    Args:
        row: with our names of keys.
        named: those that data.columns names, beside which others do not count.

    Raises:
        Misfit: it has no query or no document, or two of one.
    """
    messages = any(not is_empty(row.get(key)) for key in _MESSAGES)
    query_key = one_of(row, (*(CONVERSATION_KEYS if messages else ()), *QUERY_KEYS), named, "query")
    positive_key = one_of(row, _POSITIVE, named, "positive")
    negative_keys = [key for key in _NEGATIVE if not is_empty(row.get(key))]
    numbered = [(int(match[1]), key) for key in row if (match := _NUMBERED.fullmatch(key))]
    negative_keys += [key for _, key in sorted(numbered) if not is_empty(row[key])]
    query = row[query_key]
    if not isinstance(query, str | list):
        raise Misfit(f": {query_key} is {kind_of(query)}. {_RULE}\nMake {query_key} a text.")
    positives = documents_in(row, positive_key)
    if len(positives) > 1:
        raise Misfit(
            f": {positive_key} holds {len(positives)} documents, but a record has one that answers "
            f"its query.\nWrite a record for each, with the same {query_key}."
        )
    negatives = [one for key in negative_keys for one in documents_in(row, key)]
    label = next(((key, row[key]) for key in _LABEL if not is_empty(row.get(key))), None)
    keys = [query_key, positive_key, *negative_keys]
    if label is not None and (not negatives or label[0] == "label"):
        keys.append(label[0])
    return Found(query, [*positives, *negatives], label, tuple(keys))


def one_of(row: Mapping[str, Any], keys: Sequence[str], named: frozenset[str], ours: str) -> str:
    """The one key of a row that has a value."""
    keys = (ours,) if ours in named else keys
    found = [key for key in keys if not is_empty(row.get(key))]
    if not found:
        raise Misfit(
            f" has no {ours}; its keys: {keys_of(dict(row))}. {_RULE}\nAdd {ours}, or say which "
            f"key it is: --data.columns.{ours} KEY."
        )
    if len(found) > 1:
        raise Misfit(
            f" has {found[0]} and {found[1]}, and either may be its {ours}.\nSay which one is "
            f"meant: --data.columns.{ours} {found[0]}."
        )
    return found[0]


def documents_in(row: Mapping[str, Any], key: str) -> list[Part]:
    """The documents under a key: a text, a list of texts, or of lists of messages."""
    value = row[key]
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if all(isinstance(one, dict) for one in value):
            return [value]
        kept = [one for one in value if not is_empty(one)]
        if all(isinstance(one, str) for one in kept) or all(isinstance(one, list) for one in kept):
            return kept
    raise Misfit(
        f": {key} is {short(value)}, but documents are a text, a list of texts, or a list of lists "
        f"of messages. {_RULE}\nCorrect {key}, or remove the record."
    )


def _conversations(
    query: Part, documents: Sequence[Part], rest: dict[str, Any], *, together: bool
) -> list[dict[str, Any]]:
    """Rows of conversations: the query and its documents, or the query with each of them."""
    asked: Turns = [{"role": "user", "content": query}] if isinstance(query, str) else query
    of_documents: list[Turns] = [one for one in documents if isinstance(one, list)]
    if not together:
        return [rest | {"messages": one} for one in (asked, *of_documents)]
    if any(one and role_of(one[0]) == "system" for one in of_documents):
        raise Refusal(
            " has a document that begins with a system message, but it follows its query in one "
            "conversation.\nPut the system message before the query, into messages."
        )
    return [rest | {"messages": [*asked, *one]} for one in of_documents]


def _too_few(count: int, wanted: int) -> str:
    few = "one negative" if count == 1 else f"{count or 'no'} negatives"
    works = f"Try --objective.negatives {count}, or leave" if count else "Leave"
    return (
        f" has {few}, but each query is learned with {wanted} (objective.negatives).\n"
        f"{works} such records out: --data.skip_bad_records true."
    )


def _value_of_cell(key: str, cell: Any) -> Any:
    """The value of a cell of a format in which all are texts."""
    if not isinstance(cell, str):
        return cell
    if key in _LABEL:
        return parsed_cell(cell)
    if key in _LISTS and cell.lstrip().startswith("["):
        value = parsed_cell(cell)
        # Any other JSON is a text of a record about JSON.
        if isinstance(value, list) and (
            all(isinstance(one, str) for one in value)
            or all(isinstance(one, dict | list) for one in value)
        ):
            return value
    return cell


def label_text(target: Sequence[float], **_: Any) -> str:
    """Return the label of a query with a document in words, given its target."""
    return f"{target[0]:g}"
