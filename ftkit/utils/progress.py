"""Progress of long work, and the verbosity of a command: what it prints beside its results.

The command line sets the verbosity once for the whole process; ranks and the runs of a sweep
inherit that of their parent. Errors and warnings are always shown.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal, TextIO

from ftkit.redaction import shown

OnProgress = Callable[[int, int], None]
"""Called with the amount done and the total: bytes, parameters, records."""
Verbosity = Literal["full", "child", "quiet"]
"""full: progress, notices and next commands. child: the last are left to the parent. quiet: none of
these."""
LATE_S = 2.0
"""Work that takes longer is announced, unless it is shown from its start."""

# One setting of the process, because every layer prints and none has to be passed a flag. run.log
# has everything in any case.
_verbosity: Verbosity = "full"


def set_verbosity(verbosity: Verbosity) -> None:
    """Set how much this process prints from now on."""
    global _verbosity
    _verbosity = verbosity


def get_verbosity() -> Verbosity:
    """Return the verbosity of this process, for processes that it starts."""
    return _verbosity


def is_quiet() -> bool:
    """Return whether progress and notices are left out."""
    return _verbosity == "quiet"


def gives_advice() -> bool:
    """Return whether commands end with advice on what to do next."""
    return _verbosity == "full"


def print_shown(text: str = "", stream: TextIO | None = None) -> None:
    """Print a text that may hold names, paths or values of files, by default on standard output."""
    print(shown(text), file=stream, flush=True)


def print_notice(text: str, stream: TextIO | None = None) -> None:
    """Print a notice, on standard output by default, unless --quiet leaves it out."""
    if not is_quiet():
        _print_aside(text, stream)


def next_text(commands: Sequence[str]) -> str:
    """The next commands, each on a line of its own, to be copied."""
    return "\n  ".join(("next:", *commands))


def print_next(*commands: str) -> None:
    """Print commands that can follow this one."""
    if gives_advice():
        _print_aside(next_text(commands))


def _print_aside(text: str, stream: TextIO | None = None) -> None:
    """Print what is no result: where it cannot be written, the work goes on."""
    with suppress(OSError):
        print_shown(text, stream)


@contextmanager
def announced_if_late(announce: Callable[[], None]) -> Iterator[None]:
    """Call `announce` if the block takes long."""
    late = threading.Timer(LATE_S, announce)
    late.daemon = True  # a process that ends meanwhile does not wait for it
    late.start()
    try:
        yield
    finally:
        late.cancel()


@contextmanager
def loading_shown(terminal: TextIO) -> Iterator[None]:
    """Show on a terminal that libraries are being loaded, if that takes long.

    The line is erased at the end, except on terminals that cannot do so.
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
