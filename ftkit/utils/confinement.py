"""Readers of untrusted files, in a child process with limits on time and memory.

A file of a few bytes can demand terabytes of memory, or hours. Readers compare the sizes in a file
with the file's own; what a reader overlooks, or a library does inside, ends at these limits.
"""

import json
import os
import resource
import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ftkit.errors import UserError
from ftkit.utils.damaged_files import DamagedFile, log_failure, traceback_log
from ftkit.utils.process import run_program
from ftkit.utils.progress import get_verbosity

_KILL_AFTER_S = 5.0
"""Processor time between the exception at the limit and the end by the kernel."""


class OutOfTime(BaseException):
    """The processor time is used up; no `except Exception` of a library may swallow it."""


def set_limits(seconds: float, memory_bytes: int) -> None:
    """Limit the processor time and memory that this process may still take.

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
    # Processor time, not wall-clock time: waiting for a slow disk is harmless.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    # SIGVTALRM has no handler, so that the kernel ends the process.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds + _KILL_AFTER_S)
    if (taken := _data_bytes()) is not None:
        _set_data_limit(taken + memory_bytes)


@contextmanager
def without_limits() -> Iterator[None]:
    """Lift the limits in the block; after it, as much time and memory is left as before it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    before = _data_bytes()
    timers = (signal.ITIMER_PROF, signal.ITIMER_VIRTUAL)
    # setitimer returns the time that was left.
    left = [signal.setitimer(timer, 0)[0] for timer in timers]
    # Only the soft limit is ever lowered: equal ones mean that there is none.
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
    """Raise the memory limit of this process, for a further file that it reads."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != hard:
        _set_data_limit(soft + memory_bytes)


def _set_data_limit(limit_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (limit_bytes, hard) if limit != resource.RLIM_INFINITY]
    # RLIMIT_DATA counts anonymous memory: pages of a mapped file of 100 GB are none.
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits, default=resource.RLIM_INFINITY), hard))


def _data_bytes() -> int | None:
    """Bytes that count for RLIMIT_DATA now; None: the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    # The kernel's kB are KiB.
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), None)


# A new interpreter that imports torch takes a few seconds.
_BASE_SECONDS = 20.0
_BASE_BYTES = 2**30
"""Limits of a reader, beside the part that is proportional to its file's size."""
_BYTES_PER_SECOND = 10e6
"""Slowest reading that a file's size justifies. Parsing and hashing are faster."""
_BYTES_PER_BYTE = 4
"""Bytes of memory for each byte of a file: torch maps files so that they count once; old formats
are read whole and converted; Python's objects for short texts are several times as large."""


def confined(
    function: str,
    *arguments: Any,
    file: Path,
    seconds: float = _BASE_SECONDS,
    memory_bytes: int = _BASE_BYTES,
    stdin: IO[bytes] | None = None,
    shows_output: bool = False,
) -> Any:
    """Call a function in a child process with limits, and return what it returns.

    Nothing but JSON passes between the two: the child hands over plain values, and a caller that
    wants tensors reads them itself, at offsets that the child has checked. Ctrl+C and other
    requests to end are passed on to the child, which has some seconds to tidy up.

    Args:
        function: as "package.module:name". Its module is imported before the limits hold.
        arguments: values that JSON can express, paths as text.
        file: what the function reads, a file or a directory; its size raises both limits.
        seconds: of processor time, added to what the size justifies.
        memory_bytes: of anonymous memory, added to what the size justifies.
        stdin: the standard input of the child; None: an empty one.
        shows_output: whether the child prints where this process does. Otherwise its output goes
            to the log of damaged files, and only if it fails.

    Returns:
        Values as the json module reads them.

    Raises:
        UserError: the one that the function has raised.
        DamagedFile: the file is neither file nor directory, or the child needed more than its
            limits, or ended in any other way.
        KeyboardInterrupt: Ctrl+C has ended the child.
        SystemExit: the child has shown why it failed, or another signal has ended it.
    """
    size = checked_size(file)
    request = {
        "function": function,
        "arguments": arguments,
        "file": str(file),
        "size": size,
        "seconds": seconds + size / _BYTES_PER_SECOND,
        "memory_bytes": memory_bytes + _BYTES_PER_BYTE * size,
        "verbosity": get_verbosity(),
    }
    # Files and not pipes: nobody has to read them while the child runs, however much it writes.
    with tempfile.TemporaryFile() as exchange, tempfile.TemporaryFile() as output:
        exchange.write(json.dumps(request).encode())
        exchange.flush()
        shown = None if shows_output else output
        code = run_program(
            "ftkit.utils.confined_child",
            exchange=exchange,
            stdin=stdin,
            stdout=shown,
            stderr=shown,
        )
        exchange.seek(0)
        answer = exchange.read()
        output.seek(0)
        said = output.read().decode(errors="replace")
    if code == 0:
        found = json.loads(answer)
        if "error" in found:
            raise (DamagedFile if found["is_damaged"] else UserError)(found["error"])
        return found["result"]
    if shows_output and code == 1:  # the traceback is above
        raise SystemExit(code)
    log_failure(file, said)
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    raise DamagedFile(
        f"{file} cannot be read: the process that read it was ended ({name}), as happens with "
        "damaged files, and with those made to take all of the memory or time. Get a fresh copy "
        f"of it. (What the process said is in {traceback_log()}.)"
    )


def checked_size(file: Path) -> int:
    """Size of a file, or of all files in a directory, in bytes.

    Raises:
        DamagedFile: one of them is a pipe, a device or the like, whose reading may never end.
    """
    paths = (Path(top) / name for top, _, names in os.walk(file) for name in names)
    return sum(map(_size_of, paths)) if file.is_dir() else _size_of(file)


def _size_of(file: Path) -> int:
    try:
        status = file.stat()
    except OSError:  # a link to nothing, or removed meanwhile: opening it fails with a message
        return 0
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise DamagedFile(f"{file} is a pipe or a device and not a file. Put a file there.")
    return status.st_size
