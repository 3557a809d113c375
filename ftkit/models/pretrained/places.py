"""Where the name of a base model leads: to a directory here, a single file, a url or a hub."""

from functools import lru_cache
from pathlib import Path

from ftkit.errors import UserError
from ftkit.models.pretrained.model_files import (
    DOWNLOADED,
    has_tokenizer,
    incomplete_files,
    licence_files,
    missing_files,
    require_readable_weights,
    weight_files,
)
from ftkit.models.pretrained.model_names import listed, suggestion
from ftkit.models.pretrained.single_file import SingleFile, or_single_files, single_file
from ftkit.recipe.hubs import HUBS, hub_of, is_hub_name
from ftkit.recipe.implementations import HF, layout_in
from ftkit.utils import embedded
from ftkit.utils.damaged_files import require_regular
from ftkit.utils.url_files import url_files
from ftkit.utils.urls import is_url, local_path

ROOT = Path("checkpoints")
"""Directory of downloads, as in LitGPT: checkpoints/ORG/NAME."""

EMBEDDED_MODELS = ("quickstart",)


def find_or_download(name: str, *, token: str | None = None, root: Path = ROOT) -> Path:
    """Return the complete directory of a base model, downloading it if it is not here.

    Args:
        name: a directory, a file with a whole model or a directory with one (converted once),
            ``ORG/NAME`` on the hub or ``ORG/NAME@VERSION`` (downloaded to root, also if given as
            LitGPT's ``checkpoints/ORG/NAME``), ``HUB:ORG/NAME`` on the hub of another package, or
            ``embedded:NAME``. An interrupted download is continued: complete files are kept.
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
    wanted = name_on_hub(name, root)
    # The directory of a download may be incomplete, and is then continued; no other is.
    download_path = _download_place(wanted, root) if wanted else None
    if path.is_dir() and (download_path is None or path.resolve() != download_path.resolve()):
        raise UserError(
            f"checkpoint_dir {name} is not a complete base model: {listed(missing_files(path))} "
            "is missing. Give a directory with config.json, a tokenizer and the weights "
            f"(model.safetensors, pytorch_model.bin or their shards){or_single_files()}, or "
            "LitGPT's model_config.yaml and lit_model.pth."
        )
    if wanted and download_path:
        hub, repo_id = hub_of(wanted, "checkpoint_dir")
        # Only after the download is it known whether the repository holds a single file.
        directory = hub.download(repo_id, token=token, root=download_path.parents[1])
        file = find_single_file(str(directory), root=root)
        return directory if file is None else _convert(file, root)
    what = "is a file, not a directory" if path.is_file() else "does not exist"
    example = "a hub name such as TinyLlama/TinyLlama_v1.1" if any(HUBS) else "embedded:quickstart"
    raise UserError(
        f"checkpoint_dir {name} {what}. Give the directory of a base model{or_single_files()}, "
        f"or {example}.{suggestion(name)}"
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
    for candidate in _candidates(name, root):
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
    for candidate in _candidates(name, root):
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


# A command needs these settings in several places, and requests them once.
@lru_cache
def fetch_settings(name: str, *, token: str | None = None, root: Path = ROOT) -> UserError | None:
    """Download the settings and tokenizer of a model, a few MB, if its hub answers.

    A later download continues with them. Without them a plan may still be possible, so a failure is
    returned, not raised.

    Args:
        name: as `find_or_download` takes it; nothing is done for other names.
        token: of a Hugging Face account, for gated models. Default: $HF_TOKEN.
        root: directory of downloads.

    Returns:
        Error of the failed download, with a remedy; None: nothing failed.
    """
    wanted = name_on_hub(name, root)
    # A directory or file here has its settings already, or never will.
    if wanted is None or Path(name).expanduser().is_dir() or find_single_file(name, root=root):
        return None
    directory = _download_place(wanted, root)
    if (directory / "config.json").is_file() and has_tokenizer(directory):
        return None
    try:
        hub, repo_id = hub_of(wanted, "checkpoint_dir")
    except UserError as error:
        return error
    return hub.fetch_settings(repo_id, token=token, root=directory.parents[1])


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
    for candidate in (*_candidates(name, root), root / plain):
        if any((candidate / file).is_file() for file in ("config.json", "model_config.yaml")):
            require_readable_weights(candidate)
            return candidate
    return None


def hub_name(name: str, *, root: Path = ROOT) -> str | None:
    """Return ORG/NAME of a model from the Hugging Face hub, with @VERSION; None: not from there.

    Args:
        name: as `find_or_download` takes it.
        root: directory of downloads.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        found = name_on_hub(name, root)
        return None if found is None or ":" in found else found
    *_, owner, model = path.resolve().parts
    # Every directory has a parent: only what huggingface_hub has left shows where it is from.
    return f"{owner}/{model}" if (path / DOWNLOADED).is_dir() else None


def _embedded(name: str) -> Path:
    short_name = name.removeprefix("embedded:")
    if short_name not in EMBEDDED_MODELS:
        valid = ", ".join(f"embedded:{known}" for known in EMBEDDED_MODELS)
        raise UserError(f"checkpoint_dir {name} does not exist. Embedded in ftkit: {valid}.")
    return embedded.path(short_name) / "model"


def _candidates(name: str, root: Path) -> list[Path]:
    """Paths on this machine where a model of this name may be."""
    wanted = name_on_hub(name, root)
    return [Path(name).expanduser(), *([_download_place(wanted, root)] if wanted else [])]


def _download_place(wanted: str, root: Path) -> Path:
    """The directory of a download; the hubs of other packages have folders of their own."""
    return root / wanted.replace(":", "/")


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


def name_on_hub(name: str, root: Path) -> str | None:
    """Return a name as `hub_of` takes it, if it can mean a model on a hub."""
    name = name.removeprefix("./").rstrip("/")
    # LitGPT's recipes name models by the path of their download, checkpoints/ORG/NAME.
    for prefix in (f"{root}/", f"{ROOT}/"):
        name = name.removeprefix(prefix)
    is_name = is_hub_name(name, has_version=True) and not single_file(Path(name))
    return name if is_name else None
