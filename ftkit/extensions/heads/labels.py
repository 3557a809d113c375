"""Texts, or pairs of texts, with a label: the name of a class, a list of names, or a number."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ftkit.data.records.keys import Refusal, is_empty, short
from ftkit.data.records.record import Misfit, Record, check_text, keys_of, kind_of
from ftkit.data.records.shapes import PAIR, RecordReader, check_unweighted, is_preference
from ftkit.recipe.objectives import ProblemType

_KEYS = ("label", "labels")
"""Keys of a label, of which a record has one."""
_ANSWERS = ("completion", "output", "response", "answer", "messages", "text")
"""Keys beside which a prompt is not the whole text."""
_PAIRS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
)
"""Keys of two texts that are one sequence."""
_SHOWN = 10
"""Classes that a message lists."""


class WholeReader(RecordReader):
    """Reads texts, pairs of texts, conversations and other records."""

    def _record(self, value: dict[str, Any], row: dict[str, Any]) -> Record:
        keys = _pair_in(row)
        if keys is None:
            return super()._record(value, row)
        first, second = (row[key] for key in keys)
        if not isinstance(second, str):
            raise Misfit(
                f": {keys[1]} is {kind_of(second)}, but beside {keys[0]} it is a second text.\n"
                f"Make {keys[1]} a text, or remove it."
            )
        check_text(second, keys[1])
        is_first = self._form is None
        others = ({key: one for key, one in of.items() if key not in keys} for of in (value, row))
        # The second text is left out: the reader of one text would refuse its key.
        rest, alone = next(others), next(others) | {"text": first}
        record = super()._record(rest, alone) | {"text_pair": second}
        if is_first and self._form is not None:
            named = ", ".join(self._columns.get(key, key) for key in keys)
            self._form = dataclasses.replace(self._form, keys=named)
        return record


class ClassReader(WholeReader):
    """Reads texts, conversations and other records, each with a label.

    While the classes are not known, the target is the label itself, which decides them.
    """

    def __init__(
        self,
        columns: Mapping[str, str] | None = None,
        *,
        problem_type: ProblemType | None = None,
        classes: Sequence[str] | None = None,
        **options: bool,
    ) -> None:
        """Take options; the first record decides the form.

        Args:
            columns: their names of keys, by ours.
            problem_type: what labels are; None: they decide it.
            classes: names of the classes; None: they are not known, or there are none.
            **options: as `RecordReader`.
        """
        super().__init__(columns, **options)
        self._problem = problem_type
        self._numbers = {name: number for number, name in enumerate(classes or ())}
        # A number is the place of a class, unless classes are numbers themselves.
        self._counts_places = not any(map(_is_whole, self._numbers))

    def _record(self, value: dict[str, Any], row: dict[str, Any]) -> Record:
        if is_preference(row):
            raise Refusal(PAIR.format("texts with a label"))
        key, label = _label_of(row)
        target = self._target(key, label)
        rest, others = (
            _as_text({name: item for name, item in of.items() if name != key}, self._columns)
            for of in (row, value)
        )
        is_first = self._form is None
        record = super()._record(others, rest)
        if is_first and self._form is not None:
            self._form = dataclasses.replace(self._form, keys=f"{self._form.keys}, {key}")
        check_unweighted(rest, [record], "a text with a label counts as a whole")
        return record | {"target": target}

    def _target(self, key: str, label: Any) -> list[Any]:
        if self._problem == "regression":
            return [_number(key, label)]
        if self._problem == "single_label_classification":
            if isinstance(label, list):
                raise Refusal(
                    f": {key} is {short(label)}, but the objective learns one class of each "
                    f"text.\nMake {key} one of them, or learn all with --objective.problem_type "
                    "multi_label_classification."
                )
            return [self._place(key, label)]
        if not self._numbers:
            # Of a number nothing is known before the others.
            if self._problem is not None or not is_fraction(label):
                class_names(key, label)
            return [label]
        places = [self._place(key, one) for one in _several(key, label)]
        return [float(place in places) for place in range(len(self._numbers))]

    def _place(self, key: str, label: Any) -> Any:
        name = class_name(key, label)
        if not self._numbers:
            return label
        place = self._numbers.get(name)
        if place is None and self._counts_places and _is_whole(name):
            place = int(name) if int(name) < len(self._numbers) else None
        if place is None:
            first = ", ".join([*self._numbers][:_SHOWN])
            more = len(self._numbers) - _SHOWN
            further = f" and {more:,} more" if more > 0 else ""
            raise Refusal(
                f": {key} is {short(label)}, which is none of the classes: {first}{further}. "
                "Classes are those of the training data, or objective.classes.\n"
                f"Correct {key}, or name all classes: --objective.classes."
            )
        return place


def _pair_in(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Keys of the two texts of a row; None: it has one, or is of another shape."""
    given = {key for key, value in row.items() if not is_empty(value)}
    if given & {key for key in _ANSWERS if key != "text"}:
        return None
    found = next((keys for keys in _PAIRS if given >= {*keys}), None)
    return None if found is None or ("text" in given and "text" not in found) else found


