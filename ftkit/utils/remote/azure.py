"""Azure Blob Storage over adlfs: its account, its settings, and what adlfs alone does not do."""

import functools
import logging
import os
import time
from typing import Any

from ftkit.errors import UserError

_ACCOUNT = ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME")
"""Either says which account it is; its credentials adlfs finds, too."""
_PADDING = "Incorrect padding"
"""All that its library says of a key that cannot be decoded."""
_RETRY_AFTER_S = 0.5
_LOOKS_EVERY_S = 0.5


def require_account() -> None:
    """Refuse to look for objects of nobody.

    Raises:
        UserError: no account is named.
    """
    if not any(os.environ.get(name) for name in _ACCOUNT):
        raise UserError(
            "az://CONTAINER/PREFIX does not say whose container it is: AZURE_STORAGE_ACCOUNT_NAME "
            "and AZURE_STORAGE_CONNECTION_STRING are both unset. Set the first to the storage "
            "account, beside AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or az login, or "
            "the second to all of it."
        )


def open_azure(block_bytes: int, **options: Any) -> Any:
    """The file system of this process.

    Raises:
        UserError: the connection string is none.
    """
    variables = {name: value for name, value in os.environ.items() if name.startswith("AZURE_")}
    return _opened(os.getpid(), frozenset(variables.items()), block_bytes, **options)


@functools.lru_cache(maxsize=1)
def _opened(
    process: int, variables: frozenset[tuple[str, str]], block_bytes: int, **options: Any
) -> Any:
    """One for all requests: adlfs 2026.8 keeps each until the process ends."""
    from adlfs import AzureBlobFileSystem

    logging.getLogger("azure").setLevel(logging.CRITICAL)  # it would print each failed sign-in
    try:
        fs = AzureBlobFileSystem(**options)
    except ValueError as error:
        raise UserError(
            "az:// cannot be used with what AZURE_STORAGE_CONNECTION_STRING is: "
            f"{str(error.__cause__ or error).rstrip('.')}. Try what "
            "az storage account show-connection-string prints."
        ) from None
    # adlfs passes on no settings, and Azure's library would wait 57 s before it gives up (12.31).
    config = fs.service_client._config
    config.max_block_size = config.max_single_put_size = block_bytes
    config.max_chunk_get_size = config.max_single_get_size = block_bytes
    config.use_byte_buffer = True  # aiohttp 3.14 closes a part of a file that was not taken
    retry = config.retry_policy
    retry.total_retries, retry.initial_backoff = 1, _RETRY_AFTER_S  # the rest is done here
    retry.increment_base = retry.random_jitter_range = 0
    # Of several blocks that fail the first is raised; of the others asyncio would print a stack.
    fs.loop.set_exception_handler(lambda *_: None)
    return fs


def blobs_below(fs: Any, root: str) -> dict[str, dict[str, Any]]:
    """Each object below a place, as `find` would have it.

    That takes a container which is not there for one without objects.
    """
    from fsspec.asyn import sync

    async def list_() -> dict[str, dict[str, Any]]:
        container, prefix, _ = fs.split_path(f"{root}/")
        async with fs.service_client.get_container_client(container) as client:
            blobs = client.list_blobs(name_starts_with=prefix, include=["metadata"])
            return {
                f"{container}/{blob.name}": {"size": blob.size, "etag": f'"{blob.etag}"'}
                async for blob in blobs
                if (blob.metadata or {}).get("hdi_isfolder") != "true"
            }

    found: dict[str, dict[str, Any]] = sync(fs.loop, list_)
    return found


def await_copy(fs: Any, target: str, patience_s: float) -> None:
    """Wait until an object that was copied is whole: a large one may take its time.

    Raises:
        OSError: it will not be, or not soon.
    """
    from fsspec.asyn import sync

    async def ask() -> str | None:
        container, name, _ = fs.split_path(target)
        async with fs.service_client.get_blob_client(container, name) as client:
            status: str | None = (await client.get_blob_properties()).copy.status
            return status

    deadline_s = time.monotonic() + patience_s
    while (status := sync(fs.loop, ask)) == "pending" and time.monotonic() < deadline_s:
        time.sleep(_LOOKS_EVERY_S)
    if status not in (None, "success"):
        raise OSError(f"the copy is {status}")


def first_words(text: str) -> str:
    """An error without the ids and the document that Azure's library has after it."""
    if text.startswith("DefaultAzureCredential failed"):
        return "no key, no SAS token and no sign-in was found"
    if text == _PADDING:
        return "the account key is none: it is not in base64"
    return text.partition(" RequestId:")[0].partition(" ErrorCode:")[0]
