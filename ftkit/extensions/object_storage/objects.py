"""Objects below a url, through fsspec: listed, read, written and deleted, with retries.

Credentials are found where the provider's own programs look for them, and are never handled here.
"""

import functools
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ftkit.errors import UserError
from ftkit.extensions.object_storage.providers import (
    PART_BYTES,
    copy_object,
    describe_error,
    fetch_options,
    found_below,
    is_final,
    is_missing_bucket,
    is_there_already,
    open_storage,
    require_provider,
    send_options,
)
from ftkit.utils.url_files import StorageError
from ftkit.utils.urls import url_of

REQUEST_PATIENCE_S = 20.0
"""Time for which one request is retried before it counts as failed."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 8.0
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class ObjectEntry:
    """Size and version of an object."""

    size_bytes: int
    """Length of the object."""
    version: str
    """Changes whenever the content does."""


class Objects:
    """The objects below a url, by names relative to it; one thread or several.

    Every method raises StorageError if it still fails after some retries.
    """

    def __init__(self, url: str, patience_s: float = REQUEST_PATIENCE_S) -> None:
        """Prepare; no request is sent yet.

        Args:
            url: where they lie.
            patience_s: how long a request is retried.

        Raises:
            UserError: the library or the account for such urls is missing.
        """
        self.url, self.patience_s = url, patience_s
        self._scheme, _, self._root = url.partition("://")
        require_provider(self._scheme)
        self._opened: Any = None

    @classmethod
    def of(cls, path: Path) -> "Objects":
        """The objects below the url that a directory stands for."""
        url = url_of(path)
        assert url is not None, path
        return cls(url)

    def listing(self) -> dict[str, ObjectEntry]:
        def list_(fs: Any) -> dict[str, ObjectEntry]:
            try:
                found = found_below(self._scheme, fs, self._root)
            except FileNotFoundError as error:
                # Some providers report an empty place like this; a missing bucket is an error.
                if is_missing_bucket(error):
                    raise
                return {}
            # A place as a prefix also finds neighbours such as out/lora-2 of out/lora. Names that
            # end in a slash are folders that some tools create.
            start = len(self._root) + 1
            return {
                name[start:]: ObjectEntry(entry["size"], _version_of(entry))
                for name, entry in found.items()
                if name.startswith(f"{self._root}/") and not name.endswith("/")
            }

        return self._tried("listing it", list_)

    def read(self, name: str) -> bytes:
        """Read an object."""
        return self._tried(f"reading {name}", lambda fs: bytes(fs.cat_file(self._path(name))))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Read the bytes [start, stop) of an object, in several requests if they are many."""
        if stop - start <= PART_BYTES:
            ranges = [(start, stop)]
        else:
            starts = range(start, stop, PART_BYTES)
            ranges = [(first, min(first + PART_BYTES, stop)) for first in starts]
        path = self._path(name)

        def read(fs: Any) -> bytes:
            starts, stops = zip(*ranges, strict=True)
            # The parts are fetched at the same time.
            parts = fs.cat_ranges([path] * len(ranges), list(starts), list(stops), on_error="raise")
            content = b"".join(parts)
            if len(content) != stop - start:
                # Inside the request, so that a short answer is retried.
                raise OSError(f"{len(content):,} bytes came instead of {stop - start:,}")
            return content

        return self._tried(f"reading {name}", read)

    def entry(self, name: str) -> ObjectEntry | None:
        def look_up(fs: Any) -> ObjectEntry | None:
            # Some file systems remember what they have seen, in spite of use_listings_cache.
            fs.invalidate_cache()
            try:
                found = fs.info(self._path(name))
            except FileNotFoundError:
                return None
            return ObjectEntry(found["size"], _version_of(found))

        return self._tried(f"looking at {name}", look_up)

    def download(self, name: str, path: Path) -> None:
        partial = path.with_name(f".{path.name}.{os.getpid()}.fetched")
        path.parent.mkdir(parents=True, exist_ok=True)
        options = fetch_options(self._scheme)
        try:
            self._tried(
                f"reading {name}",
                lambda fs: fs.get_file(self._path(name), str(partial), **options),
            )
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def upload(self, path: Path, name: str) -> ObjectEntry:
        """Upload a file; the object is either complete or unchanged.

        Returns:
            The object after the upload.

        Raises:
            FileNotFoundError: the file does not exist, or was removed meanwhile.
        """
        # Its size is looked up afterwards: a captive portal answers every request with a page and
        # stores nothing. The storage compares the content with the checksums in the requests; an
        # ETag is not the MD5 of large or encrypted objects.
        options = send_options(self._scheme)
        before = path.stat().st_size
        self._tried(
            f"writing {name}",
            lambda fs: fs.put_file(str(path), self._path(name), **options),
            ends=lambda: not path.exists(),
        )
        sizes = [before, path.stat().st_size if path.exists() else before]  # some grow meanwhile
        entry = self.entry(name)
        if entry is None or not min(sizes) <= entry.size_bytes <= max(sizes):
            found = "nothing" if entry is None else f"{entry.size_bytes:,} bytes"
            raise self._not_stored(name, f"{found} instead of {sizes[-1]:,} bytes")
        return entry

    def write(self, name: str, content: bytes) -> None:
        """Write an object in one request, and read it back."""
        self._tried(f"writing {name}", lambda fs: fs.pipe_file(self._path(name), content))
        # Small objects are read back whole, because the one that completes a checkpoint is among
        # them.
        if (found := self.read(name)) != content:
            raise self._not_stored(name, f"other content ({len(found):,} bytes)")

    def create(self, name: str, content: bytes) -> bool:
        """Write an object unless one of that name exists; return whether it was written."""

        def create(fs: Any) -> bool:
            try:
                # A conditional write (If-None-Match): of two at the same time, the storage accepts
                # one.
                fs.pipe_file(self._path(name), content, mode="create")
            except Exception as error:
                if not is_there_already(error):
                    raise
                # It may be from an earlier attempt of ours whose answer was lost.
                return bytes(fs.cat_file(self._path(name))) == content
            return True

        return self._tried(f"writing {name}", create)

    def copy(self, name: str, target: str) -> None:
        """Copy an object inside the storage."""
        self._tried(
            f"copying {name}",
            lambda fs: copy_object(self._scheme, fs, self._path(name), self._path(target)),
        )

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects in this order; missing ones are ignored."""

        def delete(name: str, fs: Any) -> None:
            with suppress(FileNotFoundError):
                fs.rm_file(self._path(name))

        for name in names:
            self._tried(f"deleting {name}", functools.partial(delete, name))

    def _not_stored(self, name: str, found: str) -> StorageError:
        return StorageError(
            f"{self.url}: writing {name} failed: the storage accepted it and then has {found} there"
        )

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _fs(self) -> Any:
        if self._opened is None:
            self._opened = open_storage(self._scheme)
        return self._opened

    def _tried(
        self,
        what: str,
        request: Callable[[Any], _Answer],
        ends: Callable[[], bool] = lambda: False,
    ) -> _Answer:
        """Send a request, and retry it with longer and longer pauses while that may help."""
        deadline_s, wait_s = time.monotonic() + self.patience_s, _FIRST_WAIT_S
        while True:
            try:
                return request(self._fs())
            except UserError:  # raised by the handler of a signal, not by the storage
                raise
            except Exception as error:
                # The file was removed: no retry can help, and the storage has not failed.
                if ends():
                    raise FileNotFoundError(what) from error
                # A new connection reads the credentials again: a token may have expired.
                self._opened = None
                if is_final(error) or time.monotonic() + wait_s > deadline_s:
                    raise StorageError(
                        f"{self.url}: {what} failed: {describe_error(error)}"
                    ) from error
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _version_of(entry: dict[str, Any]) -> str:
    """Version of an object in a listing; providers use different keys."""
    keys = ("ETag", "etag", "generation", "md5Hash", "LastModified", "updated")
    version = next((str(entry[key]) for key in keys if entry.get(key)), None)
    if version is None:
        raise OSError("the server is not object storage: its response has no object version")
    return version
