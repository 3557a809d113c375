"""The reader of images of micro-batches: pixels, places, positions and blocks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ftkit.data.media import MediaReader, read_each
from ftkit.data.records.media import Medium
from ftkit.errors import UserError
from ftkit.extensions.images.files import BrokenImage
from ftkit.extensions.images.image_model import ImageModel, content_of


class ImageReader(MediaReader):
    """Reads the images of samples for one base model."""

    def __init__(self, model: ImageModel) -> None:
        """Take the settings of the base model."""
        self._model = model

    def read(
        self,
        media: Sequence[Sequence[Medium]],
        ids: Sequence[Any],
        width: int | None,
        answers: Sequence[int] | None = None,
    ) -> Mapping[str, Any]:
        """Read the images of a micro-batch; arguments as of `MediaReader`.

        Returns:
            images: what the tower is given of each; of a blank one where there is none.
            is_blank: missing where there are images.
            places: [tokens of images], where they are among all tokens of the micro-batch.
            positions: [3, batch, sequence]; missing where positions have one axis.
            behind: [sequences], what an answer behind each adds to the count of tokens; as those.
            lengths: tokens of each sequence; as those.
            blocks: of each sequence, the spans whose tokens see each other: of its images, or all
                before its answer; missing where no token sees a later one.
        """
        family = self._model.family
        images, places, positions, blocks = [], [], [], []
        start = 0
        read = read_each(self._inputs, [medium for own in media for medium in own])
        ends = answers or [len(tokens) for tokens in ids]
        for own, tokens, end in zip(media, ids, ends, strict=True):
            sequence = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
            found = [next(read) for _ in own]
            is_image = sequence == self._model.token_id
            images += [self._model.read(inputs) for inputs in found]
            places.append(is_image.nonzero()[:, 0] + start)
            if family.axes:
                positions.append(self._model.positions(sequence, found))
            spans = tuple((medium.first, medium.end) for medium in own)
            blocks.append(((0, end),) if family.has_prefix else spans)
            start += len(sequence) if width is None else width
        made: dict[str, Any] = {"images": images, "places": torch.cat(places)}
        if not images:
            made |= {"images": [self._model.blank], "is_blank": True}
        if family.axes:
            made["positions"] = _laid_out(positions, width)
            made["lengths"] = tuple(own.size(1) for own in positions)
            made["behind"] = torch.tensor([int(own.max()) + 1 - own.size(1) for own in positions])
        if self._model.has_blocks:
            made["blocks"] = tuple(blocks)
        return made

    def _inputs(self, medium: Medium) -> Mapping[str, Any]:
        try:
            content = content_of(medium.file, medium.digest)
            return self._model.inputs(content, medium.end - medium.first)
        except BrokenImage as broken:
            raise UserError(f"The image {medium.file} {broken}.") from None


def _laid_out(positions: Sequence[torch.Tensor], width: int | None) -> torch.Tensor:
    """[3, batch, sequence], of the positions of each sequence."""
    if width is None:
        return torch.cat(list(positions), dim=1)[:, None]
    made = torch.zeros(3, len(positions), width, dtype=torch.int64)
    for row, own in enumerate(positions):
        made[:, row, : own.size(1)] = own
    return made
