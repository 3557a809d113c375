"""Durations and sizes as people write them: 60s, 15min, 2h; 5GB, 24 GiB."""

import re

from ftkit.errors import UserError

SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
"""Bytes of each."""
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(SIZE_UNITS)})")
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


def parse_size(text: str) -> int | None:
    """The bytes of a size, a number with its unit; None: it is none."""
    found = _SIZE.fullmatch(text)
    return int(float(found[1]) * SIZE_UNITS[found[2]]) if found else None
