"""JSON values: dataclasses into JSON without access tokens, and back."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ftkit.redaction import REMOVED, is_secret, redacted, shown
from ftkit.utils.finite_numbers import finite
from ftkit.utils.names import leaves

_FLAG = re.compile(r"--[\w.-]+")


def without_secrets(value: Any) -> Any:
    """A plain value without the keys that hold access tokens, at any depth."""
    if isinstance(value, dict):
        return {k: without_secrets(v) for k, v in value.items() if not is_secret(str(k), v)}
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def value_text(value: Any, key: str = "", limit: int = 60) -> str:
    """A value of a file as a message shows it: on one line, short, and without secrets.

    Args:
        value: as YAML or JSON has it.
        key: its key, which may say that it is a secret; dotted.
        limit: most characters.
    """
    hidden = with_secrets_hidden({key.rpartition(".")[2]: value})
    (value,) = hidden.values()
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    line = " ".join(shown(text).split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def with_secrets_hidden(value: Any) -> Any:
    """A plain value with `REMOVED` in the place of every secret, by its key or its form."""
    if isinstance(value, dict):
        return {
            key: REMOVED if isinstance(item, str) and is_secret(str(key), item)
            else with_secrets_hidden(item)
            for key, item in value.items()
        }  # fmt: skip
    if isinstance(value, list):
        return [with_secrets_hidden(item) for item in value]
    return redacted(value) if isinstance(value, str) else value


def secret_keys(values: dict[str, Any]) -> list[str]:
    """Dotted keys of nested values that hold a secret."""
    hidden = dict(leaves(with_secrets_hidden(values)))
    return [key for key, value in leaves(values) if hidden[key] != value]


def without_tokens(argv: Sequence[str]) -> list[str]:
    """The command line with the values of access tokens replaced."""
    cleaned: list[str] = []
    for argument in argv:
        flag = cleaned[-1] if cleaned else ""
        if _FLAG.fullmatch(flag) and is_secret(flag.rpartition(".")[2].lstrip("-"), argument):
            cleaned.append(REMOVED)  # the value after a flag such as --hf_token
        else:
            cleaned.append(redacted(argument))
    return cleaned


def for_json(value: Any) -> Any:
    """The value ready for JSON: without tokens, paths as text, numbers finite or None."""
    if isinstance(value, dict):
        return {k: for_json(v) for k, v in value.items() if not is_secret(str(k), v)}
    if isinstance(value, list | tuple):
        return [for_json(item) for item in value]
    if isinstance(value, float):
        # JSON has neither NaN nor infinity.
        return finite(value)
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
