"""Files of data sets on the Hugging Face hub, read by ranges at one commit."""

import importlib
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.extensions.hub.errors import http_library
from ftkit.recipe.hubs import HubName
from ftkit.utils.names import nearest

_COMMIT = re.compile(r"[0-9a-f]{40}")
_AT_ONCE_BYTES = 8 * 2**20
"""What is fetched at once of a file that is wanted as a whole."""
_CLOSED = "client has been closed"
_MOST_CLOSED = 5


@dataclass(frozen=True)
class _File:
    """A file, as the list of a commit has it."""

    size_bytes: int
    version: str
    """SHA-256 of a large file, else the git object; both are of the content."""


class DataSetFiles:
    """The files of a data set at one commit, by names below `directory`, as `HubFiles` says.

    Every method raises UserError if the hub cannot be reached, after some retries, or refuses.
    """

    def __init__(self, wanted: HubName) -> None:
        """Look up the commit and list its files, with $HF_TOKEN if the hub requires one.

        Args:
            wanted: its name, and what of it; without `data_files` all of its files.

        Raises:
            UserError: the data set, its version or the file is missing, or the hub does not answer.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        self._wanted = wanted
        # Now: the environment has the token of the recipe while the data are looked up.
        self._headers = _library().build_hf_headers()
        self._gives_ranges, self._lock = False, threading.Lock()
        try:
            commit = wanted.revision or ""
            if not _COMMIT.fullmatch(commit):
                commit = str(HfApi().dataset_info(wanted.name, revision=wanted.revision).sha)
            self.commit = commit
            listed = {
                entry.path: _File(entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
                for entry in HfApi().list_repo_tree(
                    wanted.name, recursive=True, revision=commit, repo_type="dataset"
                )
                if isinstance(entry, RepoFile)
            }
        except _failures() as error:
            raise _explained(error, wanted) from error
        self.directory = ""
        if wanted.data_files is not None:
            listed = _chosen(listed, wanted)
            # As of a pattern on this machine: names begin where those of all files part.
            self.directory = os.path.commonpath([name.rpartition("/")[0] for name in listed])
        self._files = {
            name.removeprefix(f"{self.directory}/"): file for name, file in listed.items()
        }

    def listing(self) -> Mapping[str, _File]:
        return self._files

    def entry(self, name: str) -> _File | None:
        """Look up a file; no request is sent, since what a commit holds never changes."""
        return self._files.get(name)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        size = self._files[name].size_bytes
        with self._lock:
            if not self._gives_ranges:
                self._require_ranges()
                self._gives_ranges = True
        url, headers, timeout_s = self._request(name, start, stop)
        response = self._answered(url, self._shown(name), headers=headers, timeout=timeout_s)
        self._check_status(response.status_code, name)
        content: bytes = response.content
        total = response.headers.get("Content-Range", "").rpartition("/")[2]
        if len(content) != stop - start or total not in (str(size), "*"):
            raise UserError(
                f"{self._shown(name)} has {size:,} bytes at the commit {self.commit}, but the hub "
                f"gave {len(content):,} of {total or 'no'} bytes for {stop - start:,}.\nTry again "
                "with --resume auto, or download the files and give their directory."
            )
        return content

    def download(self, name: str, path: Path) -> None:
        size = self._files[name].size_bytes
        partial = path.with_name(f"{path.name}.partial")
        with partial.open("wb") as file:
            for start in range(0, size, _AT_ONCE_BYTES):
                file.write(self.read_range(name, start, min(start + _AT_ONCE_BYTES, size)))
        partial.replace(path)

    def _request(self, name: str, start: int, stop: int) -> tuple[str, dict[str, str], float]:
        """Url, headers and time limit in seconds of a request for a range."""
        from huggingface_hub import constants, hf_hub_url

        url = hf_hub_url(
            self._wanted.name, self._in_repository(name), repo_type="dataset", revision=self.commit
        )
        # Ranges are of the bytes of the file, which nothing on the way may compress.
        range_ = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        return url, {**self._headers, **range_}, float(constants.HF_HUB_DOWNLOAD_TIMEOUT)

    def _require_ranges(self) -> None:
        """Refuse a server that answers with whole files, without reading one."""
        name = max(self._files, key=lambda name: self._files[name].size_bytes)
        if self._files[name].size_bytes < 2:
            return
        url, headers, timeout_s = self._request(name, 0, 1)
        try:
            asked = _library().http_stream_backoff("GET", url, headers=headers, timeout=timeout_s)
            with asked as response:
                status = response.status_code
                if status >= 400:
                    response.read()
                    _library().hf_raise_for_status(response)
        except _failures() as error:
            raise _explained(error, self._wanted, self._shown(name)) from error
        self._check_status(status, name)

    def _check_status(self, status: int, name: str) -> None:
        from huggingface_hub import constants

        if status != 206:
            raise UserError(
                f"{self._shown(name)} cannot be read by ranges: {constants.ENDPOINT} answers with "
                f"the whole file (HTTP {status}).\nDownload the files: hf download "
                f"{self._wanted.name} --repo-type dataset --local-dir DIRECTORY, and give that "
                "directory; or set HF_ENDPOINT to a server that gives ranges."
            )

    def _answered(self, url: str, shown: str, **request: Any) -> Any:
        """The response to a request that succeeded, retried for 23 s."""
        for attempt in range(_MOST_CLOSED):
            try:
                response = _library().http_backoff("GET", url, **request)
                _library().hf_raise_for_status(response)
                return response
            except _failures() as error:
                # The library closes the session of all threads where one cannot connect.
                if _CLOSED in str(error) and attempt + 1 < _MOST_CLOSED:
                    continue
                raise _explained(error, self._wanted, shown) from error
        raise AssertionError("the last attempt returns or raises")

    def _shown(self, name: str) -> str:
        return f"{self._wanted.name}/{self._in_repository(name)}"

    def _in_repository(self, name: str) -> str:
        return f"{self.directory}/{name}" if self.directory else name


def _library() -> Any:
    """Module with the functions of huggingface_hub for requests, slow to import."""
    return importlib.import_module("huggingface_hub.utils")


def _failures() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises; RuntimeError where its session is closed."""
    from huggingface_hub.errors import HFValidationError

    return (http_library().HTTPError, HFValidationError, OSError, RuntimeError)


