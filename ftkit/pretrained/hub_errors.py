"""Failures of downloads, in words that say what to do."""

import errno
from collections.abc import Callable
from pathlib import Path

from ftkit.errors import UserError


def explained(
    error: Exception, repo_id: str, directory: Path, hint: Callable[[], str]
) -> UserError:
    """The same failure in words that say what to do. Never quotes requests or tokens.

    Args:
        error: of httpx, huggingface_hub or the operating system.
        repo_id: what was to be downloaded.
        directory: where to.
        hint: names of models that may have been meant, as a sentence.
    """
    import httpx
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # type: ignore[assignment]
    hub = constants.ENDPOINT
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError):
        return UserError(
            f"{repo_id} is gated: its owners grant access to accounts, one by one. Accept its "
            f"licence at {hub}/{repo_id} and give a token of that account: set HF_TOKEN or "
            "--access_token."
        )
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return UserError(
            f"There is no model {repo_id} at {hub}, or it is private; no directory here has "
            "this name. Check the spelling; for a private model set HF_TOKEN or "
            f"--access_token.{hint()}"
        )
    if status in (401, 403):
        return UserError(
            f"{hub} refused access to {repo_id} (HTTP {status}): the token is wrong or may not "
            "read it. Make one that may at https://huggingface.co/settings/tokens, and give it "
            "as HF_TOKEN or --access_token."
        )
    if status is not None:
        return UserError(
            f"{hub} could not serve {repo_id} (HTTP {status}). Try again later; a download goes "
            "on where it stopped."
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UserError(
            f"{repo_id} is not complete in {directory}, and HF_HUB_OFFLINE forbids to download "
            "it. Unset HF_HUB_OFFLINE, or copy the model's files to that directory."
        )
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)):
        return UserError(
            f"{repo_id} is not in {directory}, and {hub} cannot be reached from this machine. "
            "Check the network, set HF_ENDPOINT to a mirror, or copy the model's files from "
            "another machine to that directory."
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"The disk of {directory} is full; {repo_id} is not complete. Free some space and "
            "run the command again: it goes on where it stopped."
        )
    if isinstance(error, PermissionError):
        return UserError(
            f"{directory} cannot be written. Run the command in a directory of your own."
        )
    return UserError(
        f"The download of {repo_id} broke off ({type(error).__name__}). Run the command again: "
        f"it goes on where it stopped. If that fails too, remove {directory} first."
    )
