"""Readers of files that nobody vouches for, in a child process that cannot take all of the machine.

A file of a few bytes can demand terabytes of memory, or hours. Sizes are compared with the file
wherever a reader meets them; what a reader overlooks, or a library does inside, ends at these
limits. They count processor time and anonymous memory, so that neither a slow disk nor the
pages of a mapped file of 100 GB come near them.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from ftkit.errors import UserError
from ftkit.utils.damaged_files import DamagedFile, log_failure, traceback_log
from ftkit.utils.process import PassingOn
from ftkit.utils.progress import get_verbosity

BASE_SECONDS = 20.0
BASE_BYTES = 2**30
"""What a reader may take beside what is proportional to the size of its file."""
_BYTES_PER_SECOND = 10e6
"""Slower reading than this is not justified by a file's size. Parsing and hashing are faster."""
_BYTES_PER_BYTE = 4
"""Bytes of memory for each byte of a file: torch maps files so that they count once; old formats
are read whole and converted; Python's objects for short texts are several times as large."""
_GRACE_S = 10.0
"""How long a child may tidy up after Ctrl+C."""


def confined(
    function: str,
    *arguments: Any,
    file: Path,
    seconds: float = BASE_SECONDS,
    memory_bytes: int = BASE_BYTES,
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
        seconds: of processor time, beside what the size justifies.
        memory_bytes: of anonymous memory, beside what the size justifies.
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
    with tempfile.TemporaryFile() as exchange, tempfile.TemporaryFile() as output:
        exchange.write(json.dumps(request).encode())
        exchange.flush()
        code = _run(exchange, stdin, None if shows_output else output)
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
    """The bytes of a file, or of all files in a directory.

    Raises:
        DamagedFile: one of them is a pipe, a device or the like, whose reading may never end.
    """
    paths = (Path(top) / name for top, _, names in os.walk(file) for name in names)
    return sum(map(_size_of, paths)) if file.is_dir() else _size_of(file)


def _size_of(file: Path) -> int:
    try:
        status = file.stat()
    except OSError:  # a link to nothing, or gone meanwhile: whoever opens it says so
        return 0
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise DamagedFile(f"{file} is a pipe or a device and not a file. Put a file there.")
    return status.st_size


def _run(exchange: IO[bytes], stdin: IO[bytes] | None, output: IO[bytes] | None) -> int:
    """Run the child until it ends; its exit code, negative where a signal has ended it."""
    with PassingOn(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        child = subprocess.Popen(
            # -P: modules in the current directory are the user's, not ours
            (
                *(sys.executable, "-P", "-m", "ftkit.utils.confinement.child"),
                *(str(os.getpid()), str(exchange.fileno())),
            ),
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=output,
            stderr=output,
            pass_fds=(exchange.fileno(),),
            process_group=0,  # Ctrl+C reaches it once, from here
        )
        try:
            signals.to(child)
            code = _wait(child, signals)
        finally:
            child.kill()
            child.wait()
    if signal.SIGINT in signals.received:
        raise KeyboardInterrupt
    if signals.received:
        raise SystemExit(128 + signals.received[0])
    return code


def _wait(child: "subprocess.Popen[bytes]", signals: PassingOn) -> int:
    kill_at = None
    while True:
        try:
            return child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            if signals.received and kill_at is None:
                kill_at = time.monotonic() + _GRACE_S
            if kill_at is not None and time.monotonic() > kill_at:
                child.kill()
