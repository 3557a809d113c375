"""The Hugging Face hub: finds the directory of a model by its name, or downloads it."""

import json
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

from ftkit.errors import UserError
from ftkit.models.pretrained.hub_errors import explained, http_library, nearest_names
from ftkit.models.pretrained.single_file import SingleFile, or_single_files, single_file
from ftkit.models.pretrained.stored_forms import quantized_weights, stored_form
from ftkit.recipe.implementations import HF, layout_in
from ftkit.recipe.options import DownloadOptions
from ftkit.utils import embedded
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import bytes_text
from ftkit.utils.damaged_files import reading, require_regular
from ftkit.utils.files import free_disk_bytes
from ftkit.utils.progress import OnProgress, print_shown
from ftkit.utils.url_files import url_files
from ftkit.utils.urls import is_url, local_path

ROOT = Path("checkpoints")
"""Directory of downloads, as in LitGPT: checkpoints/ORG/NAME."""

EMBEDDED_MODELS = ("quickstart",)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)

PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Settings of multimodal models for preparing images and sounds."""

CARD = "README.md"
"""A model card; its head names the licence of a base model."""


_SETTINGS_FILES = (
    *("config.json", "generation_config.json"),
    *TOKENIZER_FILES,
    *PROCESSOR_FILES,
)
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Weight files in the order of transformers, which reads the first that exists, also in shards."""
_DOWNLOADED = Path(".cache/huggingface")
"""Directory that huggingface_hub leaves in each download."""
_SETTINGS_TIMEOUT_S = 5.0
"""Time limit for an answer of the hub about settings, without which a plan is still possible."""
# OWNER/NAME, neither of which begins with a dot: ../x and ./x are paths. Behind @ a version.
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@\w[\w.-]*)?")
_QUANTIZED_NOTES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files beside config.json by which older quantisers, which do not change it, are recognised."""

_SUFFIXES = (".safetensors", ".bin")

# Not followed by a letter: `noticed` is no licence.
_LICENCE = re.compile(r"(licen[cs]es?|notices?|use_policy)(?![a-z])[^/]*", re.IGNORECASE)

OUTLINE = "base.json"
"""File of a checkpoint that describes its base model without weights."""
EXTRA_WEIGHTS = "keeps_rest"
"""Key of that file for models with more weights than the language model that is trained."""


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
            f"checkpoint_dir {name} is not a complete base model: {_listed(missing_files(path))} "
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
        f"or a hub name such as TinyLlama/TinyLlama_v1.1.{_suggestion(name)}"
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
            _require_readable_weights(candidate)
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
        if not candidate.is_dir() or _incomplete_files(candidate):
            continue
        files = [one for path in sorted(candidate.iterdir()) if (one := single_file(path))]
        if not files or layout_in(candidate) != HF or weight_files(candidate):
            continue
        if len(files) > 1:
            raise UserError(
                f"checkpoint_dir {name} holds {len(files)} {files[0].format.title} files: "
                f"{_listed([file.path.name for file in files])}. Give one of them, such as "
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
            f"TinyLlama/TinyLlama_v1.1.{_suggestion(repo_id)}"
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
                _require_readable_weights(directory)
    except (http_library().HTTPError, HFValidationError, OSError, RuntimeError) as error:
        raise explained(error, wanted, directory, lambda: _suggestion(repo_id)) from error
    # Left by earlier attempts, under names that this one did not continue.
    for stale in _incomplete_files(directory):
        stale.unlink()
    missing = missing_files(directory)
    if missing and find_single_file(str(directory), root=root) is None:
        raise UserError(
            f"{wanted} is in {directory} now, but its repository lacks {_listed(missing)}. Choose "
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
            allow_patterns=list(_SETTINGS_FILES), etag_timeout=_SETTINGS_TIMEOUT_S,
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
            _require_readable_weights(candidate)
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
    return f"{owner}/{model}" if (path / _DOWNLOADED).is_dir() else None


def split_version(name: str) -> tuple[str, str | None]:
    """Split ORG/NAME@VERSION; None: it names no version."""
    repo_id, _, version = name.partition("@")
    return repo_id, version or None


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory contains a tokenizer."""
    return any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def missing_files(directory: Path) -> list[str]:
    """List the files that a directory lacks to be a base model; [] if complete.

    Only names are compared. A directory in the layout of an implementation needs its two files, one
    of Hugging Face config.json and every weight file of its index.
    """
    # Checked first: the files that are there may look complete without the unfinished ones.
    if _incomplete_files(directory):
        return ["the rest of an interrupted download (run ftkit download again)"]
    if layout_in(directory) != HF:
        return []
    require_regular(settings := directory / "config.json")
    missing, weights = [] if settings.is_file() else [settings.name], weight_files(directory)
    if not weights:
        missing.append("weights (model.safetensors)")
    return missing + [file.name for file in weights if not file.is_file()]