def _chosen(listed: Mapping[str, _File], wanted: HubName) -> dict[str, _File]:
    """The files that `data_files` names."""
    from fsspec.utils import glob_translate

    pattern = str(wanted.data_files)
    is_one = re.compile(glob_translate(pattern)).match
    chosen = {name: file for name, file in listed.items() if name == pattern or is_one(name)}
    if not chosen:
        near = nearest(pattern, listed) or "'**/*.jsonl'"
        raise UserError(
            f"data_files is {pattern}, but {wanted.name} has no such file.\nGive a name from its "
            f"repository, or a pattern such as 'data/**'. Try --data.data_files {near}."
        )
    return chosen


def _explained(error: Exception, wanted: HubName, file: str | None = None) -> UserError:
    """Turn a failure into a message with a remedy. Never quotes requests or tokens.

    Args:
        error: of the HTTP library, huggingface_hub or the operating system.
        wanted: the data set.
        file: that was to be read; None: the list of files.
    """
    from huggingface_hub import constants, errors

    hub, name = constants.ENDPOINT, wanted.name
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    # First, because it is a RepositoryNotFoundError too.
    if isinstance(error, errors.GatedRepoError):
        return UserError(
            f"{name} is gated: its owners grant access to accounts, one by one.\nAccept its terms "
            f"at {hub}/datasets/{name} and give a token of that account: set HF_TOKEN or "
            "--access_token."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(
            f"data.revision is {wanted.revision}, but {name} has no such version.\nGive a commit, "
            "a tag or a branch of it, such as --data.revision main."
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return UserError(
            f"There is no data set {name} at {hub}, or it is private, and there is no local file "
            f"or directory {name}.\n"
            "Check the spelling; for a private one set HF_TOKEN or --access_token."
        )
    if isinstance(error, errors.EntryNotFoundError):
        return UserError(
            f"{file or name} is not there any more, at the commit with which the run began.\n"
            "Restore it, or start a new run with another --out_dir."
        )
    if status in (401, 403):
        return UserError(
            f"{hub} refused access to {file or name} (HTTP {status}): the token is wrong or may "
            "not read it.\nGive one that may: set HF_TOKEN or --access_token."
        )
    if status is not None:
        return UserError(
            f"{hub} could not serve {file or name} (HTTP {status}).\nTry again later, with "
            "--resume auto if the run has begun."
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UserError(
            f"{file or name} is read from {hub}, but HF_HUB_OFFLINE forbids it.\nUnset "
            "HF_HUB_OFFLINE, or give a directory with the files."
        )
    return UserError(
        f"{file or name} is not on this machine, and {hub} cannot be reached from it.\nCheck the "
        "network, set HF_ENDPOINT to a mirror, or download the files elsewhere and give their "
        f"directory: hf download {name} --repo-type dataset --local-dir DIRECTORY."
    )
