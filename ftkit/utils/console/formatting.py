"""Numbers, sizes, durations and foreign text, as people write and read them."""

import re
import time
from collections.abc import Callable
from typing import Self

from ftkit.errors import UserError
from ftkit.redaction import printable, shown


def shortened(text: str, limit: int = 240) -> str:
    """The text on one line, cut to the limit."""
    line = " ".join(shown(text).split())
    return line if len(line) <= limit else line[: limit - 4].rstrip() + " ..."


def shortened_within(text: str, limit: int = 240) -> str:
    """The text on one line, with both its ends where it is longer than the limit."""
    line = " ".join(shown(text).split())
    kept = (limit - 5) // 2
    return line if len(line) <= limit else f"{line[:kept].rstrip()} ... {line[-kept:].lstrip()}"


def marked(text: str, *, line_end: str = r"\n") -> str:
    r"""The text on one line, with marks for the white space that readers would not see.

    Line ends are \n, carriage returns \r, tabs \t; other white space at an end of a line, and
    behind white space, is \s. A backslash before one of these letters is doubled.

    Args:
        text: what is shown.
        line_end: what stands for a line end; "\\n\n" keeps the lines apart behind their marks.
    """
    text = re.sub(r"\\(?=[nrts\\])", r"\\\\", text)
    text = printable(text.replace("\t", r"\t").replace("\r", r"\r"))
    lines = (_UNSEEN.sub(lambda found: r"\s" * len(found[0]), line) for line in text.split("\n"))
    return line_end.join(lines)


_UNSEEN = re.compile(r"^\s+|\s+$|(?<=\s)\s+")


def duration_text(seconds: float) -> str:
    """412 ms, 3.2 s, 2 min 10 s, 58 min, 1 h 02 min."""
    # Compared after rounding, so that 0.9996 s is "1.0 s" and not "1000 ms".
    if round(seconds, 3) < 1:
        return f"{seconds * 1000:.0f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02} min"


def clock_text(seconds: float) -> str:
    """0:07, 12:34, 1:02:33."""
    whole = round(seconds)
    minutes, hours = whole // 60 % 60, whole // 3600
    if hours:
        return f"{hours}:{minutes:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"


def age_text(seconds: float) -> str:
    """12 s, 3 min, 5 h, 12 days: how long ago something was, in whole units."""
    whole = max(int(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 2 * 86400:
        return f"{whole // 3600} h"
    return f"{whole // 86400:,} days"


def bytes_text(count: int) -> str:
    """3.2 GiB, 812 MiB, 0.4 MiB, 12 KiB, 208 B."""
    mib = count / 2**20
    if count < 1024:
        return f"{count} B"
    if mib < 0.1:
        return f"{count / 1024:.0f} KiB"
    # Compared after rounding, so that 1023.9 MiB is 1.0 GiB and not 1024 MiB.
    if round(mib) >= 1024:
        return f"{mib / 1024:,.1f} GiB"
    return f"{mib:.0f} MiB" if mib >= 10 else f"{mib:.1f} MiB"


def number_text(value: float) -> str:
    """12,345 from 100 up, three digits below: 98.2, 3.33, 0.0421."""
    # Compared after rounding, so that 99.97 is 100 and not 1e+02.
    if round(abs(value), 1) >= 100:
        return f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def count_text(count: int, noun: str) -> str:
    """1 step, 1,200 steps."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def loss_text(value: float | None) -> str:
    """2.3026; empty: not measured."""
    return "" if value is None else f"{value:.4f}"


def from_to_text(first: float | None, last: float | None, text: Callable[[float], str]) -> str:
    """2.3026 -> 1.4109, or one of them alone if the other is None.

    Args:
        first: the value before.
        last: the value after.
        text: how a value is written.
    """
    return " -> ".join(text(value) for value in (first, last) if value is not None)


def percent_text(fraction: float) -> str:
    """41.2 %, 0.409 %, 0 %, 100 %."""
    return f"{number_text(fraction * 100)} %"


def utc_now() -> str:
    """The time in UTC, ISO 8601, to the second: 2026-11-20T21:30:00Z."""
    return utc_text(time.time())


def utc_text(seconds: float) -> str:
    """A time in seconds since the epoch, as `utc_now` gives it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def exact_utc_text(seconds: float) -> str:
    """A time in seconds since the epoch in UTC, to the millisecond: 2026-11-20T21:30:00.250Z."""
    return f"{utc_text(seconds)[:-1]}.{int(seconds % 1 * 1000):03}Z"


# Read and written here in one spelling; the package humanize only writes.
SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
"""Bytes of each."""
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(SIZE_UNITS)})")
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_DURATION = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_SECONDS)})")


def parse_duration(text: str, key: str = "checkpoint.save_every") -> float:
    """Parse a duration above 0; return its seconds.

    Args:
        text: a number with its unit: s, min or h.
        key: name of the option, for the message.

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
    """Parse a size, a number with its unit; return its bytes, or None if it is not a size."""
    found = _SIZE.fullmatch(text)
    return int(float(found[1]) * SIZE_UNITS[found[2]]) if found else None


class Pictured(str):
    """A text with a small picture, which pages show above it, and terminals not."""

    __slots__ = ("picture",)
    picture: str
    """data: url that holds it; "": there is none."""

    def __new__(cls, text: str, picture: str) -> Self:
        """Join a text and the url of a picture."""
        made = super().__new__(cls, text)
        made.picture = picture
        return made
