"""Progress of long work: what is told of it, and how much a command tells beside its results.

The latter holds for the whole process, and the command line sets it once; ranks and the runs of a
sweep are told what their parent was told. Errors and warnings are always shown.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TextIO

from ftkit.redaction import redacted

OnProgress = Callable[[int, int], None]
"""Called with what is done and what there is in all: bytes, parameters, records."""
Verbosity = Literal["full", "child", "quiet"]
"""full: progress, notices, and what to do next. child: the last is left to the parent. quiet: none
of it."""
LATE_S = 2.0
"""What takes longer is told, where it is not seen at once."""

_verbosity: Verbosity = "full"


def set_verbosity(verbosity: Verbosity) -> None:
    """Decide what this process tells from here on."""
    global _verbosity
    _verbosity = verbosity


def get_verbosity() -> Verbosity:
    """What this process tells, for those that it starts."""
    return _verbosity


def is_quiet() -> bool:
    """Whether progress and notices are left out."""
    return _verbosity == "quiet"


def gives_advice() -> bool:
    """Whether the end says what to do next."""
    return _verbosity == "full"


def print_notice(text: str, stream: TextIO | None = None) -> None:
    """Print what a person may want to know and --quiet leaves out; default: on standard output."""
    if not is_quiet():
        print(redacted(text), file=stream, flush=True)


def next_text(commands: Sequence[str]) -> str:
    """What may be done next, each command on a line of its own, to be copied."""
    return "\n  ".join(("next:", *commands))


def print_next(*commands: str) -> None:
    """Print what may be done with what a command has written or found."""
    if gives_advice():
        print(next_text(commands), flush=True)


@contextmanager
def told_if_late(tell: Callable[[], None]) -> Iterator[None]:
    """Tell that something goes on if the block takes long."""
    late = threading.Timer(LATE_S, tell)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


@contextmanager
def loading_shown(terminal: TextIO) -> Iterator[None]:
    """Say on a terminal that libraries are loaded, as long as that takes, if it takes long.

    On one that cannot erase a line it stays.
    """
    if is_quiet() or not terminal.isatty():
        yield
        return
    told, erases = False, os.environ.get("TERM", "").lower() not in ("dumb", "unknown")

    def tell() -> None:
        nonlocal told
        told = True
        terminal.write("loading libraries ..." + "\n" * (not erases))
        terminal.flush()

    with told_if_late(tell):
        yield
    if told and erases:
        terminal.write("\r\x1b[K")
        terminal.flush()


def bars_telling(progress: OnProgress | None, total_bytes: int = 0) -> Any:
    """A class of bars for huggingface_hub, which else draws in spite of --quiet, and in no log.

    Args:
        progress: told of bytes, from any thread; None: nobody is.
        total_bytes: of all that is fetched.
    """
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]  # it has no types
        def __init__(self, *args: Any, **settings: Any) -> None:
            settings.pop("name", None)
            self._counts_bytes = settings.get("unit") == "B"
            super().__init__(*args, **settings | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            if progress is None or not self._counts_bytes or n is None:
                return
            with self.get_lock():
                self.n += n
                progress(int(self.n), total_bytes)

    return Bar
