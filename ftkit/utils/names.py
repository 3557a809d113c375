"""Names: dotted keys of nested mappings, columns of tables, and the known name nearest to one."""

import difflib
import re
from collections.abc import Collection, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from ftkit.errors import UserError

_UNFIT = re.compile(r'[",\s]+')
"""Characters that column names do not contain."""


def leaves(
    values: dict[str, Any], prefix: str = "", *, whole: Container[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Iterate over all values other than mappings, by dotted keys.

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
    """Make a name fit for a column of a table."""
    return _UNFIT.sub("_", name)


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar, ignoring case; None: none is similar.

    Args:
        name: what was written.
        known: what could have been.
        cutoff: how alike they must be, from 0 (anything) to 1 (equal).
    """
    by_lower = {choice.lower(): choice for choice in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def nearest_directory(name: str) -> str:
    """Suggest a directory with a similar name, as a sentence; "" if there is none."""
    place = Path(name).parent
    there = [str(path) for path in place.iterdir() if path.is_dir()] if place.is_dir() else []
    close = nearest(name, there)
    return f" Did you mean the directory {close}?" if close else ""


def unknown_option(part: str, key: str, name: str, known: Collection[str], none: str) -> UserError:
    """Return the refusal of an option that a component does not have.

    Args:
        part: key of the recipe below which it stands.
        key: the option.
        name: of the component.
        known: its options.
        none: what to do where it has none, as a sentence.
    """
    taken = f"It takes {', '.join(known)}." if known else none
    near = nearest(key, known)
    hint = f" Did you mean --{part}.{near}?" if near else ""
    return UserError(f"{part}.{key} is not an option of {name}. {taken}{hint}")
