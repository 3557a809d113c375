"""How towers are called: what the host knows of an image goes in, and no value of a tensor is read.

Transformers' own functions read sizes from tensors on the device, for which a step would wait, and
which have no values where a step is simulated. So the host computes these when it reads an image.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Inputs = Mapping[str, Any]
"""Of one image: tensors for the device, and arrays of numpy, which stay on the host."""
Features = tuple[Tensor, list[Tensor]]
"""[tokens, width], what an image becomes; and what is added to this behind each of the first blocks
of the language model."""


def as_read(vision: Any, inputs: Inputs) -> Inputs:
    """Return what an image processor made of an image, for a tower that takes pixels alone.

    Args:
        vision: settings of the tower.
        inputs: of one image.
    """
    return {"pixel_values": inputs["pixel_values"]}


def with_sizes(vision: Any, inputs: Inputs) -> Inputs:
    """As `as_read`, with height and width of the image, and the number of images of its sample."""
    made: dict[str, Any] = {"pixel_values": inputs["pixel_values"]}
    for key in ("image_sizes", "batch_num_images"):
        if key in inputs:
            made[key] = np.asarray(inputs[key])
    return made


def with_places(vision: Any, inputs: Inputs) -> Inputs:
    """As `as_read`, with places of the patches, and without those that only pad."""
    places = inputs["image_position_ids"]
    shown = int((places[..., 0] >= 0).sum())
    return {"pixel_values": inputs["pixel_values"][:, :shown], "places": places[:, :shown]}


def with_grid(vision: Any, inputs: Inputs) -> Inputs:
    """As `as_read`, with places of the patches and ends of what attends to itself."""
    # Not in all versions of transformers, and only these families need it.
    from transformers import vision_utils

    grid, merge = inputs["image_grid_thw"], int(vision.spatial_merge_size)
    made: dict[str, Any] = {
        "pixel_values": inputs["pixel_values"],
        "grid_thw": grid,
        "position_ids": vision_utils.get_vision_position_ids(grid, merge),
        # The tower cuts by these numbers: an array stays on the host.
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid).numpy(),
    }
    if hasattr(vision, "window_size"):
        order, ends = vision_utils.get_vision_window_index(
            grid, merge, vision.window_size, vision.patch_size
        )
        made |= {"window_index": order, "cu_window_seqlens": ends.numpy()}
    if hasattr(vision, "num_position_embeddings"):
        side = math.isqrt(vision.num_position_embeddings)
        made["interp_indices"], made["interp_weights"] = (
            vision_utils.get_vision_interpolation_indices_and_weights(
                grid, side, align_corners=True, spatial_merge_size=merge
            )
        )
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


def tokens_of_frames(frames: int) -> int:
    """Tokens of audio with a number of frames of its spectrogram: two layers halve them."""
    return ((frames - 1) // 2 + 1) // 2


def frames_of_tokens(tokens: int) -> int:
    """Frames of audio that has a number of tokens."""
    return 4 * tokens


def with_frames(tower: Any, inputs: Inputs) -> Inputs:
    """Return the spectrogram of audio, a mask of its frames without padding, and its tokens."""
    heard = (inputs["frames"] - 1) // 2 + 1
    attended = torch.zeros(1, 1, 1, tower.max_source_positions)
    attended[..., heard:] = float("-inf")
    return {
        "input_features": inputs["input_features"],
        "attended": attended,
        "tokens": tokens_of_frames(inputs["frames"]),
    }


class _Host(TorchFunctionMode):
    """Leaves on the host what transformers writes down of sizes: to send it, a step would wait."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        if function is torch.tensor:
            given["device"] = "cpu"
        return function(*args, **given)


def by_own_function(owner: Any, inputs: Inputs) -> Features:
    """Return what an image becomes, by transformers' own function.

    Args:
        owner: of tower and projector.
        inputs: of the image, with pixels in the number format of the tower.
    """
    with _Host():
        return _joined(owner.get_image_features(**inputs, return_dict=True).pooler_output), []


def _joined(features: Any) -> Tensor:
    """[tokens, width], of features that a model returns as a tensor, or as one for each picture."""
    joined: Tensor = features if isinstance(features, Tensor) else torch.cat(list(features))
    return joined.flatten(0, -2)


def of_grid(owner: Any, inputs: Inputs) -> Features:
    """As `by_own_function`, whose grid would be read from the device."""
    others = {key: value for key, value in inputs.items() if key != "pixel_values"}
    found = owner.visual(inputs["pixel_values"], return_dict=True, **others)
    return found.pooler_output, list(getattr(found, "deepstack_features", None) or ())


def of_grid_on_device(owner: Any, inputs: Inputs) -> Features:
    """As `of_grid`, of a tower with a table that wants the number of patches on the device."""
    count = inputs["grid_thw"].prod(-1)
    with owner.visual.embeddings.register_forward_pre_hook(
        lambda _, given: (given[0], count, *given[2:])
    ):
        return of_grid(owner, inputs)


def of_sides(owner: Any, inputs: Inputs) -> Features:
    """As `by_own_function`, which counts patches on the device."""
    pixels, layer = inputs["pixel_values"], owner.config.vision_feature_layer
    sides = [tuple(pixels.shape[-2:])]
    found = owner.vision_tower(
        pixels, image_sizes=sides, output_hidden_states=layer, return_dict=True
    )
    layers = [layer] if isinstance(layer, int) else layer
    hidden = torch.cat([found.hidden_states[one] for one in layers], dim=-1)
    return owner.multi_modal_projector(hidden[0], sides), []


def of_places(owner: Any, inputs: Inputs) -> Features:
    """As `by_own_function`, which looks for patches that only pad."""
    tower, places = owner.vision_tower, inputs["places"]
    pads = torch.zeros_like(places[..., 0], dtype=torch.bool)
    embedded = tower.patch_embedder(inputs["pixel_values"], places, pads)
    found = tower.encoder(inputs_embeds=embedded, attention_mask=None, pixel_position_ids=places)
    pooled, _ = tower.pooler(
        hidden_states=found.last_hidden_state,
        pixel_position_ids=places,
        padding_positions=pads,
        output_length=places.size(1) // tower.config.pooling_kernel_size**2,
    )
    if tower.config.standardize:
        pooled = (pooled - tower.std_bias.float()) * tower.std_scale.float()
    return _joined(owner.embed_vision(inputs_embeds=pooled.to(embedded.dtype))), []


def of_tiles(owner: Any, inputs: Inputs) -> Features:
    """As `by_own_function`, which looks for tiles that only pad: a single image has none."""
    tower = owner.vision_model
    hidden = tower.embeddings(
        pixel_values=inputs["pixel_values"], patch_attention_mask=inputs["seen"]
    )
    # No mask where every patch is seen, as transformers decides by looking at it.
    mask = inputs["attended"].to(hidden.dtype) if "attended" in inputs else None
    hidden = tower.encoder(inputs_embeds=hidden, attention_mask=mask)
    return _joined(owner.connector(tower.post_layernorm(hidden.last_hidden_state))), []


def of_frames(owner: Any, inputs: Inputs) -> Features:
    """As `by_own_function`, of audio: transformers has no such function of Qwen2-Audio."""
    values = inputs["input_features"]
    found = owner.audio_tower(values, attention_mask=inputs["attended"].to(values.dtype))
    return owner.multi_modal_projector(found.last_hidden_state[0, : inputs["tokens"]]), []
