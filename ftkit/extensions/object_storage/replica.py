"""Replicas: a directory here, the objects at its url, and a record of which of them are equal."""

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
from ftkit.extensions.object_storage.objects import ObjectEntry, Objects
from ftkit.utils.damaged_files import reading
from ftkit.utils.files import write_json
from ftkit.utils.json_values import from_json
from ftkit.utils.progress import print_notice
from ftkit.utils.url_files import StorageError, unreachable
from ftkit.utils.urls import working_root

Listing = dict[str, ObjectEntry]
_FIRST_NOTICE_S, _NOTICE_INTERVAL_S = 2.0, 10.0
"""Times to the first report of a download's progress and between further ones."""


class Replica:
    """A directory and the objects at a url, by names relative to both.

    For each file that was equal to its object, the record has the version of the object and the
    size and time of the file. It shows changes on either side without reading any content.
    """

    def __init__(self, directory: Path, objects: Objects, record: Path | None = None) -> None:
        """Read the record.

        Args:
            directory: holds the files.
            objects: at the url.
            record: a file that keeps the record between sessions; None: it is not kept.
        """
        self.directory, self.objects = directory, objects
        self._record = record
        self._entries: dict[str, list[Any]] = {}
        if record is not None:
            # Without a record everything is downloaded again, which is only slower.
            with suppress(UserError), reading(record, "a record of what was seen at a url"):
                self._entries = from_json(dict[str, list[Any]], json.loads(record.read_bytes()))

    @classmethod
    def of(cls, directory: Path) -> "Replica":
        """The replica in a directory that stands for a url; the cache keeps its record."""
        objects = Objects.of(directory)
        # A url may be longer than a file name.
        name = hashlib.sha256(objects.url.encode()).hexdigest()[:32]
        return cls(directory, objects, working_root() / ".known" / f"{name}.json")

    def version(self, name: str) -> str | None:
        """Version of an object that its file was equal to; None: it never was."""
        return self._entries[name][0] if name in self._entries else None

    def is_equal(self, name: str) -> bool:
        """Return whether a file is unchanged since it was last equal to its object."""
        try:
            status = (self.directory / name).stat()
        except OSError:
            return False
        return self._entries.get(name, [])[1:] == [status.st_size, status.st_mtime_ns]

    def names(self) -> list[str]:
        """Names of all objects in the record."""
        return list(self._entries)

    def note(self, name: str, version: str) -> None:
        """Record that an object is equal to its file in the file's present state."""
        status = (self.directory / name).stat()
        self._entries[name] = [version, status.st_size, status.st_mtime_ns]

    def forget(self, name: str) -> None:
        """Remove an object from the record."""
        self._entries.pop(name, None)

    def save(self) -> None:
        """Keep the record for the next session."""
        if self._record is not None:
            self._record.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._record, self._entries)

    def download(self, name: str, version: str) -> None:
        """Download an object to its file.

        Raises:
            StorageError: it cannot be read.
        """
        self.objects.download(name, self.directory / name)
        self.note(name, version)

    def upload(self, name: str) -> None:
        """Upload a file; one that changes meanwhile is not recorded, and is uploaded again.

        Raises:
            StorageError: the storage does not accept it.
            FileNotFoundError: there is no such file.
        """
        path = self.directory / name
        before = path.stat()
        entry = self.objects.upload(path, name)
        now = path.stat()
        # Logs grow while they are uploaded.
        if (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns):
            self.note(name, entry.version)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects in this order; their files stay.

        Raises:
            StorageError: the storage does not delete them.
        """
        names = list(dict.fromkeys(names))
        self.objects.delete(names)
        for name in names:
            self.forget(name)


def fetch_whole(directory: Path) -> None:
    """Download all of a directory that stands for a url, such as a model.

    Raises:
        UserError: it cannot be read.
    """
    replica = Replica.of(directory)
    try:
        listing = replica.objects.listing()
        for name in replica.names():
            if name not in listing:
                # It was downloaded, and has been deleted at the url.
                (directory / name).unlink(missing_ok=True)
                replica.forget(name)
        changed = {
            name: entry
            for name, entry in listing.items()
            if replica.version(name) != entry.version or not replica.is_equal(name)
        }
        # An object that changes after the listing has another version, and is downloaded again next
        # time.
        download_files(directory, replica.objects, changed)
    except StorageError as error:
        raise unreachable(error) from error
    for name, entry in changed.items():
        replica.note(name, entry.version)
    replica.save()


def fetch_missing(directory: Path, names: Iterable[str]) -> None:
    """Download the files that a directory lacks. See `ftkit.utils.url_files`."""
    if missing := [name for name in names if not (directory / name).exists()]:
        try:
            download_files(directory, Objects.of(directory), missing)
        except StorageError as error:
            raise unreachable(error) from error


def download_files(directory: Path, objects: Objects, names: Iterable[str]) -> None:
    """Download files, and report progress if it takes long.

    Raises:
        StorageError: they cannot be read.
    """
    names = list(names)
    start_s, done, ended = time.monotonic(), 0, threading.Event()

    def report() -> None:
        wait_s = _FIRST_NOTICE_S
        while not ended.wait(wait_s):
            wait_s = _NOTICE_INTERVAL_S
            progress = f"{done} of {len(names)} files"
            took_s = time.monotonic() - start_s
            print_notice(f"ftkit: fetching {objects.url}: {progress}, {took_s:.0f} s", sys.stderr)

    # In a thread, because a single file may take minutes.
    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        for name in names:
            objects.download(name, directory / name)
            done += 1
    finally:
        ended.set()
        thread.join()
