"""How one base model takes images: by its image processor."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ftkit.extensions.images.families import FAMILIES, NOT_GIVEN, patches_of
from ftkit.extensions.images.files import FILES, checked_size, decode, size_by_header
from ftkit.extensions.images.found_files import BrokenMedium, read_file
from ftkit.extensions.images.media_model import MediaModel
from ftkit.extensions.images.towers import Inputs
from ftkit.strategies.step_memory import MediaSize


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes to which images are scaled before the processor of a model."""

    image_max_pixels: int | None = None
    image_min_pixels: int | None = None

    def within(self, image: Any) -> Any:
        """Scale an image, keeping the ratio of its sides, as LLaMA-Factory does it."""
        for limit, scales in (
            (self.image_max_pixels, int.__gt__),
            (self.image_min_pixels, int.__lt__),
        ):
            pixels = image.width * image.height
            if limit is not None and scales(pixels, limit):
                factor = math.sqrt(limit / pixels)
                sides = (max(int(side * factor), 1) for side in image.size)
                image = image.resize(tuple(sides))
        return image


class ImageModel(MediaModel):
    """Settings and image processor of a base model that sees."""

    files = FILES
    families = FAMILIES
    not_given = NOT_GIVEN
    token_keys = ("image_token_id", "image_token_index")

    def __init__(self, directory: Path, token_text: Any, limits: Limits = Limits()) -> None:
        """Read the settings; arguments as of `MediaModel`, and limits of the sizes of images."""
        super().__init__(directory, token_text)
        self._limits = limits
        self._texts: dict[tuple[tuple[int, int], bool], tuple[str, int]] = {}

    @classmethod
    def of(
        cls, directory: Path, tokenizer: Any, options: Mapping[str, Any] = MappingProxyType({})
    ) -> "ImageModel":
        names = (field.name for field in dataclasses.fields(Limits))
        given = {name: options[name] for name in names if options.get(name) is not None}
        return _read_once(directory, tokenizer, Limits(**given))

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        # The backend of Pillow needs no torchvision, and no code of the directory is run.
        return AutoImageProcessor.from_pretrained(
            self._directory, backend="pil", trust_remote_code=False, local_files_only=True
        )

    def inputs(self, content: bytes, tokens: int) -> Inputs:
        image = decode(content)
        is_alone = not self.family.depends or self._tokens_alone(image.size) == tokens
        return self._processed(image, is_alone=is_alone)

    def _tokens_alone(self, size: tuple[int, int]) -> int:
        return self._text_of(size, is_alone=True)[0].count(self.token)

    def _processed(self, image: Any, *, is_alone: bool) -> Inputs:
        image = self._limits.within(image)
        images: list[Any] = [[image]] if self.family.nested else [image]
        if self.family.depends and not is_alone:
            images = [[image, _blank((1, 1))]]
        try:
            options = self.family.options(self._settings)
            found = self._processor(images=images, return_tensors="pt", **options)
        # Processors raise what they meet in images of extreme shapes.
        except Exception as error:
            size = f"{image.width:,} x {image.height:,}"
            raise BrokenMedium(f"is {size}, which the model does not take ({error})") from None
        return {key: value[:1] if self.family.depends else value for key, value in found.items()}

    @property
    def tower_config(self) -> Any:
        return self.configured.vision_config

    @cached_property
    def any_inputs(self) -> Inputs:
        return self._processed(_blank((64, 64)), is_alone=True)

    def inputs_of_size(self, size: int, tokens: int = 0) -> Inputs:
        return self.family.sized(self._settings, self.any_inputs, size)

    def tokens_of(self, media: MediaSize) -> list[int]:
        made = map(self.inputs_of_size, media.sizes)
        return [self.family.text(self._settings, one).count(self.token) for one in made]

    def text_of(self, content: bytes, *, is_alone: bool) -> tuple[str, int]:
        return self._text_of(checked_size(content), is_alone=is_alone)

    def text_by_header(self, file: str, *, is_alone: bool) -> tuple[str, int]:
        try:
            return self._text_of(size_by_header(read_file(Path(file))), is_alone=is_alone)
        except BrokenMedium:
            return "", 0

    def _text_of(self, size: tuple[int, int], *, is_alone: bool) -> tuple[str, int]:
        """Text and patches of images of a size: all become the same."""
        if (size, is_alone) not in self._texts:
            inputs = self._processed(_blank(size), is_alone=is_alone)
            self._texts[size, is_alone] = (
                self.family.text(self._settings, inputs),
                patches_of(self._settings, inputs),
            )
        return self._texts[size, is_alone]

    def positions(self, ids: torch.Tensor, inputs: list[Inputs]) -> torch.Tensor:
        # As `get_rope_index` of transformers' models, which reads values on the device.
        merge = int(self._settings.processor.get("merge_size", 2))
        made: list[torch.Tensor] = []
        at, now = 0, 0
        is_image = (ids == self.token_id).tolist()
        for one in inputs:
            _, height, width = (int(side) for side in one["image_grid_thw"][0])
            height, width = height // merge, width // merge
            first = is_image.index(True, at)
            made.append(now + torch.arange(first - at).expand(3, -1))
            now += first - at
            rows = torch.arange(height).repeat_interleave(width)
            columns = torch.arange(width).repeat(height)
            made.append(now + torch.stack([torch.zeros_like(rows), rows, columns]))
            now, at = now + max(height, width), first + height * width
        made.append(now + torch.arange(len(ids) - at).expand(3, -1))
        return torch.cat(made, dim=1)


@cache
def _read_once(directory: Path, tokenizer: Any, limits: Limits) -> ImageModel:
    return ImageModel(directory, tokenizer.token_text, limits)


def _blank(size: tuple[int, int]) -> Any:
    from PIL import Image

    return Image.new("RGB", size)


settings_of = ImageModel.settings_of
"""Gives what of a base model decides how images become tokens and tensors."""
