"""Uploads to the Hugging Face hub: files of a result, in one commit."""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.errors import UserError
from ftkit.models.pretrained.hub_errors import http_library
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import bytes_text
from ftkit.utils.progress import is_quiet, print_notice

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_WEIGHTS = re.compile(r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
"""Files that an earlier upload may have left, and that would be read beside the new ones."""


def upload(
    files: Mapping[str, Path | bytes],
    repo_id: str,
    *,
    public: bool,
    message: str,
    token: str | None = None,
) -> tuple[str, bool]:
    """Make a model repository, if there is none, and commit files to it.

    All of them appear at once. What an upload that broke off has sent is not sent again.

    Args:
        files: by their names; contents, or where they are.
        repo_id: ``ORG/NAME``.
        public: anyone may see it. A repository that is there keeps what it is.
        message: of the commit.
        token: of a Hugging Face account that may write. Default: $HF_TOKEN, or that of
            ``hf auth login``.

    Returns:
        Its address, and whether everybody sees it.

    Raises:
        UserError: there is no token, the hub refuses, or it cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
    from huggingface_hub.errors import HFValidationError

    token = token or get_token()
    if not token:
        raise UserError(
            f"{repo_id} cannot be written without a token. Make one that may write at "
            "https://huggingface.co/settings/tokens, and give it as HF_TOKEN, or by hf auth login."
        )
    api = HfApi(token=token)
    try:
        url = api.create_repo(repo_id, private=not public, exist_ok=True)
        there, is_public = _found(api, repo_id, public=public)
        with (
            Display(None, stream=sys.stderr) as display,
            display.phase("computing checksums", brief=True) as phase,
        ):
            additions = []
            for done, (name, content) in enumerate(files.items(), start=1):
                additions.append(CommitOperationAdd(name, content))
                phase.advance(done, len(files))
        # In the same commit: a repository never holds shards of two results.
        stale = [n for n in there if _WEIGHTS.fullmatch(n) and n not in files]
        deletions = [CommitOperationDelete(name) for name in stale]
        with _sending(files):
            # One commit, not upload_large_folder, which makes many and writes its state beside the
            # files. Large files that were sent before are known by their SHA-256.
            api.create_commit(repo_id, [*additions, *deletions], commit_message=message)
    except (http_library().HTTPError, HFValidationError, OSError, RuntimeError) as error:
        raise explained_upload(error, repo_id) from error
    return str(url), is_public


@contextmanager
def _sending(files: Mapping[str, Path | bytes]) -> Iterator[None]:
    """Show that files are sent: on a terminal by the bars of huggingface_hub, else by lines."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    sizes = (len(c) if isinstance(c, bytes) else c.stat().st_size for c in files.values())
    title = f"sending {len(files)} files, {bytes_text(sum(sizes))}"
    if sys.stderr.isatty() and not is_quiet():
        print_notice(title, sys.stderr)
        yield
        return
    were_shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with Display(None, stream=sys.stderr) as display, display.phase(title) as phase:
            phase.announce()
            yield
    finally:
        if were_shown:
            enable_progress_bars()


def _found(api: "HfApi", repo_id: str, *, public: bool) -> tuple[list[str], bool]:
    """Return the file names of a repository and whether it is public; refuse an unexpected one."""
    info = api.model_info(repo_id)
    if not info.private and not public:
        raise UserError(
            f"{repo_id} is public: everybody would see this result. Confirm with --public, or "
            "choose another name."
        )
    return [file.rfilename for file in info.siblings or []], not info.private


def explained_upload(error: Exception, repo_id: str) -> UserError:
    """Turn a failed upload into a message with a remedy. Never quotes requests or tokens.

    Args:
        error: of the HTTP library, huggingface_hub or the operating system.
        repo_id: where to.
    """
    from huggingface_hub import constants, errors

    http = http_library()

    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # of one file among several
    hub = constants.ENDPOINT
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    again = "Run the command again: finished uploads are not repeated."
    if isinstance(error, errors.HFValidationError):
        return UserError(
            f"{repo_id} is not the name of a repository. Try ORG/NAME, such as me/my-model."
        )
    if status in (401, 403, 404):
        return UserError(
            f"{hub} refused to write {repo_id} (HTTP {status}): the token is wrong, read-only, or "
            "belongs to an account without write access. Create one with write access at "
            "https://huggingface.co/settings/tokens, and give it as HF_TOKEN or --access_token."
        )
    if status is not None:
        return UserError(f"{hub} rejected {repo_id} (HTTP {status}). {again}")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UserError(f"{repo_id} is not written: HF_HUB_OFFLINE forbids it. Unset it.")
    if isinstance(error, (http.ConnectError, http.ConnectTimeout, http.ProxyError)):
        return UserError(
            f"{hub} cannot be reached from this machine. Check the network, or push from another "
            "machine that has the files."
        )
    return UserError(f"The upload of {repo_id} broke off ({type(error).__name__}). {again}")
