"""Names: dotted keys of nested mappings, as recipes and command lines have them; columns."""

import re
from collections.abc import Container, Iterator
from typing import Any

_UNFIT = re.compile(r'[",\s]+')
"""What a name of a column does not contain."""


def leaves(
    values: dict[str, Any], prefix: str = "", *, whole: Container[str] = ()
) -> Iterator[tuple[str, Any]]:
    """All values that are no mapping, by their dotted keys.

    Args:
        values: nested mappings.
        prefix: before every key, with its dot.
        whole: dotted keys of mappings that are values themselves.
    """
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path not in whole:
            yield from leaves(value, f"{path}.", whole=whole)
        else:
            yield path, value


def column_name(name: str) -> str:
    """A name as columns of tables have it."""
    return _UNFIT.sub("_", name)
