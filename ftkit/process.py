"""How processes end: with the one that started them, and cleaning up after themselves."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however the parent ends.

    On systems without prctl nothing happens: there an orphan ends when it next writes to a pipe.

    Args:
        parent: its process id, as the parent itself gave it: it may have ended before this call.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def cleaning_up_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl+C does: through its finally clauses."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
