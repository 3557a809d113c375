"""`ftkit push`: uploads a result and its model card to the Hugging Face hub, in one commit."""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.errors import UserError
from ftkit.evaluation.result import Result, find_result
from ftkit.extensions.hub.errors import http_library
from ftkit.extensions.publish.commands import PushOptions
from ftkit.extensions.publish.model_card import card_files, with_name
from ftkit.models.pretrained.model_files import CARD, read_json
from ftkit.models.pretrained.places import hub_name
from ftkit.recipe.hubs import split_version
from ftkit.recipe.peft_names import CONFIG as ADAPTER_CONFIG
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import bytes_text
from ftkit.utils.progress import is_quiet, print_notice, print_shown

_BASE = "base_model_name_or_path"
"""Key by which an adapter names its base model."""


def push(options: PushOptions) -> int:
    """Put a result onto the hub, all of it in one commit; return the exit code.

    Args:
        options: which, where to, and who may see it.

    Raises:
        UserError: it cannot be used by others as it is, or the hub refuses it.
    """
    place = Path(options.result).expanduser()
    kind: str
    # A model's directory may hold GGUF files besides: with a config.json it is a model.
    if any(place.glob("*.gguf")) and not (place / "config.json").is_file():
        kind, files = "GGUF file", _files_in(place)
        if CARD in files:
            text = (place / CARD).read_text(encoding="utf-8")
            files[CARD] = with_name(text, options.repo_id, None).encode()
    else:
        result = find_result(options.result)
        kind, files = result.kind, _files_of(result, options)
    if options.dry_run:
        _list_files(files, options)
        return 0
    url, is_public = upload(
        files,
        options.repo_id,
        public=options.public,
        message=options.message or f"{kind}, trained with ftkit",
        token=options.access_token,
    )
    published = {"url": url, "public": is_public}
    seen = "public" if is_public else "private"
    print_shown(
        json.dumps(published) if options.format == "json" else f"uploaded to {url} ({seen})"
    )
    return 0


def _list_files(files: Mapping[str, Path | bytes], options: PushOptions) -> None:
    """Print what an upload would commit."""
    from huggingface_hub import constants

    url = f"{constants.ENDPOINT}/{options.repo_id}"
    sizes = {name: _size_bytes(content) for name, content in sorted(files.items())}
    if options.format == "json":
        print(json.dumps({"url": url, "public": options.public, "files_bytes": sizes}))
        return
    seen = "public" if options.public else "private, if it is new"
    print_shown(f"would upload to {url} ({seen}), in one commit:")
    width = max(map(len, sizes))
    for name, size_bytes in sizes.items():
        print_shown(f"  {name:{width}}  {bytes_text(size_bytes):>9}")
    print_shown(f"{len(sizes)} files, {bytes_text(sum(sizes.values()))}; nothing was sent")


def _size_bytes(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _files_in(directory: Path) -> dict[str, Path | bytes]:
    return {
        file.name: file
        for file in sorted(directory.iterdir())
        if file.is_file() and not file.name.startswith(".")
    }


def _files_of(result: Result, options: PushOptions) -> dict[str, Path | bytes]:
    """Files of an adapter or a model, as they are published."""
    _require_result(result, options)
    files = _files_in(result.directory)
    base = _base_on_hub(result, options) if result.kind == "adapter" else None
    if base is not None:
        # The file here names a directory of this machine.
        base, version = split_version(base)
        # PEFT's key for the version of the base model, which its AutoPeftModel loads.
        settings = read_json(result.directory / ADAPTER_CONFIG) | {_BASE: base, "revision": version}
        files[ADAPTER_CONFIG] = (json.dumps(settings, indent=2) + "\n").encode()
    return {**files, **_card(result, options.repo_id, base)}


def _require_result(result: Result, options: PushOptions) -> None:
    """Refuse what is not a result, or not one that others can read."""
    if result.kind == "checkpoint":
        raise UserError(
            f"{result.name} is a checkpoint of a full fine-tune, in shards that only ftkit reads. "
            f"Try ftkit export {result.name} --format hf --out out/hf, then ftkit push out/hf "
            f"{options.repo_id}."
        )
    is_base = result.name.startswith("embedded:") or hub_name(result.name) is not None
    if result.kind == "model" and result.recipe is None and is_base:
        raise UserError(
            f"{result.name} is a base model without training. Name a run, such as "
            "out/finetune/lora, or the output of ftkit merge or ftkit export."
        )


def _base_on_hub(result: Result, options: PushOptions) -> str:
    """ORG/NAME from which others take the base model, with @VERSION."""
    known = options.base or (hub_name(result.base) if result.base else None)
    if known is None:
        raise UserError(
            f"{result.name} is an adapter of {result.base}, which others cannot load. Give its "
            "name on the hub with --base ORG/NAME, or make one model of both with ftkit merge "
            f"{result.name} --out out/merged, and push that."
        )
    return known


def _card(result: Result, repo_id: str, base: str | None) -> Mapping[str, bytes]:
    """The model card by its name, with the name that the result gets."""
    file = result.directory / CARD
    if file.is_file():
        # The card beside the result may have been edited: it is taken as it is.
        text = file.read_text(encoding="utf-8")
    else:  # of a run of an earlier version
        found = card_files(result, None, "adapter" if result.kind == "adapter" else "hf")
        if not found:
            return {}
        text = found[CARD].decode()
    return {CARD: with_name(text, repo_id, base).encode()}


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

    The files appear together. A repeated upload skips what an interrupted one has sent.

    Args:
        files: by their names; contents, or where they are.
        repo_id: ``ORG/NAME``.
        public: anyone may see it. An existing repository stays public or private.
        message: of the commit.
        token: of a Hugging Face account that may write. Default: $HF_TOKEN, or that of
            ``hf auth login``.

    Returns:
        Its address, and whether it is public.

    Raises:
        UserError: the token is missing, the hub refuses the upload, or it cannot be reached.
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
        # After create_repo, which leaves the visibility of an existing repository as it is.
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

    size_bytes = sum(map(_size_bytes, files.values()))
    title = f"sending {len(files)} files, {bytes_text(size_bytes)}"
    if sys.stderr.isatty() and not is_quiet():
        print_notice(title, sys.stderr)
        yield
        return
    # Bars redraw their line, which a log file would keep in every state.
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
    # The hub answers 404, too, for a repository that the token must not see.
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
