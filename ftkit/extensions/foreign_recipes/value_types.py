"""Types of the values in files of other programs, as data, and the check that holds for all.

A type is a text, such as ``number>=0<1`` or ``flag|auto``; a mapping from keys to types, where
``*`` stands for all other keys; a list with the mapping that its entries have; or a tuple of such.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ftkit.errors import UserError
from ftkit.utils.json_values import value_text

Accepts = str | Mapping[str, Any] | list[Any] | tuple[Any, ...]
"""A type as it stands in the row of a key."""

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NUMBER = re.compile(r"(number|whole)(?:(>=?)(-?[\d.]+))?(?:(<=?)([\d.]+))?")
_BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    ">": ("above", lambda value, bound: value > bound),
    ">=": ("of at least", lambda value, bound: value >= bound),
    "<": ("below", lambda value, bound: value < bound),
    "<=": ("of at most", lambda value, bound: value <= bound),
}
_WORDS = {"flag": "true or false", "text": "text (a number in quotes)", "texts": "a list of texts",
          "names": "a list of texts, or a text with commas"}  # fmt: skip


class _Other(Exception):
    """A value is of another type."""


def typed(values: Mapping[Any, Any], accepts: Mapping[str, Accepts], file: str) -> dict[str, Any]:
    """Convert the values of a file to their types; keys without a type stay as they are.

    A number or a flag may also stand as a text, as these programs take it (`2e-5` is a text in
    YAML 1.1). Empty values are left out.

    Args:
        values: by key.
        accepts: types by key.
        file: its name and what it is, for the message.

    Raises:
        UserError: names every value of another type, with its key and what is allowed.
    """
    wrong: list[str] = []
    found = _entries(values, accepts, "", wrong)
    if wrong:
        lines = "\n".join(f"  {line}" for line in wrong)
        raise UserError(f"{file} has values of a wrong type:\n{lines}\nCorrect them in the file.")
    return found


def described(accepts: Accepts) -> str:
    """What a type allows, in words."""
    return " or ".join(dict.fromkeys(map(_word, _alternatives(accepts))))


def _entries(
    values: Mapping[Any, Any], accepts: Mapping[str, Accepts], place: str, wrong: list[str]
) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        key = str(name)  # of YAML: a number, true or empty
        kind = accepts.get(key, accepts.get("*"))
        if value is not None:
            found[key] = value if kind is None else _value(value, kind, f"{place}{key}", wrong)
    return found


def _value(value: Any, accepts: Accepts, place: str, wrong: list[str]) -> Any:
    for kind in _alternatives(accepts):
        if isinstance(kind, Mapping) and isinstance(value, dict):
            return _entries(value, kind, f"{place}.", wrong)
        if isinstance(kind, list) and isinstance(value, list):
            return [_value(item, kind[0], f"{place}[{i}]", wrong) for i, item in enumerate(value)]
        if isinstance(kind, str):
            try:
                return _converted(value, kind)
            except (_Other, ValueError, OverflowError):
                continue
    wrong.append(f"{place}: {value_text(value, place)}: must be {described(accepts)}")
    return None


def _alternatives(accepts: Accepts) -> Iterator[Accepts]:
    if isinstance(accepts, tuple):
        for kind in accepts:
            yield from _alternatives(kind)
    elif isinstance(accepts, str):
        yield from accepts.split("|")
    else:
        yield accepts


def _converted(value: Any, kind: str) -> Any:
    if found := _NUMBER.fullmatch(kind):
        return _number(value, found)
    if kind == "any":
        return value
    if kind == "flag":
        word = str(value).lower()
        if isinstance(value, dict | list) or word not in (*_TRUE, *_FALSE):
            raise _Other
        return word in _TRUE
    if kind == "names" and isinstance(value, str):
        return [name.strip() for name in value.split(",")]
    if kind in ("texts", "names") and isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            return value
        raise _Other
    # Any other kind is a word itself. YAML 1.1 reads `no` as false.
    if isinstance(value, str) and kind in ("text", value):
        return value
    if value is False and kind == "no":
        return kind
    raise _Other


def _number(value: Any, kind: re.Match[str]) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _Other
    given: int | float = float(value) if isinstance(value, str) else value
    if given and not 1e-100 <= abs(given) <= 1e100:  # their products would overflow; also no nan
        raise _Other
    if kind[1] == "whole" and given != int(given):
        raise _Other
    if kind[1] == "whole" or (isinstance(value, str) and given == int(given)):
        given = int(given)
    for sign, bound in ((kind[2], kind[3]), (kind[4], kind[5])):
        if sign and not _BOUNDS[sign][1](given, float(bound)):
            raise _Other
    return given


def _word(kind: Accepts) -> str:
    if isinstance(kind, Mapping):
        return "keys with values"
    if isinstance(kind, list):
        return "a list of entries with keys and values"
    assert isinstance(kind, str)
    found = _NUMBER.fullmatch(kind)
    if found is None:
        return _WORDS.get(kind, kind)
    bounds = [
        f"{_BOUNDS[sign][0]} {bound}"
        for sign, bound in ((found[2], found[3]), (found[4], found[5]))
        if sign
    ]
    noun = "a whole number" if found[1] == "whole" else "a number"
    return " ".join([noun, " and ".join(bounds)]).strip()
