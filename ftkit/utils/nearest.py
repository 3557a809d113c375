"""Nearest names: what somebody may have meant who has misspelt one."""

import difflib
from collections.abc import Iterable


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
