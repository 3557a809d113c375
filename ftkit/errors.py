"""Errors that carry their exit code: what the user can mend is told without a traceback."""

import signal

from ftkit.redaction import redacted

EXIT_OUT_OF_MEMORY = 3


class UserError(Exception):
    """Something the user can mend; names the key, its value, the rule and a change that works.

    Raised before anything expensive starts. The command prints the message alone and ends
    with exit code 2.
    """

    exit_code: int = 2

    def __init__(self, message: object = "") -> None:
        """Keep the message without passwords and tokens, wherever it is shown."""
        super().__init__(redacted(str(message)))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows of it: the message, and nothing of the calls that led to it."""
        return [f"{type(self).__name__}: {self}"]


class DoesNotFit(UserError):
    """A run that would certainly end for lack of memory."""

    exit_code = EXIT_OUT_OF_MEMORY


EXIT_BY_SIGNAL = {
    signal.SIGINT: (130, "Ctrl+C"),
    signal.SIGTERM: (143, "SIGTERM"),
    signal.SIGHUP: (129, "SIGHUP"),
    signal.SIGUSR1: (138, "SIGUSR1"),
}
