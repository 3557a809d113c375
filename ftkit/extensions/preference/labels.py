"""Answers with a label that says whether they are desirable, as KTO learns from them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ftkit.data.records.keys import LABEL_KEYS, Refusal, explain_differing, is_empty, short
from ftkit.data.records.record import Record, keys_of
from ftkit.data.records.shapes import PAIR, RecordReader, check_unweighted, is_preference


class LabelReader(RecordReader):
    """Reads records of any shape, each with a label."""

    def _record(self, value: dict[str, Any], row: dict[str, Any]) -> Record:
        if is_preference(row):
            raise Refusal(PAIR.format("answers with a label"))
        desirable = label_of(row)
        rest, others = (
            {key: item for key, item in of.items() if key not in LABEL_KEYS} for of in (row, value)
        )
        is_first = self._form is None
        # Without the label, for which other objectives refuse a record.
        record = super()._record(others, rest)
        if is_first and self._form is not None:
            keys = f"{self._form.keys}, {next(key for key in LABEL_KEYS if key in row)}"
            self._form = dataclasses.replace(self._form, keys=keys)
        check_unweighted(rest, [record], "an answer with a label counts as a whole")
        return record | {"target": [int(desirable)]}


def label_text(target: Sequence[float]) -> str:
    """Return the label of an answer in words, given its target."""
    return "desirable" if target[0] else "undesirable"


def label_of(row: Mapping[str, Any]) -> bool:
    """Return whether the answer of a record is desirable, by its label.

    Raises:
        Refusal: it has no label, two that differ, or one that is neither true nor false.
    """
    found = {key: row[key] for key in LABEL_KEYS if not is_empty(row.get(key))}
    if not found:
        raise Refusal(
            f" has no label; its keys: {keys_of(dict(row))}. The objective learns from answers "
            "with a label: true for desirable ones, false for others.\nAdd label."
        )
    for key, value in found.items():
        # Tables may hold 0 and 1; where some are missing, pandas writes 0.0 and 1.0.
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise Refusal(
                f": {key} is {short(value)}, but it says whether the answer is desirable.\n"
                f"Make {key} true or false."
            )
    if len({bool(value) for value in found.values()}) > 1:
        raise Refusal(explain_differing(found, "", bool))
    return bool(next(iter(found.values())))
