"""JSON values: dataclasses into JSON without access tokens, and back."""

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ftkit.redaction import REMOVED, redacted

_SECRET = r"[\w.-]*(?:access_token|hf_token|api_key)"
_SECRET_KEY = re.compile(_SECRET)
_SECRET_FLAG = re.compile(rf"--{_SECRET}")
_SECRET_ASSIGNMENT = re.compile(rf"""({_SECRET}["']?\s*[=:]\s*["']?)[^\s"',}}]+""")


def is_secret(name: str) -> bool:
    """Return whether a key or an option holds an access token, by its name."""
    return _SECRET_KEY.fullmatch(name) is not None


def without_secrets(value: Any) -> Any:
    """A plain value without the keys that hold access tokens, at any depth."""
    if isinstance(value, dict):
        return {k: without_secrets(v) for k, v in value.items() if not is_secret(str(k))}
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def without_tokens(argv: Sequence[str]) -> list[str]:
    """The command line with the values of access tokens replaced."""
    cleaned: list[str] = []
    for argument in argv:
        if cleaned and _SECRET_FLAG.fullmatch(cleaned[-1]):
            cleaned.append(REMOVED)  # the value after a flag such as --hf_token
        else:
            cleaned.append(redacted(_SECRET_ASSIGNMENT.sub(rf"\g<1>{REMOVED}", argument)))
    return cleaned


def for_json(value: Any) -> Any:
    """The value ready for JSON: without tokens, paths as text, numbers finite or None."""
    if isinstance(value, dict):
        return {k: for_json(v) for k, v in value.items() if not is_secret(str(k))}
    if isinstance(value, list | tuple):
        return [for_json(item) for item in value]
    if isinstance(value, float):
        # JSON has neither NaN nor infinity.
        return value if math.isfinite(value) else None
    if isinstance(value, str | Path):
        return redacted(str(value))
    return value


# 35 strict lines instead of pydantic or cattrs, which every command would import. Unknown keys are
# ignored, because files of later versions have more of them.
def from_json(kind: Any, value: Any) -> Any:
    """Convert a value read from JSON to a type; keys that a dataclass lacks are ignored.

    Args:
        kind: a dataclass, list, tuple of one type, dict, union with None, literal, scalar or Any.
        value: as the json module reads it.

    Raises:
        TypeError: it is of another type, or a key is missing.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any or (origin is Literal and value in arguments):
        return value
    if origin in (Union, UnionType):
        if value is None:
            return None
        # Only unions of one type with None occur.
        (kind,) = (argument for argument in arguments if argument is not NoneType)
        return from_json(kind, value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        hints = get_type_hints(kind)
        known = {key: from_json(hints[key], item) for key, item in value.items() if key in hints}
        return kind(**known)
    if origin is list and isinstance(value, list):
        return [from_json(arguments[0], item) for item in value]
    if origin is tuple and isinstance(value, list):
        return tuple(from_json(arguments[0], item) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: from_json(arguments[1], item) for key, item in value.items()}
    # type() and not isinstance: True is an int in Python. JSON writes 1.0 as 1 in some programs.
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is kind:
        return value
    raise TypeError(f"{value!r} is not {getattr(kind, '__name__', kind)}.")
