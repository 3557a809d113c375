"""The Hugging Face hub: a model name in, the directory of its files out."""

import errno
import json
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from ftkit import embedded
from ftkit.errors import UserError
from ftkit.utils.files import free_disk_bytes

ROOT = Path("checkpoints")
"""Where downloads go, as LitGPT has it: checkpoints/ORG/NAME."""

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

LITGPT_FILES = ("model_config.yaml", "lit_model.pth")

_SETTINGS_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""In the order of transformers: the first that is there, alone or in shards, is the model."""
_SETTINGS_TIMEOUT_S = 5.0
"""For an answer of the hub to what can be done without."""
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_or_download(name: str, *, token: str | None = None, root: Path = ROOT) -> Path:
    """The directory of a base model, complete; downloaded if it is not on this machine.

    Args:
        name: a directory, ``ORG/NAME`` on the hub (found under root, where LitGPT's
            ``checkpoints/ORG/NAME`` points as well), or ``embedded:NAME``. An earlier download
            that was interrupted goes on where it stopped.
        token: of a Hugging Face account, for gated models. Default: $HF_TOKEN.
        root: where downloads go.

    Raises:
        UserError: there is no such model, its directory lacks files, or it cannot be downloaded.
    """
    if found := find_here(name, root=root):
        return found
    path = Path(name).expanduser()
    repo_id = _repository(name, root)
    download_path = root / repo_id if repo_id else None
    if path.is_dir() and (download_path is None or path.resolve() != download_path.resolve()):
        raise UserError(
            f"checkpoint_dir {name} is no complete base model: {_listed(missing_files(path))} is "
            "missing. Give a directory with config.json, a tokenizer and "
            "the weights (model.safetensors, pytorch_model.bin or their shards), or LitGPT's "
            "model_config.yaml and lit_model.pth."
        )
    if repo_id:
        return download(repo_id, token=token, root=root)
    what = "is a file, not a directory" if path.is_file() else "does not exist"
    raise UserError(
        f"checkpoint_dir {name} {what}. Give the directory of a base model, or a hub name such "
        f"as TinyLlama/TinyLlama_v1.1.{_suggestion(name)}"
    )


def find_here(name: str, *, root: Path = ROOT) -> Path | None:
    """The directory of a base model, complete, if it is on this machine.

    Raises:
        UserError: what is there cannot be read, or no such model is embedded.
    """
    if name.startswith("embedded:"):
        return _embedded(name)
    path = Path(name).expanduser()
    repo_id = _repository(name, root)
    for candidate in (path, root / repo_id if repo_id else None):
        if candidate and candidate.is_dir() and not missing_files(candidate):
            return candidate
    return None


def download(repo_id: str, *, token: str | None = None, root: Path = ROOT) -> Path:
    """Download a model from the hub ($HF_ENDPOINT) to root/ORG/NAME; returns that directory.

    Fetches config, tokenizer and weights: safetensors where the repository has them, else
    PyTorch's .bin, never both. Files that are there are kept, broken-off ones go on.

    Args:
        repo_id: ``ORG/NAME``.
        token: of a Hugging Face account. Default: $HF_TOKEN. Never printed or written.
        root: where downloads go.

    Raises:
        UserError: no such model, no access, no connection or no room; says what to do.
    """
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError

    hub_name = _repository(repo_id, root)
    if hub_name is None:
        raise UserError(
            f"{repo_id!r} is no model of the hub. Give a name such as TinyLlama/TinyLlama_v1.1."
            f"{_suggestion(repo_id)}"
        )
    repo_id, directory, token = hub_name, root / hub_name, token or None
    try:
        info = HfApi(token=token).model_info(repo_id, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        files = _files_to_fetch(repo_id, list(sizes))
        _require_space(repo_id, directory, {file: sizes[file] for file in files})
        snapshot_download(
            repo_id, revision=info.sha, local_dir=directory, token=token, allow_patterns=files
        )
    except (httpx.HTTPError, HFValidationError, OSError, RuntimeError) as error:
        raise _explained(error, repo_id, directory) from error
    for stale in _incomplete_files(directory):
        stale.unlink()
    if missing := missing_files(directory):
        raise UserError(
            f"{repo_id} is in {directory} now, but its repository lacks {_listed(missing)}. Choose "
            "another copy of the model."
        )
    return directory


@lru_cache
def fetch_settings(name: str, *, token: str | None = None, root: Path = ROOT) -> None:
    """Have the settings and the tokenizer of a hub model here, a few MB, if the hub answers.

    They lie where a download finds them. Without them less is known of the model, and what keeps
    them away is told by the download, so nothing is said here.

    Args:
        name: as `find_or_download` takes it; nothing is done for one that is no hub name.
        token: of a Hugging Face account, for gated models. Default: $HF_TOKEN.
        root: where downloads go.
    """
    repo_id = _repository(name, root)
    if repo_id is None or Path(name).expanduser().is_dir():
        return
    directory = root / repo_id
    if (directory / "config.json").is_file() and has_tokenizer(directory):
        return
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError

    token = token or None
    with suppress(httpx.HTTPError, HFValidationError, OSError, RuntimeError):
        info = HfApi(token=token).model_info(repo_id, timeout=_SETTINGS_TIMEOUT_S)
        snapshot_download(
            repo_id,
            revision=info.sha,
            local_dir=directory,
            token=token,
            allow_patterns=list(_SETTINGS_FILES),
            etag_timeout=_SETTINGS_TIMEOUT_S,
        )


def settings_directory(name: str, *, root: Path = ROOT) -> Path | None:
    """The directory that holds the settings of a base model; None: it is not here."""
    if name.startswith("embedded:"):
        return _embedded(name)
    plain = name.removeprefix("./").rstrip("/").removeprefix(f"{root}/")
    for candidate in (Path(name).expanduser(), root / plain):
        if any((candidate / file).is_file() for file in ("config.json", "model_config.yaml")):
            return candidate
    return None


def has_tokenizer(directory: Path) -> bool:
    """Whether a tokenizer lies in a directory."""
    return any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def missing_files(directory: Path) -> list[str]:
    """What keeps a directory from being a base model; [] if nothing does.

    Looks at names alone. A LitGPT directory needs its two files, a Hugging Face directory
    config.json and every weight file of its index.
    """
    if _incomplete_files(directory):
        return ["the rest of an interrupted download (run ftkit download again)"]
    if is_litgpt(directory):
        return []
    missing = [] if (directory / "config.json").is_file() else ["config.json"]
    weights = weight_files(directory)
    if not weights:
        missing.append("weights (model.safetensors)")
    return missing + [file.name for file in weights if not file.is_file()]


def is_litgpt(directory: Path) -> bool:
    """Whether the directory holds a model in LitGPT's own format."""
    return all((directory / name).is_file() for name in LITGPT_FILES)


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a Hugging Face directory, whether they exist or not; [] if unknown.

    Raises:
        UserError: the index of the shards cannot be read.
    """
    for name in _WEIGHTS:
        if (single := directory / name).is_file():
            return [single]
        if (index := directory / f"{name}.index.json").is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise UserError(f"{index} does not list the weight files. Download it again.")
            return sorted(directory / shard for shard in set(weight_map.values()))
    return []


def read_json(file: Path) -> dict[str, Any]:
    """The content of a settings file; {} where there is none.

    Raises:
        UserError: it is not a JSON object.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is no valid JSON ({error}). Download it again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is no JSON object. Download it again.")
    return content


