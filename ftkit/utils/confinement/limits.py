"""Limits on what this process may still take: processor time and anonymous memory."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_GRACE_S = 5.0
"""Between the exception at the limit and the end of a process that never gets to raise it."""


class OutOfTime(BaseException):
    """The processor time is used up; no `except Exception` of a library may swallow it."""


def set_limits(seconds: float, memory_bytes: int) -> None:
    """From here on, let this process take no more than so much.

    At the limit of time the main thread raises `OutOfTime`. If it is inside a library that does
    not return, the kernel ends the process 5 s later. Beyond the limit of memory allocations fail:
    as a MemoryError in Python, as other exceptions or an abort in libraries. Where there is no
    /proc, memory is not limited.

    Args:
        seconds: of processor time, of all threads.
        memory_bytes: of anonymous memory, and of files that are mapped private and writable, as
            torch maps them (RLIMIT_DATA, see getrlimit(2)).
    """

    def raise_out_of_time(*_: Any) -> None:
        raise OutOfTime

    signal.signal(signal.SIGPROF, raise_out_of_time)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds + _GRACE_S)  # whose signal nobody handles
    if (taken := _data_bytes()) is not None:
        _set_data_limit(taken + memory_bytes)


@contextmanager
def without_limits() -> Iterator[None]:
    """Lift the limits in the block, and leave them as far away after it as they were before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    before = _data_bytes()
    timers = (signal.ITIMER_PROF, signal.ITIMER_VIRTUAL)
    left = [signal.setitimer(timer, 0)[0] for timer in timers]
    if soft != hard:
        _set_data_limit(hard)
    try:
        yield
    finally:
        for timer, seconds in zip(timers, left, strict=True):
            signal.setitimer(timer, seconds)  # 0: there was no limit
        if soft != hard and before is not None and (now := _data_bytes()) is not None:
            _set_data_limit(soft + max(0, now - before))


def extend_limits(memory_bytes: int) -> None:
    """Let this process take so much more memory, for a further file that it reads."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != hard:
        _set_data_limit(soft + memory_bytes)


def _set_data_limit(limit_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (limit_bytes, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits, default=resource.RLIM_INFINITY), hard))


def _data_bytes() -> int | None:
    """What counts for RLIMIT_DATA now; None: the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), None)
