"""What commands that run as children print: progress, and refusals as the errors they are."""

import os
import re
from typing import IO

from ftkit.errors import DoesNotFit, UserError

_TOLD = re.compile(r"(?:.*^)?ftkit: (.*)\Z", re.MULTILINE | re.DOTALL)
"""What the command says when it refuses to run."""


def printed(output: IO[bytes]) -> str:
    """What a command has printed so far.

    Args:
        output: where it writes; its position is that of the command, which writes on.
    """
    descriptor = output.fileno()
    text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    return text.decode(errors="replace")


def refusal(said: str, code: int) -> BaseException | None:
    """What a command says that has refused to run, as an error; None: it says nothing.

    Args:
        said: all that it has printed.
        code: its exit code.
    """
    told = _TOLD.match(said)
    if told is None:
        return None
    message = told[1].strip()
    if code == DoesNotFit.exit_code:
        return DoesNotFit(message)
    return UserError(message) if code == UserError.exit_code else KeyboardInterrupt(message)
