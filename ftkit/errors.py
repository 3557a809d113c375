"""Errors that carry their exit code, and out-of-memory errors of torch, CUDA, NCCL and the host."""

import errno
import os
import re
import signal

from ftkit.redaction import shown

# A code of its own, by which sweeps and scripts know it.
EXIT_OUT_OF_MEMORY = 3


class UserError(Exception):
    """An error the user can correct; names the key, its value, the rule and a change that works.

    Raised before anything expensive starts. The command prints the message alone and ends
    with exit code 2.
    """

    exit_code: int = 2

    def __init__(self, message: object = "") -> None:
        """Keep the message without secrets and terminal escapes, wherever it is shown."""
        # Here and not where it is printed: messages also go into reports and logs.
        super().__init__(shown(str(message)))

    def _render_traceback_(self) -> list[str]:
        """Let IPython show only the message, without a traceback."""
        return [f"{type(self).__name__}: {self}"]


class DoesNotFit(UserError):
    """A run that would certainly run out of memory."""

    exit_code = EXIT_OUT_OF_MEMORY


class Completed(Exception):
    """A run that was to be continued is complete; says where its result is."""


# Exit codes as shells report an end by a signal: 128 and its number on Linux.
EXIT_BY_SIGNAL = {
    signal.SIGINT: (130, "Ctrl+C"),
    signal.SIGTERM: (143, "SIGTERM"),
    signal.SIGHUP: (129, "SIGHUP"),
    signal.SIGUSR1: (138, "SIGUSR1"),
}


_ON_DEVICE = re.compile(
    r"CUDA out of memory"  # torch's allocator, where another type has taken its message over
    r"|CUDA (driver )?error: out of memory"  # pinned memory, contexts, mapped segments
    r"|Triton Error \[CUDA\]: out of memory"
    r"|(CUBLAS|CUSOLVER|CUSPARSE|CUDNN)_STATUS_(\w+_)?ALLOC(ATION)?_FAILED"
    r"|Cuda failure (\d+ )?'out of memory'"  # NCCL
    r"|Failed to CUDA (malloc|calloc|calloc async|host alloc) \d+ bytes"  # NCCL, too
    r"|Error out of memory at line \d+ in file"  # bitsandbytes, before it ends the process
)
_ON_HOST = (
    "DefaultCPUAllocator: can't allocate memory",  # torch
    os.strerror(errno.ENOMEM),  # files mapped into memory, threads
    "std::bad_alloc",
)
"""Texts in errors of other types when host memory is exhausted."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is exhausted, on a device or the host.

    Libraries report an exhausted device as a RuntimeError; errors of other types only quote such
    words.
    """
    import torch  # not at the top: the supervisor does without torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # Its message may quote the words of a library.
    if isinstance(error, UserError):
        return False
    if isinstance(error, RuntimeError) and _ON_DEVICE.search(str(error)):
        return True
    return any(words in str(error) for words in _ON_HOST)


def device_line(text: str) -> str | None:
    """First line of a text that says that a device is out of memory; None: there is none."""
    return next((line.strip() for line in text.splitlines() if _ON_DEVICE.search(line)), None)
