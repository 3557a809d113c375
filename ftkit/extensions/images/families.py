"""Families of models that see: what an image becomes in a text, and how its tokens are placed.

A new family is a row here. What a processor of transformers writes for an image is written here
again, because these processors need torchvision, also where their image processors do not.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ftkit.extensions.images import towers

Inputs = Mapping[str, Any]
"""What an image processor returns for one image."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models that see."""

    types: tuple[str, ...]
    """Values of model_type in config.json."""
    token: str
    """Key of the model's settings with the id of the token that stands for a part of an image."""
    mark: str
    """What chat templates of the family write for an image; {token} is the text of that token."""
    text: Callable[["ImageSettings", Inputs], str]
    """What stands in the text for an image that has been processed, in the place of `mark`."""
    patches: Callable[["ImageSettings", Inputs], int]
    """Patches that the tower computes for an image."""
    sized: Callable[["ImageSettings", Inputs, int], Inputs]
    """Inputs of any image with a number of patches, by those of another; their values do not
    matter."""
    read: Callable[[Any, Inputs], Inputs] = towers.as_read
    """What the tower is given of the inputs, by its settings; the host computes it."""
    features: Callable[[Any, Inputs], Tensor] = towers.by_own_function
    """[tokens, width], what the owner of tower and projector makes of this; it reads no values."""
    options: Mapping[str, Any]
    """Further arguments of the image processor."""
    nested: bool = False
    """Whether the image processor takes a list of the images of each sample."""
    axes: bool = False
    """Whether tokens of images have positions along three axes: time, height and width."""
    sees_itself: bool = False
    """Whether the tokens of an image also see its later ones."""


@dataclass(frozen=True)
class ImageSettings:
    """Settings that the texts of images depend on."""

    model: Mapping[str, Any]
    """Content of config.json."""
    processor: Mapping[str, Any]
    """Content of processor_config.json, and of preprocessor_config.json."""
    token: str
    """Text of the token of images."""


def _rows(settings: ImageSettings, inputs: Inputs) -> int:
    return len(inputs["pixel_values"])


def _of_grid(settings: ImageSettings, inputs: Inputs) -> str:
    merged = int(settings.processor.get("merge_size", 2)) ** 2
    return settings.token * (int(inputs["image_grid_thw"][0].prod()) // merged)


def _of_llava(settings: ImageSettings, inputs: Inputs) -> str:
    vision = settings.model["vision_config"]
    patch = int(settings.processor.get("patch_size") or vision["patch_size"])
    *_, height, width = inputs["pixel_values"].shape
    count = (height // patch) * (width // patch)
    # The tower puts a token for the whole image first, which "default" leaves out again.
    strategy = settings.processor.get("vision_feature_select_strategy")
    strategy = strategy or settings.model.get("vision_feature_select_strategy", "default")
    return settings.token * (count + (strategy != "default"))


def _of_gemma(settings: ImageSettings, inputs: Inputs) -> str:
    count = int(settings.model["mm_tokens_per_image"])
    return f"\n\n<start_of_image>{settings.token * count}<end_of_image>\n\n"


def _of_tiles(settings: ImageSettings, inputs: Inputs) -> str:
    """Idefics 3: rows of tiles, and the whole image."""
    rows, columns = (int(inputs[key][0][0]) for key in ("rows", "cols"))
    vision, scale = settings.model["vision_config"], int(settings.model.get("scale_factor", 2))
    side = int(vision["image_size"]) // int(vision["patch_size"]) // scale
    tile, fake = settings.token * side**2, "<fake_token_around_image>"
    tiles = "".join(
        "".join(f"{fake}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    )
    return tiles + ("\n" if tiles else "") + f"{fake}<global-img>{tile}{fake}"


def _squares(settings: ImageSettings, inputs: Inputs) -> int:
    """Patches of pixels, of all tiles."""
    *images, _, height, width = inputs["pixel_values"].shape
    side = int(settings.model["vision_config"].get("patch_size") or 14)
    return math.prod(images) * (height // side) * (width // side)


def _as_any(settings: ImageSettings, inputs: Inputs, patches: int) -> Inputs:
    """All images are of one size."""
    return inputs


def _with_rows(settings: ImageSettings, inputs: Inputs, patches: int) -> Inputs:
    """A grid that is as square as can be; its sides are even, since patches are merged."""
    pixels = inputs["pixel_values"]
    half = next(
        side for side in range(math.isqrt(patches) // 2, 0, -1) if patches % (4 * side) == 0
    )
    grid = [[1, 2 * half, patches // (2 * half)]]
    return {
        "pixel_values": pixels.new_empty(patches, pixels.shape[1]),
        "image_grid_thw": inputs["image_grid_thw"].new_tensor(grid),
    }


def _with_tiles(settings: ImageSettings, inputs: Inputs, patches: int) -> Inputs:
    pixels, mask = inputs["pixel_values"], inputs["pixel_attention_mask"]
    count = patches * pixels.shape[1] // _squares(settings, inputs)
    return {
        # In a single row, beside the whole image.
        "rows": [[int(count > 1)]],
        "cols": [[count - 1]],
        "pixel_values": pixels.new_empty(1, count, *pixels.shape[2:]),
        "pixel_attention_mask": mask.new_ones(1, count, *mask.shape[2:]),
    }


FAMILIES = (
    Family(
        types=("llava",),
        token="image_token_index",
        mark="{token}",
        text=_of_llava,
        patches=_squares,
        sized=_as_any,
        options={},
    ),
    Family(
        types=("gemma3",),
        token="image_token_index",
        mark="<start_of_image>",
        text=_of_gemma,
        patches=_squares,
        sized=_as_any,
        options={"do_pan_and_scan": False},
        sees_itself=True,
    ),
    Family(
        types=("qwen2_vl", "qwen2_5_vl"),
        token="image_token_id",
        mark="{token}",
        text=_of_grid,
        patches=_rows,
        sized=_with_rows,
        read=towers.with_grid,
        features=towers.of_grid,
        options={},
        axes=True,
    ),
    Family(
        types=("idefics3",),
        token="image_token_id",
        mark="{token}",
        text=_of_tiles,
        patches=_squares,
        sized=_with_tiles,
        read=towers.with_tiles,
        features=towers.of_tiles,
        options={"return_row_col_info": True},
        nested=True,
    ),
)
"""Families whose images ftkit trains on."""


def family_of(model_type: str) -> Family | None:
    """Return the family of a type of models; None: ftkit gives it no images."""
    return next((family for family in FAMILIES if model_type in family.types), None)