def nearest_names(name: str) -> list[str]:
    """Hub names of models that LitGPT knows and that are spelled like the given one; up to 3."""
    import difflib

    from litgpt.config import configs

    hub_names = [f"{c['hf_config']['org']}/{c['hf_config']['name']}" for c in configs]
    by_spelling = {known.lower(): known for known in hub_names}
    by_spelling |= {known.split("/")[-1].lower(): known for known in hub_names}
    by_spelling |= {c["name"].lower(): known for c, known in zip(configs, hub_names, strict=True)}
    close = difflib.get_close_matches(name.lower(), by_spelling, n=6, cutoff=0.7)
    return list(dict.fromkeys(by_spelling[spelling] for spelling in close))[:3]


def _embedded(name: str) -> Path:
    short_name = name.removeprefix("embedded:")
    if short_name not in EMBEDDED_MODELS:
        valid = ", ".join(f"embedded:{known}" for known in EMBEDDED_MODELS)
        raise UserError(f"checkpoint_dir {name} does not exist. Embedded in ftkit: {valid}.")
    return embedded.path(short_name) / "model"


def _repository(name: str, root: Path) -> str | None:
    """ORG/NAME, where the name can mean a hub model."""
    name = name.removeprefix("./").rstrip("/")
    for prefix in (f"{root}/", f"{ROOT}/"):
        name = name.removeprefix(prefix)
    return name if _REPOSITORY.fullmatch(name) else None


def _incomplete_files(directory: Path) -> list[Path]:
    """Files that huggingface_hub began to download into the directory and did not finish."""
    return sorted((directory / ".cache/huggingface/download").rglob("*.incomplete"))


def _files_to_fetch(repo_id: str, files: list[str]) -> list[str]:
    settings = [file for file in files if file in _SETTINGS_FILES]
    for name in _WEIGHTS:
        if name in files:
            return [*settings, name]
        if (index := f"{name}.index.json") in files:
            stem, suffix = name.split(".")
            shard = re.compile(rf"{stem}-\d+-of-\d+\.{suffix}")
            return [*settings, index, *(file for file in files if shard.fullmatch(file))]
    raise UserError(
        f"{repo_id} holds no weights that ftkit reads (model.safetensors or pytorch_model.bin, "
        "whole or in shards). Choose the original model instead of a converted copy."
    )


def _require_space(repo_id: str, directory: Path, sizes_bytes: dict[str, int]) -> None:
    """UserError if what is still to come does not fit on the disk."""
    needed_bytes = sum(
        size for file, size in sizes_bytes.items() if not (directory / file).is_file()
    )
    needed_bytes -= sum(file.stat().st_size for file in _incomplete_files(directory))
    free_bytes = free_disk_bytes(directory)
    if needed_bytes > free_bytes:
        raise UserError(
            f"{repo_id} needs {needed_bytes / 2**30:.1f} GiB in {directory}, but only "
            f"{free_bytes / 2**30:.1f} GiB are free there. Free some space, or make "
            f"{ROOT} a link to a larger disk."
        )


def _explained(error: Exception, repo_id: str, directory: Path) -> UserError:
    """The same failure in words that say what to do. Never quotes requests or tokens."""
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
            f"There is no model {repo_id} at {hub}, or it is private. Check the spelling; for a "
            f"private model set HF_TOKEN or --access_token.{_suggestion(repo_id)}"
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


def _suggestion(name: str) -> str:
    names = nearest_names(name)
    return f" Did you mean {' or '.join(names)}?" if names else ""


def _listed(names: list[str]) -> str:
    """The names in one phrase, at most three of them in full."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
