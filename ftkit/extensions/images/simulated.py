"""Media of a micro-batch without values, for a simulated step."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ftkit.extensions.images.media_model import MediaModel
from ftkit.extensions.images.media_models import MODELS
from ftkit.extensions.images.towers import Features
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.strategies.step_memory import MicroBatchSize


def media_of_size(base: BaseModel, size: MicroBatchSize, dtype: torch.dtype) -> Mapping[str, Any]:
    """Return media as `TowerReader` reads them, with tensors on the meta device.

    A tower of many layers takes a while to simulate. So it computes the largest medium, and all
    others have features already, where they take no more memory.

    Args:
        base: the model.
        size: of the micro-batch, which has media.
        dtype: of the tower.
    """
    media = size.media
    assert media is not None
    model = _model(media.kind, base.tokenizer_directory)
    tokens = model.tokens_of(media)
    width = model.configured.get_text_config().hidden_size
    blocks = getattr(model.tower_config, "deepstack_visual_indexes", None) or ()
    lines = (1, size.tokens) if size.tokens is not None else (size.sequences, size.positions)
    inputs, others = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    computed = _computed(model, media.sizes, base.architecture.beside)
    for index, (cost, count) in enumerate(zip(media.sizes, tokens, strict=True)):
        read = _read(model, cost, count)
        if index in computed:
            inputs.append(read)
        else:
            features = partial(_features, count, width, len(blocks), dtype)
            inputs.append({"features": features})
            others.append(read)
    made: dict[str, Any] = {
        "inputs": inputs,
        "others": others,
        "places": _empty(sum(tokens), dtype=torch.int64),
    }
    if model.family.axes:
        made["positions"] = _empty(3, *lines, dtype=torch.int64)
        made["behind"] = _empty(size.sequences, dtype=torch.int64)
    if model.has_blocks:
        with_media = len(media.lengths)
        made["blocks"] = (((0, 1),),) * with_media + ((),) * (size.sequences - with_media)
    return made


def blank_inputs(directory: Path, device: str) -> Mapping[str, Any]:
    """What the tower is given of an image that shows nothing.

    Args:
        directory: of the base model.
        device: of its tensors.
    """
    # Of a model that is not kept, and neither are its pixels.
    found = _read_model("image", directory).blank
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def _computed(model: MediaModel, sizes: Sequence[int], beside: Sequence[str]) -> set[int]:
    """Numbers of the media that are computed."""
    if beside and not model.family.trains_tower(beside):
        return {*range(len(sizes))}  # a trained projector keeps activations of all
    largest = sizes.index(max(sizes))
    if not beside:
        return {largest}
    # A backward pass begins with the last one. Before the largest one, there may be gradients of
    # others, which are added up.
    around = range(largest + 1, len(sizes)) or range(largest)
    return {largest, *sorted(around, key=lambda index: sizes[index])[-1:]}


def _read_model(kind: str, directory: Path) -> MediaModel:
    # Texts that are in no other, so that they can be counted; sizes are given, whatever limits are.
    return MODELS[kind](directory, lambda token: f"\0{token}\0")


_model = cache(_read_model)


def _features(count: int, width: int, blocks: int, dtype: torch.dtype) -> Features:
    rows, *deeper = (torch.empty(count, width, dtype=dtype) for _ in range(1 + blocks))
    return rows, deeper


def _read(model: MediaModel, cost: int, count: int) -> Mapping[str, Any]:
    found = model.read(model.inputs_of_size(cost, count))
    return {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