def is_classifier(settings: Mapping[str, Any]) -> bool:
    """Return whether config.json describes a model that classifies sequences, as rewards do."""
    named = settings.get("architectures")
    names = named if isinstance(named, list) else []
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def weight_files(directory: Path) -> list[Path]:
    """List the weight files of a Hugging Face directory, existing or not; [] if unknown.

    Raises:
        UserError: the index of the shards cannot be read.
    """
    for name in _WEIGHTS:
        require_regular(single := directory / name)
        # A whole file is read even beside an index, as transformers does.
        if single.is_file():
            return [single]
        if (index := directory / f"{name}.index.json").is_file():
            return indexed_files(read_json(index), index)
    return []


def read_json(file: Path) -> dict[str, Any]:
    """Read a settings file; {} if it does not exist.

    Raises:
        UserError: it is not a JSON object.
    """
    require_regular(file)
    if not file.is_file():
        return {}
    with reading(file, "a JSON object"):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a JSON object. Download it again.")
    return content


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


def _require_readable_weights(directory: Path) -> None:
    """Refuse a directory whose weights are stored in a form that cannot be read."""
    if stored_form(read_json(directory / "config.json"), str(directory)) is not None:
        return
    for note, method in _QUANTIZED_NOTES.items():
        if (directory / note).is_file():
            raise quantized_weights({"quant_method": method}, str(directory))


def _repository(name: str, root: Path) -> str | None:
    """Return ORG/NAME, with @VERSION, if the name can mean a model on the hub."""
    name = name.removeprefix("./").rstrip("/")
    # LitGPT's recipes name models by the path of their download, checkpoints/ORG/NAME.
    for prefix in (f"{root}/", f"{ROOT}/"):
        name = name.removeprefix(prefix)
    return name if _REPOSITORY.fullmatch(name) and not single_file(Path(name)) else None


def _incomplete_files(directory: Path) -> list[Path]:
    """List the files in a directory whose download huggingface_hub has not finished."""
    return sorted((directory / _DOWNLOADED / "download").rglob("*.incomplete"))


def _files_to_fetch(repo_id: str, files: list[str]) -> list[str]:
    beside = [f for f in files if f in (*_SETTINGS_FILES, CARD) or is_licence(f)]
    # The first format that the repository has: never safetensors and .bin of the same weights.
    for name in _WEIGHTS:
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
            f"{_listed(converted)}. Fetch one by "
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
    resumed = [file for file in _incomplete_files(directory) if file.name.count(".") == 2]
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


def _suggestion(name: str) -> str:
    names = nearest_names(name)
    return f" Did you mean {' or '.join(names)}?" if names else ""


def _listed(names: list[str]) -> str:
    """Join names into a phrase, with at most three of them."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def indexed_files(content: Mapping[str, Any], index: Path) -> list[Path]:
    """Return the weight files that an index names, existing or not; sorted.

    Only names are compared: a link may lead out of the directory, as the files of a hub's cache do.

    Args:
        content: of the index.
        index: model.safetensors.index.json or pytorch_model.bin.index.json.

    Raises:
        UserError: it lists no files, or names one outside of its own directory.
    """
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} does not list the weight files. Download it again.")
    files = set()
    for tensor, name in weight_map.items():
        # A null byte would raise where the file is looked for.
        place = PurePath(name) if isinstance(name, str) and "\0" not in name else PurePath()
        if place.is_absolute() or ".." in place.parts or place.suffix not in _SUFFIXES:
            raise UserError(
                f"{index} says that {tensor} lies in {name!r}, but it has to name a weight file in "
                f"{index.parent}, such as model-00001-of-00002{_SUFFIXES[0]}. Download it again."
            )
        files.add(index.parent / place)
    return sorted(files)


def licence_files(directory: Path) -> list[Path]:
    """Licence files of the model in a directory."""
    return sorted(file for file in directory.iterdir() if is_licence(file.name) and file.is_file())


def is_licence(name: str) -> bool:
    """Return whether a file of this name is a licence, with any suffix."""
    return _LICENCE.fullmatch(name) is not None


def has_extra_weights(directory: Path) -> bool:
    """Return whether a result needs weights of the base model that no checkpoint contains.

    Args:
        directory: of a checkpoint, with settings, tokenizer and outline.

    Raises:
        UserError: the outline is damaged.
    """
    return bool(read_json(directory / OUTLINE).get(EXTRA_WEIGHTS))
