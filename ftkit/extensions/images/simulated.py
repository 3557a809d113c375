"""Images of a micro-batch without values, for a simulated step."""

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ftkit.extensions.images.image_model import ImageModel, Limits
from ftkit.extensions.images.towers import Features
from ftkit.strategies.step_memory import MicroBatchSize


def images_of_size(directory: Path, size: MicroBatchSize, dtype: torch.dtype) -> Mapping[str, Any]:
    """Return images as `ImageReader` reads them, with tensors on the meta device.

    The tower computes the largest one, and gets the features of all others: it takes no more memory
    for them, and a tower of many layers takes a while to simulate.

    Args:
        directory: of the base model.
        size: of the micro-batch, which has images.
        dtype: of the tower.
    """
    model, media = _model(directory), size.media
    assert media is not None
    *others, largest = sorted(media.sizes)
    tokens = [model.tokens_of_size(patches) for patches in (*others, largest)]
    width = model.configured.get_text_config().hidden_size
    blocks = getattr(model.configured.vision_config, "deepstack_visual_indexes", None) or ()
    lines = (1, size.tokens) if size.tokens is not None else (size.sequences, size.positions)
    made: dict[str, Any] = {
        "images": [
            *(
                {"features": partial(_features, count, width, len(blocks), dtype)}
                for count in tokens[:-1]
            ),
            _read(model, largest),
        ],
        "others": [_read(model, patches) for patches in others],
        "places": _empty(sum(tokens), dtype=torch.int64),
    }
    if model.family.axes:
        made["positions"] = _empty(3, *lines, dtype=torch.int64)
        made["behind"] = _empty(size.sequences, dtype=torch.int64)
    if model.sees_itself:
        with_images = len(media.lengths)
        made["blocks"] = (((0, 1),),) * with_images + ((),) * (size.sequences - with_images)
    return made


@cache
def _model(directory: Path) -> ImageModel:
    # Texts that are in no other, so that they can be counted; sizes are given, whatever limits are.
    return ImageModel(directory, lambda token: f"\0{token}\0", Limits())


def _features(count: int, width: int, blocks: int, dtype: torch.dtype) -> Features:
    rows, *deeper = (torch.empty(count, width, dtype=dtype) for _ in range(1 + blocks))
    return rows, deeper


def _read(model: ImageModel, patches: int) -> Mapping[str, Any]:
    found = model.read(model.inputs_of_size(patches))
    return {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
