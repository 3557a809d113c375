"""Families of models that take media: what one becomes in a text, how its tokens are placed.

A new family is a row here. What a processor of transformers writes for an image is written here
again, because these processors need torchvision, also where their image processors do not.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ftkit.extensions.images import towers
from ftkit.extensions.images.towers import Features, Inputs


@dataclass(frozen=True)
class MediaSettings:
    """Settings that the texts of media depend on."""

    model: Mapping[str, Any]
    """Content of config.json."""
    processor: Mapping[str, Any]
    """Settings of the processor of media, and content of processor_config.json."""
    token: str
    """Text of the token that stands for a part of a medium."""
    text_of: Callable[[int], str]
    """Gives the text of any token."""

    def of_vision(self, key: str) -> int:
        """A size of the tower: of a square, one of its sides."""
        value = self.model["vision_config"][key]
        return int(value[0] if isinstance(value, list) else value)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models that take media of a kind, such as images."""

    types: tuple[str, ...]
    """Values of model_type in config.json."""
    text: Callable[[MediaSettings, Inputs], str]
    """What stands in the text for an image that has been processed, in the place of `mark`."""
    mark: str = "{token}"
    """What chat templates of the family write for an image; {token} is the text of the token."""
    sized: Callable[[MediaSettings, Inputs, int], Inputs]
    """Inputs of any image with a number of patches, by those of another; their values do not
    matter. Of audio, whose cost is the same, with a number of tokens."""
    values: str = "pixel_values"
    """Name of what the tower is given in its own number format."""
    read: Callable[[Any, Inputs], Inputs] = towers.as_read
    """What the tower is given of the inputs, by its settings; the host computes it."""
    features: Callable[[Any, Inputs], Features] = towers.by_own_function
    """What the owner of tower and projector makes of this."""
    options: Callable[[MediaSettings], Mapping[str, Any]] = lambda settings: {}
    """Further arguments of the image processor, which transformers' processor would give it."""
    tower: tuple[str, ...] = ("vision_tower",)
    """Modules that compute patches, by their names beside the language model."""
    projector: tuple[str, ...] = ("multi_modal_projector",)
    """Modules that make features for the language model of them; they may lie in the tower."""
    nested: bool = False
    """Whether the image processor takes a list of the images of each sample."""
    depends: bool = False
    """Whether an image that is the only one of its sample becomes something else."""
    axes: bool = False
    """Whether tokens of images have positions along three axes: time, height and width."""
    sees_itself: bool = False
    """Whether the tokens of an image also see its later ones, whatever the settings say."""
    has_prefix: bool = False
    """Whether all tokens before an answer see each other."""

    def trains_tower(self, modules: Iterable[str]) -> bool:
        """Return whether modules of a model, by their names in it, are trained parts of a tower."""
        return any(
            any(f".{one}." in f".{module}." for one in self.tower)
            and not any(f".{one}." in f".{module}." for one in self.projector)
            for module in modules
        )


