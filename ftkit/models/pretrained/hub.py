"""The Hugging Face hub: finds the directory of a model by its name, or downloads it."""

import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.models.pretrained.hub_errors import explained, http_library
from ftkit.models.pretrained.model_files import (
    CARD,
    DOWNLOADED,
    SETTINGS_FILES,
    WEIGHTS,
    has_tokenizer,
    incomplete_files,
    is_licence,
    licence_files,
    missing_files,
    require_readable_weights,
    weight_files,
)
from ftkit.models.pretrained.model_names import listed, suggestion
from ftkit.models.pretrained.single_file import SingleFile, or_single_files, single_file
from ftkit.recipe.implementations import HF, layout_in
from ftkit.recipe.options import DownloadOptions
from ftkit.utils import embedded
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import bytes_text
from ftkit.utils.damaged_files import require_regular
from ftkit.utils.files import free_disk_bytes
from ftkit.utils.progress import OnProgress, print_shown
from ftkit.utils.url_files import url_files
from ftkit.utils.urls import is_url, local_path

ROOT = Path("checkpoints")
"""Directory of downloads, as in LitGPT: checkpoints/ORG/NAME."""

EMBEDDED_MODELS = ("quickstart",)

_SETTINGS_TIMEOUT_S = 5.0
"""Time limit for an answer of the hub about settings, without which a plan is still possible."""
# OWNER/NAME, neither of which begins with a dot: ../x and ./x are paths. Behind @ a version.
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@\w[\w.-]*)?")


def find_or_download(name: str, *, token: str | None = None, root: Path = ROOT) -> Path:
    """Return the complete directory of a base model, downloading it if it is not here.

    Args:
        name: a directory, a file with a whole model or a directory with one (converted once),
            ``ORG/NAME`` on the hub or ``ORG/NAME@VERSION`` (downloaded to root, also if given as
            LitGPT's ``checkpoints/ORG/NAME``), or ``embedded:NAME``. An interrupted download is
            continued: complete files are kept.
        token: of a Hugging Face account, for gated models. Default: $HF_TOKEN.
        root: directory of downloads.

    Raises:
        UserError: the model does not exist, its directory lacks files, or the download fails.
    """
    # Models on this machine come first, so that a complete one needs no network.
    if directory := find_here(name, root=root):
        return directory
    if is_url(name):
        raise UserError(
            f"checkpoint_dir {name} holds no complete base model. Name the url below which "
            "config.json, a tokenizer and the weights lie, such as s3://BUCKET/models/NAME."
        )
    if file := find_single_file(name, root=root):
        return _convert(file, root)
    path = Path(name).expanduser()
    repo_id = _repository(name, root)
    # The directory of a download may be incomplete, and is then continued; no other is.
    download_path = root / repo_id if repo_id else None
    if path.is_dir() and (download_path is None or path.resolve() != download_path.resolve()):
        raise UserError(
            f"checkpoint_dir {name} is not a complete base model: {listed(missing_files(path))} "
            "is missing. Give a directory with config.json, a tokenizer and the weights "
            f"(model.safetensors, pytorch_model.bin or their shards){or_single_files()}, or "
            "LitGPT's model_config.yaml and lit_model.pth."
        )
    if repo_id:
        # Only after the download is it known whether the repository holds a single file.
        directory = download(repo_id, token=token, root=root)
        file = find_single_file(str(directory), root=root)
        return directory if file is None else _convert(file, root)
    what = "is a file, not a directory" if path.is_file() else "does not exist"
    raise UserError(
        f"checkpoint_dir {name} {what}. Give the directory of a base model{or_single_files()}, "
        f"or a hub name such as TinyLlama/TinyLlama_v1.1.{suggestion(name)}"
    )


def find_here(name: str, *, root: Path = ROOT) -> Path | None:
    """Return the complete directory of a base model, or of a converted file; None if not here.

    Raises:
        UserError: the model cannot be read or trained, or the embedded model does not exist.
    """
    if name.startswith("embedded:"):
        return _embedded(name)
    if is_url(name):
        directory = local_path(name)
        url_files(directory).fetch_whole(directory)
        name = str(directory)
    for candidate in _places(name, root):
        if candidate.is_dir() and not missing_files(candidate):
            require_readable_weights(candidate)
            return candidate
    file = find_single_file(name, root=root)
    return None if file is None else _converted(file, root)


def find_single_file(name: str, *, root: Path = ROOT) -> SingleFile | None:
    """Return the file with a whole model that a name means.

    It is a path, or in a directory without another model.

    Args:
        name: as `find_or_download` takes it.
        root: directory of downloads.

    Raises:
        UserError: the directory holds several such files.
    """
    for candidate in _places(name, root):
        is_file = candidate.exists() and not candidate.is_dir()
        if is_file and (found := single_file(candidate)) is not None:
            require_regular(candidate)
            return found
        # An interrupted download may still lack the files that make it another model.
        if not candidate.is_dir() or incomplete_files(candidate):
            continue
        files = [one for path in sorted(candidate.iterdir()) if (one := single_file(path))]
        if not files or layout_in(candidate) != HF or weight_files(candidate):
            continue
        if len(files) > 1:
            raise UserError(
                f"checkpoint_dir {name} holds {len(files)} {files[0].format.title} files: "
                f"{listed([file.path.name for file in files])}. Give one of them, such as "
                f"{files[0].path}."
            )
        return files[0]
    return None


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
    PyTorch's .bin, never both. Files that are complete are kept.

    Args:
        repo_id: ``ORG/NAME``, or ``ORG/NAME@VERSION``: a commit, a tag or a branch.
        token: of a Hugging Face account. Default: $HF_TOKEN. Never printed or written.
        root: directory of downloads.

    Raises:
        UserError: no such model, no access, no connection or no room; with a remedy.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError

    wanted = _repository(repo_id, root)
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


