"""Base models from the Hugging Face hub: what of a repository is downloaded, and where to."""

import re
import sys
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.extensions.hub.commands import DownloadOptions
from ftkit.extensions.hub.errors import explained, http_library
from ftkit.models.pretrained.model_files import (
    CARD,
    SETTINGS_FILES,
    WEIGHTS,
    incomplete_files,
    is_licence,
    missing_files,
    require_readable_weights,
)
from ftkit.models.pretrained.model_names import listed, suggestion
from ftkit.models.pretrained.places import ROOT, find_single_file, name_on_hub
from ftkit.models.pretrained.single_file import or_single_files, single_file
from ftkit.recipe.hubs import split_version
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import bytes_text
from ftkit.utils.files import free_disk_bytes
from ftkit.utils.progress import OnProgress, print_shown

_SETTINGS_TIMEOUT_S = 5.0
"""Time limit for an answer of the hub about settings, without which a plan is still possible."""


def download_model(options: DownloadOptions) -> int:
    """Download a model as `ftkit download` does; return the exit code.

    Raises:
        UserError: see `download`.
    """
    directory = download(options.repo_id, token=options.access_token, root=options.checkpoint_dir)
    print_shown(f"{directory} is ready: use it with --checkpoint_dir {directory}")
    return 0


def download(repo_id: str, *, token: str | None = None, root: Path = ROOT) -> Path:
    """Download a model from the hub ($HF_ENDPOINT) to root/ORG/NAME; return that directory.

    Fetches config, tokenizer and weights: safetensors where the repository has them, else
    PyTorch's .bin, never both. Files that are complete are kept. Arguments and errors are those of
    `Hub.download`; the token is never printed or written.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError

    wanted = name_on_hub(repo_id, root)
    if wanted is None:
        raise UserError(
            f"{repo_id!r} is not a model on the hub. Give a name such as "
            f"TinyLlama/TinyLlama_v1.1.{suggestion(repo_id)}"
        )
    directory, token = root / wanted, token or None
    repo_id, version = split_version(wanted)
    try:
        # Listed first, with sizes: what is too large for the disk is refused before anything is
        # fetched.
        info = HfApi(token=token).model_info(repo_id, revision=version, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        files = _files_to_fetch(repo_id, list(sizes))
        # By name: files under their final names are complete.
        absent = {file: sizes[file] for file in files if not (directory / file).is_file()}
        missing_bytes = _require_space(repo_id, directory, absent)
        with (
            Display(None, stream=sys.stderr) as display,
            display.phase(f"fetching {wanted}, {bytes_text(missing_bytes)}") as phase,
        ):
            # Also where no bar is drawn, as in a log.
            phase.announce()
            for names in (["config.json"], files):  # what cannot be trained is not downloaded
                snapshot_download(
                    repo_id, revision=info.sha, local_dir=directory, token=token,
                    allow_patterns=names,
                    tqdm_class=_byte_bars(phase.advance, sum(absent.values())),
                )  # fmt: skip
                require_readable_weights(directory)
    except (http_library().HTTPError, HFValidationError, OSError, RuntimeError) as error:
        raise explained(error, wanted, directory, lambda: suggestion(repo_id)) from error
    # Left by earlier attempts, under names that this one did not continue.
    for stale in incomplete_files(directory):
        stale.unlink()
    missing = missing_files(directory)
    if missing and find_single_file(str(directory), root=root) is None:
        raise UserError(
            f"{wanted} is in {directory} now, but its repository lacks {listed(missing)}. Choose "
            "another copy of the model."
        )
    return directory


def fetch_settings(repo_id: str, *, token: str | None, root: Path) -> UserError | None:
    """Download the settings and tokenizer of a model, a few MB; see `Hub.fetch_settings`."""
    directory = root / repo_id
    name, version = split_version(repo_id)
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        info = HfApi(token=token or None).model_info(
            name, revision=version, timeout=_SETTINGS_TIMEOUT_S
        )
        snapshot_download(
            name, revision=info.sha, local_dir=directory, token=token or None,
            allow_patterns=list(SETTINGS_FILES), etag_timeout=_SETTINGS_TIMEOUT_S,
            tqdm_class=_byte_bars(None),
        )  # fmt: skip
    except (http_library().HTTPError, HFValidationError, OSError, RuntimeError) as error:
        return explained(error, repo_id, directory, str)
    return None


def _files_to_fetch(repo_id: str, files: list[str]) -> list[str]:
    beside = [f for f in files if f in (*SETTINGS_FILES, CARD) or is_licence(f)]
    # The first format that the repository has: never safetensors and .bin of the same weights.
    for name in WEIGHTS:
        if name in files:
            return [*beside, name]
        if (index := f"{name}.index.json") in files:
            # Shards by their usual names: the index is not here yet.
            stem, suffix = name.split(".")
            shard = re.compile(rf"{stem}-\d+-of-\d+\.{suffix}")
            return [*beside, index, *(file for file in files if shard.fullmatch(file))]
    # Several are usually one model in several quantisations, of which the user has to choose.
    singles = [one for file in files if (one := single_file(Path(file)))]
    converted = [str(one.path) for one in singles]
    if len(converted) == 1:
        return [*beside, *converted]
    if converted:
        raise UserError(
            f"{repo_id} holds {len(converted)} {singles[0].format.title} files: "
            f"{listed(converted)}. Fetch one by "
            f"hf download {repo_id} {converted[0]} --local-dir DIRECTORY, and give its path."
        )
    raise UserError(
        f"{repo_id} holds no weights that ftkit reads (model.safetensors or pytorch_model.bin, "
        f"whole or in shards{or_single_files()}). Choose the original model instead of a "
        "converted copy."
    )


def _byte_bars(progress: OnProgress | None, total_bytes: int = 0) -> Any:
    """Return a class of progress bars for huggingface_hub that only calls `progress`."""
    # The library's own bars appear in spite of --quiet and stay silent in a log.
    from huggingface_hub.utils.tqdm import tqdm

    class ByteBar(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            # Version 2 has a second bar for the bytes on the wire. It starts at 0 where a download
            # goes on, and Xet sends fewer bytes than it writes.
            name = settings.get("name") or ""
            self._reports = settings.get("unit") == "B" and not name.endswith(".transfer")
            super().__init__(*args, **settings | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            if progress is None or not self._reports or n is None:
                return
            # Several threads download at once.
            with self.get_lock():
                self.n += n
                progress(int(self.n), total_bytes)

    return ByteBar


def _require_space(repo_id: str, directory: Path, absent_bytes: dict[str, int]) -> int:
    """Return the bytes left to download; UserError if they do not fit on the disk."""
    needed_bytes = sum(absent_bytes.values())
    # huggingface_hub 1 continues NAME.ETAG.incomplete. From version 2 on each attempt has a name
    # of its own, NAME.ETAG.RANDOM.incomplete, and begins the file again.
    resumed = [file for file in incomplete_files(directory) if file.name.count(".") == 2]
    needed_bytes -= sum(file.stat().st_size for file in resumed)
    free_bytes = free_disk_bytes(directory)
    if needed_bytes > free_bytes:
        raise UserError(
            f"{repo_id} needs {needed_bytes / 2**30:.1f} GiB in {directory}, but only "
            f"{free_bytes / 2**30:.1f} GiB are free there. Free some space, or make "
            f"{ROOT} a link to a larger disk."
        )
    # Incomplete files may be left of others than those that are absent.
    return max(needed_bytes, 0)