def class_name(key: str, label: Any) -> str:
    """Return the name of the class that a label is.

    Args:
        key: of the label, for errors.
        label: one, not a list.

    Raises:
        Refusal: it is neither a name nor a whole number.
    """
    if isinstance(label, bool):
        return str(label).lower()
    # Where some are missing, pandas writes 1.0 for 1.
    if isinstance(label, int) or (isinstance(label, float) and label.is_integer()):
        return str(int(label))
    if isinstance(label, str) and label.strip():
        return label
    advice = f"Make {key} a name or a whole number"
    if isinstance(label, float) and math.isfinite(label):
        advice += ", or learn numbers with --objective.problem_type regression"
    raise Refusal(f": {key} is {short(label)}, but a class is a name or a whole number.\n{advice}.")


def class_names(key: str, label: Any) -> list[str]:
    """Return the names of the classes that a label is: one, or those of a list.

    Raises:
        Refusal: as `class_name`, or a name is there twice.
    """
    return [class_name(key, one) for one in _several(key, label)]


def label_text(
    target: Sequence[float], problem_type: ProblemType, classes: Sequence[str] | None
) -> str:
    """Return the label of a text in words, given its target."""
    if problem_type == "regression":
        return f"{target[0]:g}"
    assert classes is not None
    if problem_type == "single_label_classification":
        return classes[int(target[0])]
    return " + ".join(name for name, is_so in zip(classes, target, strict=True) if is_so) or "none"


def _label_of(row: Mapping[str, Any]) -> tuple[str, Any]:
    """The key of the label of a record, and the label."""
    # A list without names is a label: the text has none of the classes.
    found = [key for key in _KEYS if not is_empty(row.get(key)) or row.get(key) == []]
    if not found:
        raise Refusal(
            f" has no label; its keys: {keys_of(dict(row))}. The objective learns the classes of "
            "texts, or numbers.\nAdd label, or say which key it is: --data.columns.label KEY."
        )
    if len(found) > 1:
        raise Refusal(" has label and labels.\nRemove one of the two.")
    return found[0], row[found[0]]


def _several(key: str, label: Any) -> list[Any]:
    several = label if isinstance(label, list) else [label]
    if len({*map(str, several)}) < len(several):
        raise Refusal(
            f": {key} is {short(label)}, which names a class twice.\nList the names of the classes "
            "that the text has, each once."
        )
    return several


def _number(key: str, label: Any) -> float:
    is_number = isinstance(label, int | float) and not isinstance(label, bool)
    # Above it, the square of a difference is infinite in float32.
    if not is_number or not abs(label) <= 1e18:
        raise Refusal(
            f": {key} is {short(label)}, but the objective learns numbers (objective.problem_type "
            f"is regression).\nMake {key} a finite number, or remove the record."
        )
    return float(label)


def is_fraction(label: Any) -> bool:
    """Return whether a label is a number that is not whole, and so names no class."""
    return isinstance(label, float) and math.isfinite(label) and not label.is_integer()


def _is_whole(name: str) -> bool:
    return is_number(name) and not name.startswith("-")


def is_number(name: str) -> bool:
    """Return whether the name of a class is a whole number."""
    digits = name.removeprefix("-")
    # Others are too long to be counted with.
    return digits.isascii() and digits.isdigit() and len(digits) < 19


def _as_text(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A record whose text is a prompt without an answer, as one with a text or with messages."""
    has_answer = not all(is_empty(row.get(key)) for key in _ANSWERS)
    if is_empty(row.get("prompt")) or has_answer or columns.keys() - {"label"}:
        return row
    ours = "text" if isinstance(row["prompt"], str) else "messages"
    return {ours if key == "prompt" else key: item for key, item in row.items() if key != ours}
