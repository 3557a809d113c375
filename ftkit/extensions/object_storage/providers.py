"""Providers of object storage: their file systems, and what their errors mean.

Credentials are found where the provider's own programs look for them, and are never handled here.
"""

import functools
import importlib
import logging
import os
import re
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from ftkit.errors import UserError
from ftkit.redaction import redacted
from ftkit.utils.urls import URL_KINDS

PART_BYTES = 16 * 2**20
"""Size of a part of a large file in one request; four parts are in memory at a time."""
_PARTS_AT_ONCE = 4
# Seconds without a single byte, so that a slow connection does not run into them.
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 10, 60
_MOST_WORDS = 300
_SECRET = re.compile(
    r"SECRET|TOKEN|PASSWORD|ACCESS_KEY|ACCOUNT_KEY|CONNECTION_STRING", re.IGNORECASE
)
"""Part of the name of an environment variable whose value is secret."""
_SECRET_PART = re.compile(r"(?:AccountKey|sig)=([^;&]+)", re.IGNORECASE)
"""Secret part of a connection string, or of a url with a token."""
# Characters: a shorter value would also be replaced inside ordinary words.
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
_AZURE_ACCOUNT = ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME")
"""Either names the account; adlfs itself finds the credentials."""
_BAD_KEY = "Incorrect padding"
"""Message of Azure's library for a key that cannot be decoded."""
_AZURE_RETRY_S = 0.5
_COPY_POLL_S = 0.5


def require_provider(scheme: str) -> None:
    """Refuse a url whose library or account is missing. See `ftkit.runs.url_runs`."""
    kind = URL_KINDS.get(scheme)
    assert kind is not None, scheme
    try:
        importlib.import_module(kind.library)
    except ImportError as error:
        raise UserError(
            f"{scheme}:// is read and written by {kind.library}, which is not installed ({error}). "
            f"Try pip install 'ftkit[{kind.extra}]'."
        ) from None
    if scheme == "az":
        _require_azure_account()


def open_storage(scheme: str) -> Any:
    """Open a file system that caches no listings."""
    # No instance cache: fsspec would return the same object, with credentials that may have
    # expired.
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "az":
        timeouts = {"connection_timeout": _CONNECT_TIMEOUT_S, "read_timeout": _READ_TIMEOUT_S}
        options |= timeouts | {"max_concurrency": _PARTS_AT_ONCE}
        return _open_azure(PART_BYTES, **options)
    return _open_s3(options) if scheme == "s3" else _open_gs(options)


def _open_s3(options: dict[str, Any]) -> Any:
    import s3fs

    retries = {"mode": "standard", "max_attempts": 2}  # `Objects` retries as well
    config = {
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "read_timeout": _READ_TIMEOUT_S,
        "retries": retries,
    }
    fs = s3fs.S3FileSystem(config_kwargs=config, **options)
    # s3fs would retry by itself, five times by default.
    fs.retries = 1
    return fs


def _open_gs(options: dict[str, Any]) -> Any:
    import aiohttp
    from gcsfs.core import GCSFileSystem

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it would print a traceback per error
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        options["token"] = "anon"  # an emulator has no accounts, and looking for one takes long
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_READ_TIMEOUT_S
    )
    # The class that gcsfs registers by default asks over gRPC what kind a bucket is, and waits for
    # a minute if nobody answers, as on an emulator.
    return GCSFileSystem(requests_timeout=timeout, consistency="md5", **options)


def found_below(scheme: str, fs: Any, root: str) -> dict[str, dict[str, Any]]:
    """The entry of each object below a place in a bucket.

    Raises:
        Exception: it cannot be listed; some providers raise FileNotFoundError if there are
            no objects.
    """
    if scheme == "az":
        return _blobs_below(fs, root)
    fs.invalidate_cache()
    found: dict[str, dict[str, Any]] = fs.find(root, detail=True)
    return found


def copy_object(scheme: str, fs: Any, source: str, target: str) -> None:
    """Copy an object inside the storage, and wait until the copy is complete."""
    fs.cp_file(source, target)
    if scheme == "az":
        _await_azure_copy(fs, target, _READ_TIMEOUT_S)


def fetch_options(scheme: str) -> dict[str, Any]:
    """Options of `get_file` that limit the parts in memory."""
    return {"max_concurrency": _PARTS_AT_ONCE} if scheme == "s3" else {}


def send_options(scheme: str) -> dict[str, Any]:
    """Options of `put_file` that limit the parts in memory; Azure's are set when it is opened."""
    return {} if scheme == "az" else {"chunksize": PART_BYTES} | fetch_options(scheme)


def _code_of(error: BaseException | None) -> str | None:
    """Return the provider's code of an error; None: it has none."""
    # fsspec raises errors of Python from those of the provider's library.
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
    """Return whether a retry cannot help."""
    if isinstance(error, FileNotFoundError | PermissionError | FileExistsError):
        return True
    return type(error).__name__ in _FINAL_ERRORS or _code_of(error) in _FINAL_CODES


def is_missing_bucket(error: Exception) -> bool:
    """Return whether the bucket is missing, rather than the object."""
    return _code_of(error) in _NO_BUCKET


