"""Names: dotted keys of nested mappings, columns of tables, and the known name nearest to one."""

import difflib
import re
from collections.abc import Container, Iterable, Iterator
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


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that looks most like it, whatever the case; None: none does.

    Args:
        name: what was written.
        known: what could have been.
        cutoff: how alike they must be, from 0 (anything) to 1 (equal).
    """
    by_lower = {choice.lower(): choice for choice in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None
