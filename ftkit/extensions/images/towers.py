"""How towers are called: what the host knows of an image goes in, and no value of a tensor is read.

Transformers' own functions read sizes from tensors on the device, for which a step would wait, and
which have no values where a step is simulated. So the host computes these when it reads an image.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Any]
"""Of one image: tensors for the device, and arrays of numpy, which stay on the host."""
Features = tuple[Tensor, list[Tensor]]
"""[tokens, width], what an image becomes; and what is added to this behind each of the first blocks
of the language model."""
_OF_MODEL = (
    *("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes"),
    "image_position_ids",
)
"""Inputs of an image that models take; the others are for its text."""


def as_given(vision: Any, inputs: Inputs) -> Inputs:
    """Return what an image processor made of an image, for a tower that reads values of it.

    Args:
        vision: settings of the tower.
        inputs: of one image.
    """
    return {key: inputs[key] for key in _OF_MODEL if key in inputs}


def as_read(vision: Any, inputs: Inputs) -> Inputs:
    """As `as_given`, of which a tower takes pixels alone."""
    return {"pixel_values": inputs["pixel_values"]}


def with_grid(vision: Any, inputs: Inputs) -> Inputs:
    """As `as_read`, with places of the patches and ends of what attends to itself."""
    # Not in all versions of transformers, and only these families need it.
    from transformers import vision_utils

    grid, merge = inputs["image_grid_thw"], int(vision.spatial_merge_size)
    made: dict[str, Any] = {
        "pixel_values": inputs["pixel_values"],
        "position_ids": vision_utils.get_vision_position_ids(grid, merge),
        # The tower cuts by these numbers: an array stays on the host.
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid).numpy(),
    }
    if hasattr(vision, "window_size"):
        order, ends = vision_utils.get_vision_window_index(
            grid, merge, vision.window_size, vision.patch_size
        )
        made |= {"window_index": order, "cu_window_seqlens": ends.numpy()}
    return made


def with_tiles(vision: Any, inputs: Inputs) -> Inputs:
    """As `as_read`, with which patches of each tile show a part of the image."""
    (pixels,), (mask,) = inputs["pixel_values"], inputs["pixel_attention_mask"]
    side = int(vision.patch_size)
    seen = mask.unfold(1, side, side).unfold(2, side, side).sum((-1, -2)) > 0
    made = {"pixel_values": pixels, "seen": seen}
    if not seen.all():
        shown = seen.flatten(1)[:, None, None].expand(-1, 1, seen[0].numel(), -1)
        made["attended"] = torch.zeros(shown.shape).masked_fill_(~shown, float("-inf"))
    return made


def by_own_function(owner: Any, inputs: Inputs) -> Features:
    """Return what an image becomes, by transformers' own function.

    Args:
        owner: of tower and projector.
        inputs: of the image, in the number format of the tower.
    """
    found = owner.get_image_features(**inputs, return_dict=True)
    deeper = getattr(found, "deepstack_features", None) or ()
    return _joined(found.pooler_output), [_joined(one) for one in deeper]


def _joined(features: Any) -> Tensor:
    """[tokens, width], of features that a model returns as a tensor, or as one for each picture."""
    joined: Tensor = features if isinstance(features, Tensor) else torch.cat(list(features))
    return joined.flatten(0, -2)


def of_grid(owner: Any, inputs: Inputs) -> Features:
    """As `by_own_function`, whose grid would be read from the device."""
    others = {key: value for key, value in inputs.items() if key != "pixel_values"}
    found = owner.visual(inputs["pixel_values"], grid_thw=None, return_dict=True, **others)
    return found.pooler_output, []


def of_tiles(owner: Any, inputs: Inputs) -> Features:
    """As `by_own_function`, which looks for tiles that only pad: a single image has none."""
    tower = owner.vision_model
    hidden = tower.embeddings(
        pixel_values=inputs["pixel_values"], patch_attention_mask=inputs["seen"]
    )
    # No mask where every patch is seen, as transformers decides by looking at it.
    hidden = tower.encoder(inputs_embeds=hidden, attention_mask=inputs.get("attended"))
    return _joined(owner.connector(tower.post_layernorm(hidden.last_hidden_state))), []
