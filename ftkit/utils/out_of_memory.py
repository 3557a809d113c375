"""Out-of-memory errors, in every wording of torch, CUDA, NCCL and the host."""

import errno
import os
import re

from ftkit.errors import UserError

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
"""In errors of other types when host memory is exhausted."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is exhausted, on a device or the host.

    Libraries speak of devices in RuntimeErrors; what else has such words in it quotes them.
    """
    import torch  # not at the top: the supervisor reads words alone

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, UserError):
        return False
    if isinstance(error, RuntimeError) and _ON_DEVICE.search(str(error)):
        return True
    return any(words in str(error) for words in _ON_HOST)


def device_line(text: str) -> str | None:
    """The line of a message or a log that says that a device has no memory left."""
    return next((line.strip() for line in text.splitlines() if _ON_DEVICE.search(line)), None)
