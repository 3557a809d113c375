"""Directories that libraries expect of every user: a home, caches, room for temporary files.

Containers start programs without them: with a user id that no file names, with a home that is
missing or cannot be written.
"""

import os
import pwd
import stat
import sys
import tempfile
from pathlib import Path

from ftkit.errors import UserError
from ftkit.utils.files import CACHE_VARIABLE
from ftkit.utils.progress import print_notice


def provide_directories() -> None:
    """Give this process and its children a name, a home and caches if the user has none.

    Libraries look for all of them by themselves, each in its own way, so they get variables.

    Raises:
        UserError: there is no place for temporary files either.
    """
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise UserError(
            f"Temporary files cannot be written: {error.strerror}. Set TMPDIR to a directory that "
            "can be written."
        ) from None
    # What getpass.getuser reads, which torch's compiler calls.
    names = ("LOGNAME", "USER", "LNAME", "USERNAME")
    if not any(map(os.environ.get, names)) and not _is_known(os.getuid()):
        os.environ["USER"] = str(os.getuid())
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - which returns ~ where there is no home
    if home.is_absolute() and _can_be_made(home / ".cache"):
        return
    own = temporary / f"ftkit-{os.getuid()}"
    _make_own(own)
    variables = {
        CACHE_VARIABLE: own / "ftkit",
        "XDG_CACHE_HOME": own,
        "TRITON_HOME": own,
        "MPLCONFIGDIR": own / "matplotlib",
    }
    if (hub := home / ".cache/huggingface").is_dir():  # a token and models, which can be read
        variables["HF_HOME"] = hub
    if CACHE_VARIABLE not in os.environ:
        what = f"{home} cannot be written" if home.is_absolute() else "There is no home directory"
        print_notice(
            f"{what}: caches are in {own}, which is of this machine alone. Set HOME or "
            f"{CACHE_VARIABLE} to a directory that lasts.",
            sys.stderr,
        )
    for name, path in variables.items():
        os.environ.setdefault(name, str(path))
    if not (home.is_absolute() and home.is_dir()):
        os.environ["HOME"] = str(own)


def _is_known(user: int) -> bool:
    try:
        pwd.getpwuid(user)
    except KeyError:
        return False
    return True


def _can_be_made(directory: Path) -> bool:
    """Return whether files can be written to a directory, once it is made."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)


def _make_own(directory: Path) -> None:
    """Make a directory in which nobody else can put files.

    Raises:
        UserError: there is another one of this name.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        reason = error.strerror
    else:
        if stat.S_ISDIR(status.st_mode) and (status.st_uid, status.st_mode & 0o022) == (
            os.getuid(),
            0,
        ):
            return
        reason = "it belongs to somebody else"
    raise UserError(
        f"There is no home directory that can be written, and {directory} cannot be used instead: "
        f"{reason}. Set HOME to a directory of your own."
    )
