"""Commands as children of this process: progress is shown meanwhile, errors are raised here."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from ftkit.errors import UserError
from ftkit.recipe.parsing import as_text
from ftkit.utils.process import PassingOn, start_command
from ftkit.utils.progress import LATE_S
from ftkit.views.notebook import display
from ftkit.views.notebook.child_output import printed, refusal

_POLL_S = 0.2


_RETURNED = ("format", "out")
"""Options of commands that say how and where their result is written, which is returned here."""


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line; what is None or False is left out.

    Raises:
        UserError: one is about what the command writes.
    """
    words = []
    for key, value in options.items():
        if key in _RETURNED:
            raise UserError(
                f"{key} is an option of the command alone: here its result is returned. Leave it "
                "out, and write what is returned."
            )
        if value is True:
            words.append(f"--{key}")
        elif value is not None and value is not False:
            words.append(f"--{key}={os.fspath(value) if _is_path(value) else as_text(value)}")
    return words


def output_of(words: Sequence[str]) -> str:
    """What a command writes to standard output, which is its result.

    Raises:
        UserError: it refuses, and says why.
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
    """Show the last line that a command has said until something is done.

    Args:
        what: goes on; shown while the command, which loads libraries first, has said nothing yet.
        is_done: whether it is, asked again and again; takes a moment.
        said: where the command writes.
    """
    place, told, late_s = display.place(), "", time.monotonic() + LATE_S
    while not is_done():
        progress, _, _ = printed(said).partition("ftkit: ")
        *_, last = ["", *progress.split("\n")[:-1]]
        if not last and time.monotonic() > late_s:
            last = f"{what} ..."
        if last != told:
            place.say(last)
            told = last
    if told:
        place.say("")


def failure(said: str, code: int) -> BaseException:
    """Why a command ended, as an error.

    Args:
        said: all that it has said.
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
