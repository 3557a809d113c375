"""The estimated size of a model, from its settings alone; no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ftkit.errors import UserError
from ftkit.models.pretrained.hub import ROOT, find_gguf, read_json, settings_directory
from ftkit.utils.yaml_files import parse_yaml

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "inner_width": ("moe_intermediate_size", "intermediate_size"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
    "context": ("max_position_embeddings", "block_size"),
}
"""Each number in Hugging Face's config.json and in LitGPT's model_config.yaml."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "n_expert")
_CHOSEN = ("num_experts_per_tok", "n_expert_per_token")


@dataclass(frozen=True, kw_only=True)
class RoughModel:
    """Sizes in a model's settings that determine its memory."""

    layers: int
    width: int
    inner_width: int
    """Width of the MLP."""
    vocabulary: int
    context: int
    """Positions that the model was built for."""
    experts: int
    """Experts of a layer; 1 without experts."""
    experts_per_token: int
    """How many of them a token passes."""

    @property
    def parameters(self) -> int:
        """At most, but for biases and norms: attention heads may share keys and values."""
        # Four square matrices of attention, three of a gated MLP.
        block = 4 * self.width**2 + 3 * self.width * self.inner_width * self.experts
        return self.layers * block + 2 * self.vocabulary * self.width


def rough_model(name: str, *, root: Path = ROOT) -> RoughModel | None:
    """Read the sizes of a model from its settings; None if they are missing or unknown.

    Args:
        name: as `find_or_download` takes it.
        root: where downloads are.
    """
    try:
        settings: Any = None
        if directory := settings_directory(name, root=root):
            settings = read_json(directory / "config.json")
            if (file := directory / "model_config.yaml").is_file():
                settings = parse_yaml(file.read_text(encoding="utf-8"))
        elif gguf := find_gguf(name, root=root):
            from ftkit.models.pretrained.gguf.convert import gguf_settings

            settings = gguf_settings(gguf)
    except (UserError, OSError, UnicodeDecodeError, yaml.YAMLError):  # the run will say so
        return None
    if not isinstance(settings, dict):
        return None
    # A multimodal model: only its language model is trained.
    if isinstance(of_language := settings.get("text_config"), dict):
        settings = of_language
    found = {key: _first(settings, names) for key, names in _NAMES.items()}
    if not all(found.values()):
        return None
    experts = _first(settings, _EXPERTS) or 1
    of_each = min(_first(settings, _CHOSEN) or 1, experts)
    return RoughModel(**found, experts=experts, experts_per_token=of_each)


def _first(settings: dict[str, Any], names: tuple[str, ...]) -> int:
    values = (settings.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)
