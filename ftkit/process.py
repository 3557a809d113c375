"""Processes that end with the one that started them."""

import ctypes
import os
import signal
import sys

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
