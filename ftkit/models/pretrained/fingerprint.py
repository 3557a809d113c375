"""The fingerprint of a base model, whatever its directory is called and its layout is."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from ftkit.models.architectures.architecture import Implementation
from ftkit.models.pretrained.base_model import BaseModel, parameter_shapes, weights

_SAMPLED = 256
"""Most values of each parameter that are looked at."""


def fingerprint(base: BaseModel) -> str:
    """SHA-256 of the architecture and of values spread over every parameter.

    The same for a copy of the model in Hugging Face's and in LitGPT's layout and in any number
    format that holds its values. Looks at up to 256 values of each parameter: enough to tell
    apart models of which one was trained, not to find a flipped bit. Random weights follow from
    the architecture and are not drawn.

    It tells whose code computes the model, whose names its parameters have: see
    `implementation_of`.

    Args:
        base: with weights.

    Raises:
        UserError: the weights are missing, damaged or not those of the architecture.
    """
    implementation = base.architecture.implementation
    return f"{implementation}:" * (implementation != "litgpt") + _digest(base)


def implementation_of(known: str) -> Implementation:
    """Whose code computes the model of a fingerprint; those of LitGPT's do not say so."""
    return "transformers" if known.startswith("transformers:") else "litgpt"


def _digest(base: BaseModel) -> str:
    digest = hashlib.sha256(_text(base.architecture.identity()))
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
