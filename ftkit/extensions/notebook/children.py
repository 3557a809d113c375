"""Commands as child processes: their progress is shown, and their errors are raised here."""

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from ftkit.errors import DoesNotFit, UserError
from ftkit.extensions.notebook import display
from ftkit.recipe.parsing import as_text
from ftkit.utils.process import PassingOn, start_command
from ftkit.utils.progress import LATE_S

_POLL_S = 0.2


_RETURNED = ("format", "out")
"""Options for how and where a command writes its result; in Python it is returned."""


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line, without those that are None or False.

    Raises:
        UserError: an option says how the command writes its result.
    """
    words = []
    for key, value in options.items():
        if key in _RETURNED:
            raise UserError(
                f"{key} is an option of the command line only: in Python the result is returned. "
                "Leave it out, and write the returned value yourself."
            )
        if value is True:
            words.append(f"--{key}")
        elif value is not None and value is not False:
            # Values of other types are written as a recipe has them.
            words.append(f"--{key}={os.fspath(value) if _is_path(value) else as_text(value, key)}")
    return words


def output_of(words: Sequence[str]) -> str:
    """Run a command and return what it writes to standard output.

    Raises:
        UserError: it refuses to run; the message says why.
        KeyboardInterrupt: it was interrupted.
        RuntimeError: it failed.
    """
    with tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as said:
        with PassingOn(signal.SIGINT) as signals:
            child = start_command(words, said, result=result)
            signals.to(child)
            show_progress(f"ftkit {words[0]}", lambda: _has_ended(child), said)
        if child.returncode:
            raise failure(printed(said), child.returncode)
        return printed(result)


def show_progress(what: str, is_done: Callable[[], bool], said: IO[bytes]) -> None:
    """Show the last line that a command has printed until it is done.

    Args:
        what: shown while the command is loading libraries and has printed nothing yet.
        is_done: returns whether to end; called in a loop, so it should wait a moment.
        said: file that the command writes to.
    """
    # Libraries take seconds to load before the command prints its first line.
    place, shown, late_s = display.place(), "", time.monotonic() + LATE_S
    while not is_done():
        # What follows "ftkit: " is an error, which becomes an exception.
        progress, _, _ = printed(said).partition("ftkit: ")
        # The text after the last line end is not complete yet.
        *_, last = ["", *progress.split("\n")[:-1]]
        if not last and time.monotonic() > late_s:
            last = f"{what} ..."
        if last != shown:
            place.say(last)
            shown = last
    if shown:
        place.say("")


def failure(said: str, code: int) -> BaseException:
    """Return the error of a command that failed.

    Args:
        said: everything it has printed.
        code: its exit code.
    """
    if (refused := refusal(said, code)) is not None:
        return refused
    if code == 128 + signal.SIGINT:
        return KeyboardInterrupt()
    return RuntimeError(f"ftkit ended with exit code {code}:\n{said}")


def _has_ended(child: "subprocess.Popen[bytes]") -> bool:
    try:
        child.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


_REFUSAL = re.compile(r"(?:.*^)?ftkit: (.*)\Z", re.MULTILINE | re.DOTALL)
"""The message of a command that refuses to run: its last line that begins with ftkit."""


def printed(output: IO[bytes]) -> str:
    """Return what a command has printed to a file so far."""
    # With pread, because the command shares the position in the file and continues writing.
    descriptor = output.fileno()
    text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    return text.decode(errors="replace")


def refusal(said: str, code: int) -> BaseException | None:
    """Return the error of a command that refused to run; None: it did not refuse.

    Args:
        said: everything it has printed.
        code: its exit code.
    """
    match = _REFUSAL.match(said)
    if match is None:
        return None
    message = match[1].strip()
    if code == DoesNotFit.exit_code:
        return DoesNotFit(message)
    return UserError(message) if code == UserError.exit_code else KeyboardInterrupt(message)
