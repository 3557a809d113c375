"""The guard around every reader of files: any failure to read becomes one message."""

import errno
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ftkit.errors import UserError
from ftkit.redaction import redacted
from ftkit.utils.files import cache_root

_MOST_LOG_BYTES = 2**20
_MOST_TEXT = 2**17
"""Characters of one failure, the last ones."""
_MOST_SHOWN = 200
"""Characters of a library's own message."""


class DamagedFile(UserError):
    """A file whose content does not follow its format."""


@contextmanager
def reading(file: Path | str, expected: str, *, key: str = "", advice: str = "") -> Iterator[None]:
    """Turn whatever a reader raises into one `DamagedFile`, and log the original traceback.

    Only parsing belongs inside: an error in our own code would be reported as a damaged file, and
    only the log (`traceback_log`) would show it.

    Args:
        file: what is read, as the user knows it.
        expected: content of an intact file, such as "a JSON object".
        key: the part that is being read, if known.
        advice: what to do; the default is to get a fresh copy of the file.

    Raises:
        DamagedFile: for any exception but two that pass through: a `UserError`, and an error of the
            system that memory is exhausted.
    """
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        # The machine is out of memory, which `is_out_of_memory` recognises; the file is sound.
        if error.errno == errno.ENOMEM:
            raise
        raise DamagedFile(
            f"{file} cannot be read: {error.strerror or _reason(error)}. {advice}".rstrip()
        ) from error
    except BaseException as error:
        # Panics of libraries in Rust are not an `Exception`; their class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        # Libraries map a file with its actual length: this failure means that memory is missing.
        if os.strerror(errno.ENOMEM) in str(error):
            raise
        log_failure(file, "".join(traceback.format_exception(error)))
        place = f"{key}: " if key else ""
        raise DamagedFile(
            f"{file} is damaged: {place}{_reason(error)}. Expected: {expected}. "
            f"{advice or 'Get a fresh copy of it.'} (The traceback is in {traceback_log()}.)"
        ) from error


def require_regular(file: Path) -> None:
    """Refuse what would block a reader or never end: a pipe, a socket, a device, a directory.

    A link to a regular file counts as one, as in a cache of the hub; a missing file passes.

    Raises:
        DamagedFile: the path exists and is not a regular file.
    """
    if file.exists() and not file.is_file():
        raise DamagedFile(f"{file} is not a regular file. Put a copy of its content there instead.")


def traceback_log() -> Path:
    """The file with the tracebacks of the newest damaged files."""
    return cache_root() / "damaged_files.log"


def log_failure(file: Path | str, text: str) -> None:
    """Add the error of a library that could not read a file to the log."""
    log = traceback_log()
    with suppress(OSError):  # a read-only home must not hide the message
        log.parent.mkdir(parents=True, exist_ok=True)
        # Two files are kept: at most 2 MiB and the newest failure.
        if log.exists() and log.stat().st_size > _MOST_LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))
        with log.open("a", encoding="utf-8", errors="backslashreplace") as out:
            out.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {file}\n")
            # The end of a traceback names the error.
            out.write(redacted(text)[-_MOST_TEXT:])


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch's words
        return "too large for memory"
    message = redacted(str(error)).strip().partition("\n")[0].rstrip(".")
    shown = message if len(message) <= _MOST_SHOWN else f"{message[:_MOST_SHOWN]} ..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__