def is_there_already(error: Exception) -> bool:
    """Return whether a conditional write was refused because the object exists."""
    return isinstance(error, FileExistsError) or _code_of(error) in _EXISTS


def describe_error(error: BaseException) -> str:
    """Describe an error on one short line, without secrets of the environment."""
    text = _without_azure_ids(" ".join(str(error).split())) or type(error).__name__
    code = _code_of(error)
    is_written = "/upload/storage/" in text  # path of uploads in Google's API
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
    """Yield names of environment variables with their secret values, plain and url-decoded."""
    for name, value in os.environ.items():
        if _SECRET.search(name):
            parts = {
                part for found in _SECRET_PART.findall(value) for part in (found, unquote(found))
            }
            yield from ((name, text) for text in (value, *parts) if len(text) >= _LEAST_SECRET)


# --- Azure Blob Storage: what adlfs alone does not do ---------------------------------------------


def _require_azure_account() -> None:
    """Raise a UserError if no account is named."""
    # A url names the container alone.
    if not any(os.environ.get(name) for name in _AZURE_ACCOUNT):
        raise UserError(
            "az://CONTAINER/PREFIX does not say whose container it is: AZURE_STORAGE_ACCOUNT_NAME "
            "and AZURE_STORAGE_CONNECTION_STRING are both unset. Set the first to the storage "
            "account, beside AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or az login, or "
            "the second to all of it."
        )


def _open_azure(block_bytes: int, **options: Any) -> Any:
    """Open the file system of this process, with settings that adlfs does not pass on."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("AZURE_")}
    # By process, because the thread of its event loop does not survive a fork; by variables,
    # because credentials may change.
    return _azure_of_process(os.getpid(), frozenset(variables.items()), block_bytes, **options)


@functools.lru_cache(maxsize=1)
def _azure_of_process(
    process: int, variables: frozenset[tuple[str, str]], block_bytes: int, **options: Any
) -> Any:
    """One file system for all requests: adlfs keeps each until the process ends (2026.8)."""
    from adlfs import AzureBlobFileSystem

    logging.getLogger("azure").setLevel(logging.CRITICAL)  # it would print each failed sign-in
    try:
        fs = AzureBlobFileSystem(**options)
    except ValueError as error:
        raise UserError(
            "az:// cannot be used: AZURE_STORAGE_CONNECTION_STRING is not a connection string: "
            f"{str(error.__cause__ or error).rstrip('.')}. Try what az storage account "
            "show-connection-string prints."
        ) from None
    # adlfs passes on no settings, and Azure's library would wait 57 s before it gives up (12.31).
    config = fs.service_client._config
    config.max_block_size = config.max_single_put_size = block_bytes
    config.max_chunk_get_size = config.max_single_get_size = block_bytes
    config.use_byte_buffer = True  # aiohttp 3.14 closes the file of a part that must be sent again
    retry = config.retry_policy
    retry.total_retries, retry.initial_backoff = 1, _AZURE_RETRY_S  # `Objects` retries as well
    retry.increment_base = retry.random_jitter_range = 0
    # If several blocks fail, the first error is raised; asyncio would print the others.
    fs.loop.set_exception_handler(lambda *_: None)
    return fs


def _blobs_below(fs: Any, root: str) -> dict[str, dict[str, Any]]:
    """Return entries like `find`, which does not tell a missing container from an empty one."""
    from fsspec.asyn import sync

    async def list_() -> dict[str, dict[str, Any]]:
        container, prefix, _ = fs.split_path(f"{root}/")
        async with fs.service_client.get_container_client(container) as client:
            blobs = client.list_blobs(name_starts_with=prefix, include=["metadata"])
            return {
                f"{container}/{blob.name}": {"size": blob.size, "etag": f'"{blob.etag}"'}
                async for blob in blobs
                # Accounts with a hierarchical namespace have a blob for each directory.
                if (blob.metadata or {}).get("hdi_isfolder") != "true"
            }

    found: dict[str, dict[str, Any]] = sync(fs.loop, list_)
    return found


def _await_azure_copy(fs: Any, target: str, patience_s: float) -> None:
    """Wait until a copied object is complete: the request for a large one returns earlier."""
    from fsspec.asyn import sync

    async def ask() -> str | None:
        container, name, _ = fs.split_path(target)
        async with fs.service_client.get_blob_client(container, name) as client:
            status: str | None = (await client.get_blob_properties()).copy.status
            return status

    deadline_s = time.monotonic() + patience_s
    while (status := sync(fs.loop, ask)) == "pending" and time.monotonic() < deadline_s:
        time.sleep(_COPY_POLL_S)
    if status not in (None, "success"):
        raise OSError(f"the copy is {status}")


def _without_azure_ids(text: str) -> str:
    """Azure's message without the ids and the document that follow it."""
    if text.startswith("DefaultAzureCredential failed"):
        return "no key, no SAS token and no sign-in was found"
    if text == _BAD_KEY:
        return "the account key is not in base64"
    return text.partition(" RequestId:")[0].partition(" ErrorCode:")[0]
