"""Providers of object storage: how the file system of each is opened, and what it calls its errors.

Credentials come from where the provider's own programs look for them, and are never handled here.
"""

import importlib
import logging
import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from ftkit.errors import UserError
from ftkit.redaction import redacted
from ftkit.utils.remote import azure
from ftkit.utils.remote.urls import EXTRAS

PART_BYTES = 16 * 2**20
"""Of a large file, sent or fetched in one request; four of them at a time are in memory."""
_PARTS_AT_ONCE = 4
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 10, 60
_MOST_WORDS = 300
_SECRET = re.compile(
    r"SECRET|TOKEN|PASSWORD|ACCESS_KEY|ACCOUNT_KEY|CONNECTION_STRING", re.IGNORECASE
)
"""In names of environment variables whose values are not repeated."""
_SECRET_PART = re.compile(r"(?:AccountKey|sig)=([^;&]+)", re.IGNORECASE)
"""Of a connection string, and of a token that is part of a url."""
_LEAST_SECRET = 8
_FINAL_CODES = (
    "401",
    "AccountIsDisabled",
    "AuthenticationFailed",
    "AuthorizationFailure",
    "AuthorizationPermissionMismatch",
    "ContainerNotFound",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidAuthenticationInfo",
    "KeyBasedAuthenticationNotPermitted",
    "NoAuthenticationInformation",
    "NoSuchBucket",
    "PublicAccessNotPermitted",
    "SignatureDoesNotMatch",
)
_FINAL_ERRORS = ("AzureSigningError", "ClientAuthenticationError", "NoCredentialsError")
_NO_BUCKET = ("ContainerNotFound", "NoSuchBucket")
_EXISTS = ("PreconditionFailed", "ConditionalRequestConflict", "412")


def require_provider(scheme: str) -> None:
    """Refuse a url that nothing here reads.

    Raises:
        UserError: what reads it is not installed, or its account is named nowhere; says what to do.
    """
    extra, module = EXTRAS[scheme]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{scheme}:// is read and written by {module}, which is not installed ({error}). Try "
            f"pip install 'ftkit[{extra}]'."
        ) from None
    if scheme == "az":
        azure.require_account()


def open_storage(scheme: str) -> Any:
    """A file system without any memory of what it has seen."""
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "az":
        timeouts = {"connection_timeout": _CONNECT_TIMEOUT_S, "read_timeout": _READ_TIMEOUT_S}
        options |= timeouts | {"max_concurrency": _PARTS_AT_ONCE}
        return azure.open_azure(PART_BYTES, **options)
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


def found_below(scheme: str, fs: Any, root: str) -> dict[str, dict[str, Any]]:
    """What a file system says of each object below a place in a bucket; nothing: there is none.

    Raises:
        Exception: it cannot be listed; FileNotFoundError, if the provider says so of a place where
            nothing is.
    """
    if scheme == "az":
        return azure.blobs_below(fs, root)
    fs.invalidate_cache()
    found: dict[str, dict[str, Any]] = fs.find(root, detail=True)
    return found


def copy_object(scheme: str, fs: Any, source: str, target: str) -> None:
    """Copy an object inside the storage; at the end the copy is whole."""
    fs.cp_file(source, target)
    if scheme == "az":
        azure.await_copy(fs, target, _READ_TIMEOUT_S)


def fetch_options(scheme: str) -> dict[str, Any]:
    """What `get_file` is told, so that no more than some parts are in memory."""
    return {"max_concurrency": _PARTS_AT_ONCE} if scheme == "s3" else {}


def send_options(scheme: str) -> dict[str, Any]:
    """What `put_file` is told of parts; Azure's file system knows it since it was opened."""
    return {} if scheme == "az" else {"chunksize": PART_BYTES} | fetch_options(scheme)


def _code_of(error: BaseException | None) -> str | None:
    """What the storage calls an error."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code"))
        for name in ("error_code", "code"):
            if (code := getattr(error, name, None)) is not None:
                return str(getattr(code, "value", code))
        error = error.__cause__
    return None


def is_final(error: Exception) -> bool:
    """Whether asking again at once cannot help."""
    if isinstance(error, FileNotFoundError | PermissionError | FileExistsError):
        return True
    return type(error).__name__ in _FINAL_ERRORS or _code_of(error) in _FINAL_CODES


def is_missing_bucket(error: Exception) -> bool:
    """Whether there is no such bucket, rather than no such object."""
    return _code_of(error) in _NO_BUCKET


def is_there_already(error: Exception) -> bool:
    """Whether a conditional write was refused because the object is there."""
    return isinstance(error, FileExistsError) or _code_of(error) in _EXISTS


def describe_error(error: BaseException) -> str:
    """What went wrong, on one short line, without what the environment keeps secret."""
    text = azure.first_words(" ".join(str(error).split())) or type(error).__name__
    code = _code_of(error)
    is_written = "/upload/storage/" in text  # by Google's interface
    if code == "ContainerNotFound" or getattr(error, "strerror", None) == "No such container":
        text = "there is no such container"
    elif isinstance(error, FileNotFoundError) and (code == "NoSuchBucket" or is_written):
        text = "there is no such bucket"
    elif isinstance(error, OSError) and error.strerror:
        text = error.strerror
    for name, secret in _secrets():
        text = text.replace(secret, f"${name}")
    if code is not None and code not in text and not code.isdecimal():
        text = f"{text} ({code})"
    text = redacted(text)
    return text if len(text) <= _MOST_WORDS else f"{text[:_MOST_WORDS]} ..."


def _secrets() -> Iterator[tuple[str, str]]:
    """Names of variables, and what of their values is not repeated: as they have it or a url."""
    for name, value in os.environ.items():
        if _SECRET.search(name):
            parts = {
                part for found in _SECRET_PART.findall(value) for part in (found, unquote(found))
            }
            yield from ((name, text) for text in (value, *parts) if len(text) >= _LEAST_SECRET)
