"""The architecture of a base model from its settings alone: no weights, no download."""

from pathlib import Path
from typing import Any

import torch

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import (
    LITGPT_SETTINGS,
    Architecture,
    Implementation,
    ModelLayout,
)
from ftkit.models.architectures.read import known_architecture, read_architecture
from ftkit.models.pretrained import hub
from ftkit.models.pretrained.base_model import BaseModel, is_tied, open_base, short_name
from ftkit.models.pretrained.gguf.convert import conversion_place, gguf_settings
from ftkit.models.pretrained.hub_errors import nearest_names, nearest_types
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.utils import embedded

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


def read_blueprint(
    checkpoint_dir: str,
    implementation: Implementation | None = None,
    *,
    unreached: UserError | None = None,
    root: Path = hub.ROOT,
) -> BaseModel:
    """A base model as far as its settings tell; it has no weights.

    Args:
        checkpoint_dir: as `open_base` takes it; of a GGUF file its header is enough, of a directory
            config.json or model_config.yaml, and a hub name that LitGPT knows need not be on this
            machine.
        implementation: whose code computes it; None: see `read_architecture`.
        unreached: what has kept `hub.fetch_settings` from it, for the message.
        root: where downloads are.

    Raises:
        UserError: nothing is known of such a model, or it cannot be trained.
    """
    if checkpoint_dir.startswith("random:"):
        return open_base(checkpoint_dir, implementation)
    if directory := hub.settings_directory(checkpoint_dir, root=root):
        settings = hub.read_json(directory / "config.json")
        return _of_settings(directory, settings, implementation)
    if file := hub.find_gguf(checkpoint_dir, root=root):
        return _of_settings(conversion_place(file, root), gguf_settings(file), implementation)
    name = checkpoint_dir.removeprefix("./").rstrip("/").removeprefix(f"{root}/")
    if known := known_architecture(name, implementation):
        return _of_hub(*known)
    wanted = unreached or (
        f"Put its config.json into {root / name}, or give a directory with config.json or "
        "model_config.yaml."
    )
    near = [*nearest_names(name), *(f"random:{t}" for t in nearest_types(Path(name).name))]
    asks = "Did you mean" in str(wanted)
    hint = f" Did you mean {' or '.join(near)}?" if near and not asks else ""
    raise UserError(
        f"checkpoint_dir {checkpoint_dir}: its architecture is unknown, because LitGPT knows no "
        f"model of this name and its config.json is not here. {wanted}{hint}"
    )


def _of_settings(
    directory: Path, settings: dict[str, Any], implementation: Implementation | None
) -> BaseModel:
    name = short_name(directory)
    layout: ModelLayout = "litgpt" if (directory / LITGPT_SETTINGS).is_file() else "hf"
    architecture = read_architecture(directory, settings, name, layout, implementation)
    return BaseModel(
        name=name,
        directory=directory,
        architecture=architecture,
        tokenizer=_any_tokenizer(),
        tokenizer_directory=directory,
        tied=is_tied(architecture, settings),
        dtype=torch.float32,
        layout=layout,
        settings=settings,
        companions={},
    )


def _of_hub(hub_name: str, architecture: Architecture) -> BaseModel:
    directory = hub.ROOT / hub_name
    return BaseModel(
        name=directory.name,
        directory=directory,
        architecture=architecture,
        tokenizer=_any_tokenizer(),
        tokenizer_directory=directory,
        tied=architecture.is_usually_tied or directory.name.lower().startswith(_TIED),
        dtype=torch.float32,
        layout="litgpt" if architecture.naming_in("hf") is None else "hf",
        settings={},
        companions={},
        known_as=hub_name,
    )


def _any_tokenizer() -> Tokenizer:
    """The model's own may not be here, and no text is read."""
    return Tokenizer(embedded.path("quickstart") / "model")
