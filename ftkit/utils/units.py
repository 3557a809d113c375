"""Durations as people write them: 60s, 15min, 2h."""

import re

from ftkit.errors import UserError

_SECONDS = {"s": 1, "min": 60, "h": 3600}
_DURATION = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_SECONDS)})")


def parse_duration(text: str, key: str = "checkpoint.save_every") -> float:
    """The seconds of a duration, more than 0.

    Args:
        text: a number with its unit: s, min or h.
        key: what the duration is for, as an option names it.

    Raises:
        UserError: the text is anything else.
    """
    found = _DURATION.fullmatch(text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not seconds:
        raise UserError(
            f"{key} is {text!r}, but must be a number above 0 with s, min or h, such as 60s, 15min "
            f"or 2h. Try --{key} 15min."
        )
    return seconds
