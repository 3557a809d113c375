"""The architecture of a base model from its settings alone: no weights, no download."""

from pathlib import Path

import torch
from litgpt.config import Config, configs

from ftkit import embedded
from ftkit.errors import UserError
from ftkit.pretrained import hub
from ftkit.pretrained.base_model import BaseModel, open_base, read_settings, short_name
from ftkit.pretrained.families import family_of_config, within_window
from ftkit.pretrained.naming import LITGPT
from ftkit.pretrained.tokenizer import Tokenizer

_TIED = (
    "llama-3.2-",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-3b",
    "qwen2.5-coder-0.5b",
    "qwen2.5-coder-1.5b",
    "qwen2.5-coder-3b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "smollm2-",
)
"""Beginnings of names whose config.json says tie_word_embeddings, beside families that all do."""


def read_blueprint(checkpoint_dir: str, *, root: Path = hub.ROOT) -> BaseModel:
    """A base model as far as its settings tell; it has no weights.

    Args:
        checkpoint_dir: as `open_base` takes it; of a directory, config.json or model_config.yaml
            is enough, and a hub name that LitGPT knows need not be on this machine.
        root: where downloads are.

    Raises:
        UserError: nothing is known of such a model, or it cannot be trained.
    """
    if checkpoint_dir.startswith("random:"):
        return open_base(checkpoint_dir)
    if directory := hub.settings_directory(checkpoint_dir, root=root):
        return _of_directory(directory)
    name = checkpoint_dir.removeprefix("./").rstrip("/").removeprefix(f"{root}/")
    known = [c for c in configs if name.lower() in (_hub_name(c).lower(), c["name"].lower())]
    if known:
        return _of_registry(known[0]["name"])
    near = hub.nearest_names(name)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UserError(
        f"checkpoint_dir {checkpoint_dir}: its architecture is unknown, because it is neither a "
        "directory with config.json or model_config.yaml nor a model that LitGPT knows by name."
        f"{hint} Put its config.json into {root / name}, or download the model."
    )


def _hub_name(config: dict[str, dict[str, str]]) -> str:
    return f"{config['hf_config']['org']}/{config['hf_config']['name']}"


def _of_directory(directory: Path) -> BaseModel:
    settings = hub.read_json(directory / "config.json")
    name = short_name(directory)
    is_litgpt = (directory / "model_config.yaml").is_file()
    config, naming, family = read_settings(directory, settings, name, is_litgpt=is_litgpt)
    return BaseModel(
        name=name,
        directory=directory,
        config=config,
        tokenizer=_any_tokenizer(),
        tokenizer_directory=directory,
        tied=bool(settings.get("tie_word_embeddings", family is not None and family.tied)),
        dtype=torch.float32,
        naming=naming,
        family=family,
        settings=settings,
        companions={},
    )


def _of_registry(name: str) -> BaseModel:
    config = Config.from_name(name)
    assert config is not None, "the name is from the registry"
    config = within_window(config)
    family = family_of_config(config)
    hub_name = config.hf_config["name"]
    return BaseModel(
        name=hub_name,
        directory=hub.ROOT / config.hf_config["org"] / hub_name,
        config=config,
        tokenizer=_any_tokenizer(),
        tokenizer_directory=hub.ROOT / config.hf_config["org"] / hub_name,
        tied=(family is not None and family.tied) or hub_name.lower().startswith(_TIED),
        dtype=torch.float32,
        naming=LITGPT if family is None else family.naming,
        family=family,
        settings={},
        companions={},
    )


def _any_tokenizer() -> Tokenizer:
    """The model's own may not be here, and no text is read."""
    return Tokenizer(embedded.path("quickstart") / "model")
