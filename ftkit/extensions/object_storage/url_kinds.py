"""Kinds of urls that this extension reads and writes."""

from typing import TYPE_CHECKING

from ftkit.utils.urls import UrlKind

if TYPE_CHECKING:
    from ftkit.extensions.object_storage import store
    from ftkit.runs.url_runs import UrlRuns
    from ftkit.utils.url_files import UrlFiles

    _FILES: UrlFiles = store
    _RUNS: UrlRuns = store

_STORE = "ftkit.extensions.object_storage.store"
ROWS = (
    UrlKind("s3", "s3fs", "s3", "those that aws s3 ls takes", _STORE),
    UrlKind("gs", "gcsfs", "gs", "those of gcloud auth application-default login", _STORE),
    UrlKind(
        "az",
        "adlfs",
        "az",
        "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME beside "
        "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or az login",
        _STORE,
        # A container: Azure's name for a bucket.
        bucket=r"(?=.{3,63}$)[a-z0-9]+(?:-[a-z0-9]+)*",
        bucket_rule="names no container: that is 3 to 63 lower-case letters, digits and single "
        "hyphens. The account is named by AZURE_STORAGE_ACCOUNT_NAME. Try az://CONTAINER/out/lora.",
    ),
)
