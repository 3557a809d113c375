"""Progress of long work, and how much a command prints beside its results.

The latter holds for the whole process, and the command line sets it once; ranks and the runs of a
sweep inherit the verbosity of their parent. Errors and warnings are always shown.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TextIO

from ftkit.redaction import redacted

OnProgress = Callable[[int, int], None]
"""Called with the amount done and the total: bytes, parameters, records."""
Verbosity = Literal["full", "child", "quiet"]
"""full: progress, notices, and what to do next. child: the last is left to the parent. quiet: none
of it."""
LATE_S = 2.0
"""Work that takes longer is announced, where it is not visible at once."""

# One setting of the process: every layer shows something, and none has to be given a flag for it.
# run.log has all of it anyway.
_verbosity: Verbosity = "full"


def set_verbosity(verbosity: Verbosity) -> None:
    """Set how much this process prints from now on."""
    global _verbosity
    _verbosity = verbosity


def get_verbosity() -> Verbosity:
    """How much this process prints, for processes that it starts."""
    return _verbosity


def is_quiet() -> bool:
    """Return whether progress and notices are left out."""
    return _verbosity == "quiet"


def gives_advice() -> bool:
    """Return whether commands end with advice on what to do next."""
    return _verbosity == "full"


def print_notice(text: str, stream: TextIO | None = None) -> None:
    """Print what a person may want to know and --quiet leaves out; default: on standard output."""
    if not is_quiet():
        print(redacted(text), file=stream, flush=True)


def next_text(commands: Sequence[str]) -> str:
    """List of next commands, each on a line of its own, to be copied."""
    return "\n  ".join(("next:", *commands))


def print_next(*commands: str) -> None:
    """Print commands that can follow this one."""
    if gives_advice():
        print(next_text(commands), flush=True)


@contextmanager
def announced_if_late(announce: Callable[[], None]) -> Iterator[None]:
    """Call `announce` if the block takes long."""
    late = threading.Timer(LATE_S, announce)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


@contextmanager
def loading_shown(terminal: TextIO) -> Iterator[None]:
    """Show on a terminal that libraries are being loaded, if that takes long.

    On one that cannot erase a line it stays.
    """
    if is_quiet() or not terminal.isatty():
        yield
        return
    announced, erases = False, os.environ.get("TERM", "").lower() not in ("dumb", "unknown")

    def announce() -> None:
        nonlocal announced
        announced = True
        terminal.write("loading libraries ..." + "\n" * (not erases))
        terminal.flush()

    with announced_if_late(announce):
        yield
    if announced and erases:
        terminal.write("\r\x1b[K")
        terminal.flush()
