"""How one base model takes images: its settings, and its image processor."""

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ftkit.errors import UserError
from ftkit.extensions.images.families import (
    FAMILIES,
    NOT_GIVEN,
    Family,
    ImageSettings,
    family_of,
    patches_of,
)
from ftkit.extensions.images.files import (
    BrokenImage,
    checked_size,
    decode,
    read_file,
    size_by_header,
)
from ftkit.extensions.images.towers import Inputs

_SETTINGS = ("preprocessor_config.json", "processor_config.json")


def settings_of(directory: Path) -> dict[str, Any] | None:
    """Return what decides the tokens of an image and its pixels, as JSON values.

    Args:
        directory: of the base model.

    Returns:
        None: ftkit gives it no images.
    """
    config = _json(directory / "config.json")
    if family_of(str(config.get("model_type"))) is None:
        return None
    return {"model": config, "processor": {name: _json(directory / name) for name in _SETTINGS}}


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


class ImageModel:
    """Settings and image processor of a base model that sees."""

    def __init__(self, directory: Path, token_text: Any, limits: Limits) -> None:
        """Read the settings.

        Args:
            directory: of the base model.
            token_text: function that gives the text of a token.
            limits: of the sizes of images.

        Raises:
            UserError: ftkit cannot give images to this model.
        """
        if find_spec("transformers.vision_utils") is None:
            raise UserError(
                "The records have images, which need a newer transformers than "
                f"{version('transformers')}.\nTry pip install 'transformers>=5.24'."
            )
        self._directory, self._limits = directory, limits
        self.config = _json(directory / "config.json")
        kind = str(self.config.get("model_type"))
        family = family_of(kind)
        if family is None:
            known = ", ".join(name for one in FAMILIES for name in one.types)
            why = f": {NOT_GIVEN[kind]}" if kind in NOT_GIVEN else " so far"
            raise UserError(
                f"The records have images, but {kind} models are not given any{why}. ftkit gives "
                f"them to {known}.\nChoose such a model, or remove the records with images."
            )
        if not any((directory / name).is_file() for name in _SETTINGS):
            raise UserError(
                f"{directory} has no preprocessor_config.json, which says how images are read.\n"
                "Download the model again."
            )
        self.family: Family = family
        keys = ("image_token_id", "image_token_index")
        self.token_id = next(int(self.config[key]) for key in keys if key in self.config)
        self.token = str(token_text(self.token_id))
        """Text of the token that stands for a part of an image."""
        self._token_text = token_text
        of_text = self.config.get("text_config") or {}
        by_settings = of_text.get("use_bidirectional_attention") == "vision"  # Gemma 4
        self.has_blocks = family.sees_itself or family.has_prefix or by_settings
        """Whether some tokens also see later ones: of an image, or of a prompt."""
        self.mark = family.mark.format(token=self.token)
        self._texts: dict[tuple[tuple[int, int], bool], tuple[str, int]] = {}

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the tokens of an image and its pixels, as JSON values."""
        return settings_of(self._directory) or {}

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        # The backend of Pillow needs no torchvision, and no code of the directory is run.
        return AutoImageProcessor.from_pretrained(
            self._directory, backend="pil", trust_remote_code=False, local_files_only=True
        )

    @cached_property
    def _settings(self) -> ImageSettings:
        processor = self._processor.to_dict() | _json(self._directory / "processor_config.json")
        return ImageSettings(self.config, processor, self.token, self._token_text)

    def inputs(self, content: bytes, tokens: int) -> Inputs:
        """Decode and process an image.

        Args:
            content: of its file.
            tokens: that it has in its sample.

        Raises:
            BrokenImage: it cannot be decoded, or the model does not take it.
        """
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
            raise BrokenImage(f"is {size}, which the model does not take ({error})") from None
        return {key: value[:1] if self.family.depends else value for key, value in found.items()}

    @cached_property
    def configured(self) -> Any:
        """Settings of the model with what config.json leaves out."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(
            self._directory, trust_remote_code=False, local_files_only=True
        )

    def read(self, inputs: Inputs) -> Inputs:
        """Return what the tower is given of the inputs of an image."""
        return self.family.read(self.configured.vision_config, inputs)

    @cached_property
    def _any_inputs(self) -> Inputs:
        return self._processed(_blank((64, 64)), is_alone=True)

    @cached_property
    def blank(self) -> Inputs:
        """What the tower is given of an image that shows nothing."""
        return self.read(self._any_inputs)

    def inputs_of_size(self, patches: int) -> Inputs:
        """As `inputs`, of an image with a number of patches; the values do not matter."""
        return self.family.sized(self._settings, self._any_inputs, patches)

    def tokens_of_size(self, patches: int) -> int:
        """Tokens of an image with a number of patches."""
        return self.family.text(self._settings, self.inputs_of_size(patches)).count(self.token)

    def text_of(self, content: bytes, *, is_alone: bool) -> tuple[str, int]:
        """The text that an image becomes, and its patches.

        Args:
            content: of its file.
            is_alone: whether it is the only one of its sample.

        Raises:
            BrokenImage: it cannot be decoded, or the model does not take it.
        """
        return self._text_of(checked_size(content), is_alone=is_alone)

    def text_by_header(self, file: str, *, is_alone: bool) -> tuple[str, int]:
        """As `text_of`, without decoding it; nothing for a file that cannot be read."""
        try:
            return self._text_of(size_by_header(read_file(Path(file))), is_alone=is_alone)
        except BrokenImage:
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
        """[3, tokens], positions of the tokens of a sequence along time, height and width.

        As `get_rope_index` of transformers' models, which reads values on the device.

        Args:
            ids: [tokens].
            inputs: of the images of the sequence.
        """
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
def image_model(directory: Path, tokenizer: Any, limits: Limits | None = None) -> ImageModel:
    """Return the settings of a base model, read once.

    Args:
        directory: of the base model.
        tokenizer: of it.
        limits: of the sizes of images; None: those of its processor.
    """
    return ImageModel(directory, tokenizer.token_text, limits or Limits())


def content_of(file: str, digest: str) -> bytes:
    """Read a file again, which must hold what it held.

    Raises:
        UserError: it is not there, or holds something else.
    """
    try:
        content = read_file(Path(file))
    except BrokenImage as broken:
        raise UserError(
            f"The image {file} {broken}, but samples were made of it.\nPut it back."
        ) from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise UserError(
            f"The image {file} has changed since samples were made of it.\n"
            "Put the former one back, or start again to make new samples."
        )
    return content


def _blank(size: tuple[int, int]) -> Any:
    from PIL import Image

    return Image.new("RGB", size)


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
