"""Images of a micro-batch without values, for a simulated step."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ftkit.extensions.images.image_model import ImageModel, Limits
from ftkit.extensions.images.towers import Features
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.strategies.step_memory import MicroBatchSize


def images_of_size(base: BaseModel, size: MicroBatchSize, dtype: torch.dtype) -> Mapping[str, Any]:
    """Return images as `ImageReader` reads them, with tensors on the meta device.

    A tower of many layers takes a while to simulate. So it computes the largest image, and all
    others have features already, where they take no more memory.

    Args:
        base: the model.
        size: of the micro-batch, which has images.
        dtype: of the tower.
    """
    model, media = _model(base.tokenizer_directory), size.media
    assert media is not None
    tokens = [model.tokens_of_size(patches) for patches in media.sizes]
    width = model.configured.get_text_config().hidden_size
    blocks = getattr(model.configured.vision_config, "deepstack_visual_indexes", None) or ()
    lines = (1, size.tokens) if size.tokens is not None else (size.sequences, size.positions)
    images, others = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    computed = _computed(model, media.sizes, base.architecture.beside)
    for index, (patches, count) in enumerate(zip(media.sizes, tokens, strict=True)):
        read = _read(model, patches)
        if index in computed:
            images.append(read)
        else:
            features = partial(_features, count, width, len(blocks), dtype)
            images.append({"features": features})
            others.append(read)
    made: dict[str, Any] = {
        "images": images,
        "others": others,
        "places": _empty(sum(tokens), dtype=torch.int64),
    }
    if model.family.axes:
        made["positions"] = _empty(3, *lines, dtype=torch.int64)
        made["behind"] = _empty(size.sequences, dtype=torch.int64)
    if model.has_blocks:
        with_images = len(media.lengths)
        made["blocks"] = (((0, 1),),) * with_images + ((),) * (size.sequences - with_images)
    return made


def blank_inputs(directory: Path, device: str) -> Mapping[str, Any]:
    """What the tower is given of an image that shows nothing.

    Args:
        directory: of the base model.
        device: of its tensors.
    """
    found = _read_model(directory).blank  # of a model that is not kept, and neither are its pixels
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def _computed(model: ImageModel, sizes: Sequence[int], beside: Sequence[str]) -> set[int]:
    """Numbers of the images that are computed."""
    if beside and not model.family.trains_tower(beside):
        return {*range(len(sizes))}  # a trained projector keeps activations of all
    largest = sizes.index(max(sizes))
    if not beside:
        return {largest}
    # A backward pass begins with the last image. Before the largest one, there may be gradients of
    # others, which are added up.
    around = range(largest + 1, len(sizes)) or range(largest)
    return {largest, *sorted(around, key=lambda index: sizes[index])[-1:]}


def _read_model(directory: Path) -> ImageModel:
    # Texts that are in no other, so that they can be counted; sizes are given, whatever limits are.
    return ImageModel(directory, lambda token: f"\0{token}\0", Limits())


_model = cache(_read_model)


def _features(count: int, width: int, blocks: int, dtype: torch.dtype) -> Features:
    rows, *deeper = (torch.empty(count, width, dtype=dtype) for _ in range(1 + blocks))
    return rows, deeper


def _read(model: ImageModel, patches: int) -> Mapping[str, Any]:
    found = model.read(model.inputs_of_size(patches))
    return {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
