"""The fingerprint of a base model, whatever its directory is called and its layout is."""

import dataclasses
import hashlib
import json
from typing import Any

import torch
from litgpt.config import Config
from torch import Tensor

from ftkit.pretrained.base_model import BaseModel, parameter_shapes, weights

_SAMPLED = 256
"""Most values of each parameter that are looked at."""
_NO_PART = ("name", "hf_config", "block_size", "vocab_size", "padding_multiple")
"""Fields of `Config` that change no number for a given sequence."""
_LAYOUT_DEPENDENT = ("padded_vocab_size", "sliding_window_size", "sliding_window_indices")
"""Fields that depend on the layout: the vocabulary is in the shapes; a window is run in LitGPT's
and a limit of the positions in Hugging Face's."""


def fingerprint(base: BaseModel) -> str:
    """SHA-256 of the architecture and of values spread over every parameter.

    The same for a copy of the model in Hugging Face's and in LitGPT's layout and in any number
    format that holds its values. Looks at up to 256 values of each parameter: enough to tell
    apart models of which one was trained, not to find a flipped bit. Random weights follow from
    the architecture and are not drawn.

    Args:
        base: with weights.

    Raises:
        UserError: the weights are missing, damaged or not those of the architecture.
    """
    digest = hashlib.sha256(_text(_architecture(base.config)))
    if base.random:
        digest.update(b"random")
        for name, shape in parameter_shapes(base).items():
            digest.update(_text([name, list(shape)]))
        return digest.hexdigest()
    for name, tensor in weights(base):
        digest.update(_text([name, list(tensor.shape)]))
        digest.update(_sample(tensor).numpy().astype("<f8").tobytes())
    return digest.hexdigest()


def _sample(tensor: Tensor) -> Tensor:
    """[up to 256] float64, from the first value to the last in nearly equal strides.

    The strides differ by one, so that no matrix is looked at in one column alone.
    """
    values = tensor.flatten()
    count = min(values.numel(), _SAMPLED)
    positions = torch.arange(count) * (values.numel() - 1) // max(1, count - 1)
    return values[positions].double()


def _architecture(config: Config) -> dict[str, Any]:
    """What changes the function that given weights compute, each thing said in one way."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name in (*_NO_PART, *_LAYOUT_DEPENDENT):
        del fields[name]
    fields["unit_offset"] = "Gemma" in config.name  # LitGPT's norms ask for the name
    fields["attention_scores_scalar"] = config.attention_scores_scalar or config.head_size
    if config.mlp_class_name not in ("GptNeoxMLP", "GemmaMLP"):
        del fields["gelu_approximate"]
    rope = fields.pop("rope_adjustments") or {}
    if rope.keys() == {"factor"}:  # linear scaling, which LitGPT also calls condensing
        fields["rope_condense_ratio"] *= rope["factor"]
    elif rope:
        fields["rope_adjustments"] = rope
    return fields


def _text(value: Any) -> bytes:
    """One text per value, the same for 8 and 8.0."""
    return json.dumps(_plain(value), sort_keys=True).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return value
