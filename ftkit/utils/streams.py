"""Standard streams that may be closed, full, or without a reader."""

import io
import os
import sys
from typing import TextIO


def open_standard_streams() -> None:
    """Open standard streams that are closed, as /dev/null.

    Otherwise the next file that is opened would be one of them, and get what is meant for it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free; those below it are open by now.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = open(number, "r" if number == 0 else "w", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class _WatchedOutput(io.TextIOWrapper):
    """Keeps the error of a write that failed."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._stream = stream
        self.failure: OSError | None = None

    def close(self) -> None:
        """Flush: the buffer belongs to the stream."""
        self.flush()

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self.failure = error
            raise


def watched_output(stream: TextIO) -> TextIO:
    """The standard output, of which `failure_of` tells whether all of it was written."""
    # Not one that somebody else has put in its place.
    return _WatchedOutput(stream) if type(stream) is io.TextIOWrapper else stream


def failure_of(stream: TextIO) -> OSError | None:
    """Flush a stream; the error with which output got lost that was not discarded on purpose."""
    failure: OSError | None = getattr(stream, "failure", None)
    try:
        stream.flush()
    except OSError as error:
        failure = error
    if failure is not None:
        discard(stream)
    return failure


def discard(stream: TextIO) -> None:
    """Discard all further output, also what the interpreter flushes at its end.

    See https://docs.python.org/3/library/signal.html#note-on-sigpipe.
    """
    if isinstance(stream, _WatchedOutput):
        stream.failure = None
    try:
        target = stream.fileno()
    except OSError:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, target)
    os.close(nowhere)
