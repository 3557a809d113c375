"""Errors of the Hugging Face hub as messages with a remedy."""

import errno
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from ftkit.errors import UserError
from ftkit.utils.names import nearest_directory


def http_library() -> ModuleType:
    """Import the library whose errors huggingface_hub raises: httpx, from version 2 on httpx2."""
    from huggingface_hub import errors

    base = errors.HfHubHTTPError.__bases__[0]
    return importlib.import_module(base.__module__.partition(".")[0])


def explained(
    error: Exception, repo_id: str, directory: Path, hint: Callable[[], str]
) -> UserError:
    """Turn a failed download into a message with a remedy. Never quotes requests or tokens.

    Args:
        error: of the HTTP library, huggingface_hub or the operating system.
        repo_id: of the model, with @VERSION where one was named.
        directory: of the download.
        hint: makes a sentence with names of similar models.
    """
    from huggingface_hub import constants, errors

    http = http_library()

    # huggingface_hub wraps every failure to connect in this error; its cause says more.
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # type: ignore[assignment]
    hub = constants.ENDPOINT
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    # First, because it is a RepositoryNotFoundError too.
    if isinstance(error, errors.GatedRepoError):
        return UserError(
            f"{repo_id} is gated: its owners grant access to accounts, one by one. Accept its "
            f"licence at {hub}/{repo_id} and give a token of that account: set HF_TOKEN or "
            "--access_token."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        name, _, version = repo_id.partition("@")
        return UserError(
            f"{name} at {hub} has no version {version}. Give a commit, a tag or a branch of it, or "
            f"{name} alone for the newest."
        )
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return UserError(
            f"There is no model {repo_id} at {hub}, or it is private; there is no local directory "
            "of this name. Check the spelling; for a private model set HF_TOKEN or "
            f"--access_token.{nearest_directory(repo_id) or hint()}"
        )
    if status in (401, 403):
        return UserError(
            f"{hub} refused access to {repo_id} (HTTP {status}): the token is wrong or may not "
            "read it. Make one that may at https://huggingface.co/settings/tokens, and give it "
            "as HF_TOKEN or --access_token."
        )
    if status is not None:
        return UserError(
            f"{hub} could not serve {repo_id} (HTTP {status}). Try again later; complete "
            "files are kept."
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UserError(
            f"{repo_id} is not complete in {directory}, and HF_HUB_OFFLINE forbids to download "
            "it. Unset HF_HUB_OFFLINE, or copy the model's files to that directory."
        )
    if isinstance(error, (http.ConnectError, http.ConnectTimeout, http.ProxyError)):
        return UserError(
            f"{repo_id} is not in {directory}, and {hub} cannot be reached from this machine. "
            "Check the network, set HF_ENDPOINT to a mirror, or copy the model's files from "
            f"another machine to that directory.{nearest_directory(repo_id)}"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"The disk of {directory} is full; {repo_id} is not complete. Free some space and "
            "run the command again: complete files are kept."
        )
    if isinstance(error, PermissionError) and error.errno is not None:  # Xet's have no number
        return UserError(
            f"{directory} cannot be written. Run the command in a directory of your own."
        )
    return UserError(
        f"The download of {repo_id} broke off ({type(error).__name__}). Run the command again: "
        f"complete files are kept. If that fails too, remove {directory} first."
    )
