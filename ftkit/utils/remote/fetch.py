"""Fetching from a url into the directory that stands for it, and what is known of it since then."""

import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.utils.damaged_files import reading
from ftkit.utils.files import write_json
from ftkit.utils.json_values import from_json
from ftkit.utils.progress import print_notice
from ftkit.utils.remote.objects import ObjectEntry, Objects, StorageError
from ftkit.utils.remote.urls import url_of, working_root

Listing = dict[str, ObjectEntry]
_TOLD_AFTER_S, _TOLD_EVERY_S = 2.0, 10.0
"""Fetching that takes longer is told, and how far it is."""
_CREDENTIALS = {
    "s3": ": those that aws s3 ls takes",
    "gs": ": those of gcloud auth application-default login",
    "az": ": AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME beside "
    "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or az login",
}
"""Where those of each kind of url are found."""


class Known:
    """What this machine has last seen at a url, and as what it lay here then."""

    def __init__(self, directory: Path) -> None:
        """Read it; nothing is known of what was never here."""
        url = url_of(directory)
        assert url is not None
        name = hashlib.sha256(url.encode()).hexdigest()[:32]
        self._file = working_root() / ".known" / f"{name}.json"
        self._directory = directory
        self._entries: dict[str, list[Any]] = {}
        # Without it all is fetched anew, and compared by what it holds.
        with suppress(UserError), reading(self._file, "what was last seen at a url"):
            self._entries = from_json(dict[str, list[Any]], json.loads(self._file.read_bytes()))

    def version(self, name: str) -> str | None:
        """Of an object, when it was last seen; None: it never was."""
        return self._entries[name][0] if name in self._entries else None

    def is_equal(self, name: str) -> bool:
        """Whether a file lies here as it was when it was last equal to its object."""
        try:
            status = (self._directory / name).stat()
        except OSError:
            return False
        return self._entries.get(name, [])[1:] == [status.st_size, status.st_mtime_ns]

    def note(self, name: str, version: str) -> None:
        """An object is equal to its file, as that lies here now."""
        status = (self._directory / name).stat()
        self._entries[name] = [version, status.st_size, status.st_mtime_ns]

    def names(self) -> list[str]:
        """All objects that were seen."""
        return list(self._entries)

    def forget(self, name: str) -> None:
        """An object is gone."""
        self._entries.pop(name, None)

    def save(self) -> None:
        """Keep it for the next session."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._file, self._entries)


def fetch_whole(directory: Path) -> None:
    """Bring all of a directory here that lies at a url, such as a model.

    Raises:
        UserError: it cannot be read.
    """
    try:
        objects, known = Objects.of(directory), Known(directory)
        listing = objects.listing()
        for name in known.names():
            if name not in listing:
                (directory / name).unlink(missing_ok=True)
                known.forget(name)
        changed = {
            name: entry
            for name, entry in listing.items()
            if known.version(name) != entry.version or not known.is_equal(name)
        }
        fetch_files(directory, objects, changed)
    except StorageError as error:
        raise unreachable(error) from error
    for name, entry in changed.items():
        known.note(name, entry.version)
    known.save()


def fetch_missing(directory: Path, names: Iterable[str]) -> None:
    """Bring files of a directory here that are not.

    Raises:
        UserError: they cannot be read.
    """
    if missing := [name for name in names if not (directory / name).exists()]:
        try:
            fetch_files(directory, Objects.of(directory), dict.fromkeys(missing))
        except StorageError as error:
            raise unreachable(error) from error


def fetch_files(
    directory: Path, objects: Objects, names: dict[str, ObjectEntry] | dict[str, None]
) -> None:
    """Bring files here, and say how far it is if it takes long.

    Raises:
        StorageError: they cannot be read.
    """
    start_s, done, ended = time.monotonic(), 0, threading.Event()

    def tell() -> None:
        wait_s = _TOLD_AFTER_S
        while not ended.wait(wait_s):
            wait_s = _TOLD_EVERY_S
            fetched = f"{done} of {len(names)} files"
            took_s = time.monotonic() - start_s
            print_notice(f"ftkit: fetching {objects.url}: {fetched}, {took_s:.0f} s", sys.stderr)

    teller = threading.Thread(target=tell, daemon=True)  # one file alone may take minutes
    teller.start()
    try:
        for name in names:
            objects.download(name, directory / name)
            done += 1
    finally:
        ended.set()
        teller.join()


def unreachable(error: StorageError) -> UserError:
    """What is said where a url cannot be used before anything has begun."""
    which = next((text for kind, text in _CREDENTIALS.items() if f"{kind}://" in str(error)), "")
    return UserError(
        f"{error}. Check the url, the network and the credentials in the environment{which}."
    )
