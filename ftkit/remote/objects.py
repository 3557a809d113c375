"""Objects below a url, over fsspec: listed, read, written and deleted, tried again where it helps.

Credentials come from where the provider's own programs look for them, and are never handled here.
"""

import functools
import importlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ftkit.errors import UserError
from ftkit.remote.urls import EXTRAS, url_of

REQUEST_PATIENCE_S = 20.0
"""How long one request is tried again before it counts as failed."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 8.0
_PART_BYTES = 16 * 2**20
"""Of a large file, sent or fetched in one request; four of them at a time are in memory."""
_PARTS_AT_ONCE = 4
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 10, 60
_MOST_WORDS = 300
_Answer = TypeVar("_Answer")
_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|ACCESS_KEY", re.IGNORECASE)
"""In names of environment variables whose values are not repeated."""
_FINAL_CODES = (
    "401",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "NoSuchBucket",
    "SignatureDoesNotMatch",
)


class StorageError(Exception):
    """Object storage did not do what it was asked; says what, and why."""


@dataclass(frozen=True)
class ObjectEntry:
    """An object as a listing has it."""

    size_bytes: int
    """Its length."""
    version: str
    """Another one whenever its content changes."""


def require_extra(scheme: str) -> None:
    """Refuse a url that nothing here reads.

    Raises:
        UserError: what reads it is not installed; says how it is.
    """
    extra, module = EXTRAS[scheme]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{scheme}:// is read and written by {module}, which is not installed ({error}). Try "
            f"pip install 'ftkit[{extra}]'."
        ) from None


class Objects:
    """The objects below a url, by names relative to it; one thread or several.

    Every method raises StorageError if it fails, also after it was tried for a while.
    """

    def __init__(self, url: str, patience_s: float = REQUEST_PATIENCE_S) -> None:
        """Prepare; nothing is asked yet.

        Args:
            url: where they lie.
            patience_s: how long a request is tried again.

        Raises:
            UserError: what reads such urls is not installed.
        """
        self.url, self.patience_s = url, patience_s
        self._scheme, _, self._root = url.partition("://")
        require_extra(self._scheme)
        self._opened: Any = None

    @classmethod
    def of(cls, path: Path) -> "Objects":
        """Those below a directory that stands for a url."""
        url = url_of(path)
        assert url is not None, path
        return cls(url)

    def listing(self) -> dict[str, ObjectEntry]:
        """All objects, by name."""

        def list_(fs: Any) -> dict[str, ObjectEntry]:
            fs.invalidate_cache()
            try:
                found = fs.find(self._root, detail=True)
            except FileNotFoundError as error:
                if _code_of(error) == "NoSuchBucket":
                    raise
                return {}
            start = len(self._root) + 1
            return {
                name[start:]: ObjectEntry(entry["size"], _version_of(entry))
                for name, entry in found.items()
                if name.startswith(f"{self._root}/") and not name.endswith("/")
            }

        return self._tried("listing it", list_)

    def read(self, name: str) -> bytes:
        """All of an object."""
        return self._tried(f"reading {name}", lambda fs: bytes(fs.cat_file(self._path(name))))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of an object, in several requests where they are many."""
        if stop - start <= _PART_BYTES:
            ranges = [(start, stop)]
        else:
            starts = range(start, stop, _PART_BYTES)
            ranges = [(first, min(first + _PART_BYTES, stop)) for first in starts]
        path = self._path(name)

        def read(fs: Any) -> bytes:
            starts, stops = zip(*ranges, strict=True)
            parts = fs.cat_ranges([path] * len(ranges), list(starts), list(stops), on_error="raise")
            content = b"".join(parts)
            if len(content) != stop - start:
                raise OSError(f"{len(content):,} bytes came instead of {stop - start:,}")
            return content

        return self._tried(f"reading {name}", read)

    def entry(self, name: str) -> ObjectEntry | None:
        """An object as it is now; None: there is none."""

        def ask(fs: Any) -> ObjectEntry | None:
            fs.invalidate_cache()
            try:
                found = fs.info(self._path(name))
            except FileNotFoundError:
                return None
            return ObjectEntry(found["size"], _version_of(found))

        return self._tried(f"looking at {name}", ask)

    def download(self, name: str, path: Path) -> None:
        """Fetch an object; the file is there complete, or as it was."""
        partial = path.with_name(f".{path.name}.{os.getpid()}.fetched")
        path.parent.mkdir(parents=True, exist_ok=True)
        options = {"max_concurrency": _PARTS_AT_ONCE} if self._scheme == "s3" else {}
        try:
            self._tried(
                f"reading {name}",
                lambda fs: fs.get_file(self._path(name), str(partial), **options),
            )
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def upload(self, path: Path, name: str) -> None:
        """Send a file; the object is there complete, or as it was.

        Raises:
            FileNotFoundError: there is no such file (any more).
        """
        options: dict[str, Any] = {"chunksize": _PART_BYTES}
        if self._scheme == "s3":
            options["max_concurrency"] = _PARTS_AT_ONCE
        path.stat()
        self._tried(
            f"writing {name}",
            lambda fs: fs.put_file(str(path), self._path(name), **options),
            ends=lambda: not path.exists(),
        )

    def write(self, name: str, content: bytes) -> None:
        """Write an object at once."""
        self._tried(f"writing {name}", lambda fs: fs.pipe_file(self._path(name), content))

    def create(self, name: str, content: bytes) -> bool:
        """Write an object if there is none of that name, decided by the storage; whether it did.

        A request whose answer was lost may have done it: what is there then is compared.
        """

        def create(fs: Any) -> bool:
            try:
                fs.pipe_file(self._path(name), content, mode="create")
            except Exception as error:
                if not (isinstance(error, FileExistsError) or _code_of(error) in _EXISTS):
                    raise
                return bytes(fs.cat_file(self._path(name))) == content
            return True

        return self._tried(f"writing {name}", create)

    def copy(self, name: str, target: str) -> None:
        """Copy an object inside the storage."""
        self._tried(f"copying {name}", lambda fs: fs.cp_file(self._path(name), self._path(target)))

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, one after the other; those that are not there are passed over."""

        def delete(name: str, fs: Any) -> None:
            with suppress(FileNotFoundError):
                fs.rm_file(self._path(name))

        for name in names:
            self._tried(f"deleting {name}", functools.partial(delete, name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _fs(self) -> Any:
        if self._opened is None:
            self._opened = _open(self._scheme)
        return self._opened

    def _tried(
        self,
        what: str,
        ask: Callable[[Any], _Answer],
        ends: Callable[[], bool] = lambda: False,
    ) -> _Answer:
        """Ask, and ask again while it may help: at once, then in ever longer intervals."""
        deadline_s, wait_s = time.monotonic() + self.patience_s, _FIRST_WAIT_S
        while True:
            try:
                return ask(self._fs())
            except UserError:  # no answer of the storage, but a signal that came meanwhile
                raise
            except Exception as error:
                if ends():
                    raise FileNotFoundError(what) from error
                # A new connection asks for credentials anew.
                self._opened = None
                if _is_final(error) or time.monotonic() + wait_s > deadline_s:
                    raise StorageError(f"{self.url}: {what} failed: {in_words(error)}") from error
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


_EXISTS = ("PreconditionFailed", "ConditionalRequestConflict", "412")


def _open(scheme: str) -> Any:
    """A file system without any memory of what it has seen."""
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    return _open_s3(options) if scheme == "s3" else _open_gs(options)


def _open_s3(options: dict[str, Any]) -> Any:
    import s3fs

    retries = {"mode": "standard", "max_attempts": 2}  # the rest is done here
    config = {
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "read_timeout": _READ_TIMEOUT_S,
        "retries": retries,
    }
    fs = s3fs.S3FileSystem(config_kwargs=config, **options)
    fs.retries = 1
    return fs


def _open_gs(options: dict[str, Any]) -> Any:
    import aiohttp
    from gcsfs.core import GCSFileSystem  # gcsfs's own asks over gRPC what kind a bucket is

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it would print a stack of each error
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        options["token"] = "anon"  # it has no accounts, and looking for one takes long
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_READ_TIMEOUT_S
    )
    return GCSFileSystem(requests_timeout=timeout, consistency="md5", **options)


def _version_of(entry: dict[str, Any]) -> str:
    """What changes with an object: S3 and Google call it differently."""
    keys = ("ETag", "etag", "generation", "md5Hash", "LastModified", "updated")
    return next(str(entry[key]) for key in keys if entry.get(key) is not None)


def _code_of(error: BaseException | None) -> str | None:
    """What the storage calls an error."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code"))
        if (code := getattr(error, "code", None)) is not None:
            return str(code)
        error = error.__cause__
    return None


def _is_final(error: Exception) -> bool:
    """Whether asking again at once cannot help."""
    if isinstance(error, FileNotFoundError | PermissionError | FileExistsError):
        return True
    return type(error).__name__ == "NoCredentialsError" or _code_of(error) in _FINAL_CODES


def in_words(error: BaseException) -> str:
    """What went wrong, on one short line, without what the environment keeps secret."""
    text = " ".join(str(error).split()) or type(error).__name__
    code = _code_of(error)
    is_written = "/upload/storage/" in text  # by Google's interface
    if isinstance(error, FileNotFoundError) and (code == "NoSuchBucket" or is_written):
        text = "there is no such bucket"
    elif isinstance(error, OSError) and error.strerror:
        text = error.strerror
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET.search(name):
            text = text.replace(value, f"${name}")
    if code is not None and code not in text and not code.isdecimal():
        text = f"{text} ({code})"
    return text if len(text) <= _MOST_WORDS else f"{text[:_MOST_WORDS]} ..."