# A command needs these settings in several places, and requests them once.
@lru_cache
def fetch_settings(name: str, *, token: str | None = None, root: Path = ROOT) -> UserError | None:
    """Download the settings and tokenizer of a model, a few MB, if the hub answers.

    A later download continues with them. Without them a plan may still be possible, so a failure is
    returned, not raised.

    Args:
        name: as `find_or_download` takes it; nothing is done for other names.
        token: of a Hugging Face account, for gated models. Default: $HF_TOKEN.
        root: directory of downloads.

    Returns:
        Error of the failed download, with a remedy; None: nothing failed.
    """
    wanted = _repository(name, root)
    # A directory or file here has its settings already, or never will.
    if wanted is None or Path(name).expanduser().is_dir() or find_single_file(name, root=root):
        return None
    directory = root / wanted
    repo_id, version = split_version(wanted)
    if (directory / "config.json").is_file() and has_tokenizer(directory):
        return None
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        info = HfApi(token=token or None).model_info(
            repo_id, revision=version, timeout=_SETTINGS_TIMEOUT_S
        )
        snapshot_download(
            repo_id, revision=info.sha, local_dir=directory, token=token or None,
            allow_patterns=list(SETTINGS_FILES), etag_timeout=_SETTINGS_TIMEOUT_S,
            tqdm_class=_byte_bars(None),
        )  # fmt: skip
    except (http_library().HTTPError, HFValidationError, OSError, RuntimeError) as error:
        return explained(error, wanted, directory, str)
    return None


def settings_directory(name: str, *, root: Path = ROOT) -> Path | None:
    """Return the directory with the settings of a base model; None if it is not here.

    Raises:
        UserError: the embedded model does not exist, a directory holds several such files, or the
            weights are stored in a form that cannot be read.
    """
    if name.startswith("embedded:"):
        return _embedded(name)
    if file := find_single_file(name, root=root):
        return _converted(file, root)
    plain = name.removeprefix("./").rstrip("/").removeprefix(f"{root}/")
    # Settings are enough here, so the directory may be one without weights.
    for candidate in (Path(name).expanduser(), root / plain):
        if any((candidate / file).is_file() for file in ("config.json", "model_config.yaml")):
            require_readable_weights(candidate)
            return candidate
    return None


def hub_name(name: str, *, root: Path = ROOT) -> str | None:
    """Return ORG/NAME of a base model from the hub, with @VERSION; None if it is from elsewhere.

    Args:
        name: as `find_or_download` takes it.
        root: directory of downloads.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        return _repository(name, root)
    *_, owner, model = path.resolve().parts
    # Every directory has a parent: only what huggingface_hub has left shows where it is from.
    return f"{owner}/{model}" if (path / DOWNLOADED).is_dir() else None


def split_version(name: str) -> tuple[str, str | None]:
    """Split ORG/NAME@VERSION; None: it names no version."""
    repo_id, _, version = name.partition("@")
    return repo_id, version or None


def _embedded(name: str) -> Path:
    short_name = name.removeprefix("embedded:")
    if short_name not in EMBEDDED_MODELS:
        valid = ", ".join(f"embedded:{known}" for known in EMBEDDED_MODELS)
        raise UserError(f"checkpoint_dir {name} does not exist. Embedded in ftkit: {valid}.")
    return embedded.path(short_name) / "model"


def _places(name: str, root: Path) -> list[Path]:
    """Paths on this machine where a model of this name may be."""
    repo_id = _repository(name, root)
    return [Path(name).expanduser(), *([root / repo_id] if repo_id else [])]


def _licences_of(file: Path) -> dict[str, bytes]:
    """Licence files beside a file with a model, by name; none if they may be of another one."""
    # People collect such files of many models in one directory.
    if sum(other.suffix.lower() == file.suffix.lower() for other in file.parent.iterdir()) > 1:
        return {}
    return {licence.name: licence.read_bytes() for licence in licence_files(file.parent)}


def _convert(file: SingleFile, root: Path) -> Path:
    return file.convert(root, _licences_of(file.path))


def _converted(file: SingleFile, root: Path) -> Path | None:
    """Return the directory of an earlier conversion."""
    place = file.conversion_place(root)
    return place if place.is_dir() else None


def _repository(name: str, root: Path) -> str | None:
    """Return ORG/NAME, with @VERSION, if the name can mean a model on the hub."""
    name = name.removeprefix("./").rstrip("/")
    # LitGPT's recipes name models by the path of their download, checkpoints/ORG/NAME.
    for prefix in (f"{root}/", f"{ROOT}/"):
        name = name.removeprefix(prefix)
    return name if _REPOSITORY.fullmatch(name) and not single_file(Path(name)) else None


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