def patches_of(settings: MediaSettings, inputs: Inputs) -> int:
    """Number of patches that the tower computes for an image."""
    pixels = inputs["pixel_values"]
    if pixels.ndim < 4:  # they lie in a row, behind which some may only pad
        places = inputs.get("image_position_ids")
        return pixels.shape[-2] if places is None else int((places[..., 0] >= 0).sum())
    side = settings.of_vision("patch_size")
    *_, channels, height, width = pixels.shape
    pictures = pixels.numel() // (channels * height * width)
    return pictures * (-(-height // side) * -(-width // side))


def _of_grid(settings: MediaSettings, inputs: Inputs) -> str:
    merged = int(settings.processor.get("merge_size", 2)) ** 2
    return settings.token * (int(inputs["image_grid_thw"][0].prod()) // merged)


def _patch_side(settings: MediaSettings) -> int:
    own = settings.processor.get("patch_size")
    return own if isinstance(own, int) else settings.of_vision("patch_size")


def _whole_tokens(settings: MediaSettings) -> int:
    """Tokens for a whole image that the tower puts before those of its parts, and that stay."""
    # By default they are left out again.
    strategy = settings.processor.get("vision_feature_select_strategy")
    strategy = strategy or settings.model.get("vision_feature_select_strategy", "default")
    return int(settings.processor.get("num_additional_image_tokens", 1)) - (strategy == "default")


def _of_llava(settings: MediaSettings, inputs: Inputs) -> str:
    side = _patch_side(settings)
    *_, height, width = inputs["pixel_values"].shape
    return settings.token * ((height // side) * (width // side) + _whole_tokens(settings))


def _of_llava_next(settings: MediaSettings, inputs: Inputs) -> str:
    """The whole image, then its tiles without their padding, with a token behind each row."""
    side = inputs["pixel_values"].shape[-1] // _patch_side(settings)
    rows, columns = _shown(settings, inputs)
    return settings.token * (side**2 + _whole_tokens(settings) + rows * (columns + 1))


def _of_llava_onevision(settings: MediaSettings, inputs: Inputs) -> str:
    """As `_of_llava_next`, with tiles scaled down to a limit; no tiles beside other images."""
    side = inputs["pixel_values"].shape[-1] // _patch_side(settings)
    if int(inputs["batch_num_images"][0]) > 1:
        return settings.token * (side**2 + 1)
    rows, columns = _shown(settings, inputs)
    limit = settings.model.get("vision_aspect_ratio", "anyres_max_9").removeprefix("anyres_max_")
    ratio = math.sqrt(rows * columns / (int(limit) * side**2))
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return settings.token * (side**2 + rows * (columns + 1))


def _shown(settings: MediaSettings, inputs: Inputs) -> tuple[int, int]:
    """Rows and columns of the tokens of tiles that show a part of the image."""
    from transformers.image_processing_utils import select_best_resolution

    height, width = (int(side) for side in inputs["image_sizes"][0])
    *_, high, wide = inputs["pixel_values"].shape
    rows, columns = high // _patch_side(settings), wide // _patch_side(settings)
    best = select_best_resolution((height, width), settings.processor["image_grid_pinpoints"])
    all_rows, all_columns = rows * (best[0] // high), columns * (best[1] // wide)
    # An image of other proportions than the tiles has been padded on two sides.
    if width / height > all_columns / all_rows:
        shown = int(round(height * (all_columns / width), 7))
        all_rows -= (all_rows - shown) // 2 * 2
    else:
        shown = int(round(width * (all_rows / height), 7))
        all_columns -= (all_columns - shown) // 2 * 2
    return all_rows, all_columns


def _of_paligemma(settings: MediaSettings, inputs: Inputs) -> str:
    return settings.token * int(settings.processor["image_seq_length"])


def _of_gemma(settings: MediaSettings, inputs: Inputs) -> str:
    count = int(settings.model["mm_tokens_per_image"])
    return f"\n\n<start_of_image>{settings.token * count}<end_of_image>\n\n"


def _of_gemma_4(settings: MediaSettings, inputs: Inputs) -> str:
    ends = (settings.model[f"{end}_token_id"] for end in ("boi", "eoi"))
    first, last = (settings.text_of(int(end)) for end in ends)
    return f"{first}{settings.token * int(inputs['num_soft_tokens_per_image'][0])}{last}"


def _of_tiles(settings: MediaSettings, inputs: Inputs) -> str:
    """Rows of tiles, and the whole image (Idefics 3, SmolVLM)."""
    rows, columns = (int(inputs[key][0][0]) for key in ("rows", "cols"))
    scale = int(settings.model.get("scale_factor", 2))
    side = settings.of_vision("image_size") // settings.of_vision("patch_size") // scale
    tile, fake = settings.token * side**2, "<fake_token_around_image>"
    tiles = "".join(
        "".join(f"{fake}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    )
    return tiles + ("\n" if tiles else "") + f"{fake}<global-img>{tile}{fake}"


def _of_internvl(settings: MediaSettings, inputs: Inputs) -> str:
    side = settings.of_vision("image_size") // settings.of_vision("patch_size")
    tile = int((side * float(settings.model.get("downsample_ratio", 0.5))) ** 2)
    return f"<img>{settings.token * (tile * len(inputs['pixel_values']))}</img>"


def _merged_side(settings: MediaSettings) -> int:
    """Pixels along a token of an image."""
    return settings.of_vision("patch_size") * int(settings.model.get("spatial_merge_size", 2))


def _of_pixtral(settings: MediaSettings, inputs: Inputs) -> str:
    """Rows of tokens with a token between them, and one that ends the image."""
    side = _merged_side(settings)
    height, width = (int(one) // side for one in inputs["image_sizes"][0])
    between, end = (
        str(settings.processor.get(f"image_{name}_token", f"[IMG_{name.upper()}]"))
        for name in ("break", "end")
    )
    return between.join([settings.token * width] * height) + end


def _pictures(settings: MediaSettings, inputs: Inputs, patches: int) -> Tensor:
    """[..., tiles, channels, height, width], as many tiles as have a number of patches."""
    pixels = inputs["pixel_values"]
    count = patches * pixels.shape[-4] // patches_of(settings, inputs)
    return pixels.new_empty(*pixels.shape[:-4], count, *pixels.shape[-3:])


def _with_pictures(settings: MediaSettings, inputs: Inputs, patches: int) -> Inputs:
    return {"pixel_values": _pictures(settings, inputs, patches)}


def _sides_of(patches: int) -> tuple[int, int]:
    """Sides of a grid that is as square as can be; they are even, since patches are merged."""
    half = next(
        side for side in range(math.isqrt(patches) // 2, 0, -1) if patches % (4 * side) == 0
    )
    return 2 * half, patches // (2 * half)


def _with_rows(settings: MediaSettings, inputs: Inputs, patches: int) -> Inputs:
    return {
        "pixel_values": inputs["pixel_values"].new_empty(patches, inputs["pixel_values"].shape[1]),
        "image_grid_thw": inputs["image_grid_thw"].new_tensor([[1, *_sides_of(patches)]]),
    }


def _with_sides(settings: MediaSettings, inputs: Inputs, patches: int) -> Inputs:
    sides = [side * settings.of_vision("patch_size") for side in _sides_of(patches)]
    return {
        "pixel_values": inputs["pixel_values"].new_empty(1, 3, *sides),
        "image_sizes": [sides],
    }


def _with_places(settings: MediaSettings, inputs: Inputs, patches: int) -> Inputs:
    pixels, places = inputs["pixel_values"], inputs["image_position_ids"]
    return {
        "pixel_values": pixels.new_empty(1, patches, pixels.shape[2]),
        "image_position_ids": places.new_zeros(1, patches, 2),
        "num_soft_tokens_per_image": [patches // settings.of_vision("pooling_kernel_size") ** 2],
    }


def _with_pinpoints(settings: MediaSettings, inputs: Inputs, patches: int) -> Inputs:
    """Of the proportions of its tiles, so that none is padded."""
    pixels = _pictures(settings, inputs, patches)
    _, count, _, high, wide = pixels.shape
    sizes = settings.processor["image_grid_pinpoints"]
    size = next((one for one in sizes if one[0] * one[1] == (count - 1) * high * wide), sizes[0])
    # LLaVA-OneVision has no tiles where a sample has several images.
    return {"pixel_values": pixels, "image_sizes": [size], "batch_num_images": [1 + (count == 1)]}


def _with_tiles(settings: MediaSettings, inputs: Inputs, patches: int) -> Inputs:
    pixels, mask = _pictures(settings, inputs, patches), inputs["pixel_attention_mask"]
    count = pixels.shape[1]
    return {
        # In a single row, beside the whole image.
        "rows": [[int(count > 1)]],
        "cols": [[count - 1]],
        "pixel_values": pixels,
        "pixel_attention_mask": mask.new_ones(1, count, *mask.shape[2:]),
    }


def _of_frames(settings: MediaSettings, inputs: Inputs) -> str:
    return settings.token * towers.tokens_of_frames(inputs["frames"])


def _with_frames(settings: MediaSettings, inputs: Inputs, tokens: int) -> Inputs:
    return {**inputs, "frames": towers.frames_of_tokens(tokens)}


_OF_QWEN: dict[str, Any] = {
    "tower": ("visual",),
    "projector": ("visual.merger", "visual.deepstack_merger_list"),
    "axes": True,
}
FAMILIES = (
    Family(types=("llava",), text=_of_llava, sized=_with_pictures),
    Family(
        types=("llava_next",), text=_of_llava_next, sized=_with_pinpoints, read=towers.with_sizes
    ),
    Family(
        types=("llava_onevision",),
        text=_of_llava_onevision,
        sized=_with_pinpoints,
        read=towers.with_sizes,
        nested=True,
        depends=True,
    ),
    Family(
        types=("gemma3",),
        mark="<start_of_image>",
        text=_of_gemma,
        sized=_with_pictures,
        options=lambda _: {"do_pan_and_scan": False},
        sees_itself=True,
    ),
    Family(
        types=(
            *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
            *("qwen3_5", "qwen3_5_moe"),
        ),
        text=_of_grid,
        sized=_with_rows,
        read=towers.with_grid,
        features=towers.of_grid,
        **_OF_QWEN,
    ),
    Family(types=("paligemma",), text=_of_paligemma, sized=_with_pictures, has_prefix=True),
    Family(
        types=("glm4v", "glm4v_moe"),
        text=_of_grid,
        sized=_with_rows,
        read=towers.with_grid,
        features=towers.of_grid_on_device,
        **_OF_QWEN,
    ),
    Family(
        types=("idefics3", "smolvlm"),
        text=_of_tiles,
        sized=_with_tiles,
        read=towers.with_tiles,
        features=towers.of_tiles,
        tower=("vision_model",),
        projector=("connector",),
        options=lambda _: {"return_row_col_info": True},
        nested=True,
    ),
    Family(
        types=("gemma4",),
        text=_of_gemma_4,
        sized=_with_places,
        read=towers.with_places,
        features=towers.of_places,
        projector=("embed_vision",),
    ),
    Family(
        types=("internvl",),
        text=_of_internvl,
        sized=_with_pictures,
        options=lambda _: {"crop_to_patches": True},
    ),
    Family(
        types=("mistral3",),
        text=_of_pixtral,
        sized=_with_sides,
        features=towers.of_sides,
        options=lambda settings: {"patch_size": _merged_side(settings)},
    ),
)
"""Families whose images ftkit trains on."""
HEARING = (
    Family(
        types=("qwen2_audio",),
        text=_of_frames,
        sized=_with_frames,
        values="input_features",
        read=towers.with_frames,
        features=towers.of_frames,
        tower=("audio_tower",),
    ),
)
"""Families whose audio ftkit trains on."""
_TORCHVISION = "their image processor needs torchvision, without which ftkit is installed"
NOT_GIVEN = {
    "mllama": "they attend to images by cross-attention, and have no tokens for them",
    **dict.fromkeys(
        (
            *("cohere2_vision", "kimi_k25", "lfm2_vl", "llama4", "perception_lm"),
            "phi4_multimodal",
        ),
        _TORCHVISION,
    ),
}
"""Why models of some types are given no images."""
