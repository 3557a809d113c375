"""The reader of media of micro-batches: what towers are given, places, positions and blocks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ftkit.data.media import MediaReader, read_each
from ftkit.data.records.media import Medium
from ftkit.errors import UserError
from ftkit.extensions.images.found_files import BrokenMedium
from ftkit.extensions.images.media_model import MediaModel


class TowerReader(MediaReader):
    """Reads the media of samples for one base model."""

    def __init__(self, model: MediaModel) -> None:
        """Take the settings of the base model."""
        self._model = model

    def read(
        self,
        media: Sequence[Sequence[Medium]],
        ids: Sequence[Any],
        width: int | None,
        answers: Sequence[int] | None = None,
    ) -> Mapping[str, Any]:
        """Read the media of a micro-batch; arguments as of `MediaReader`.

        Returns:
            inputs: what the tower is given of each; of a blank one where there is none.
            is_blank: missing where there are media.
            places: [tokens of media], where they are among all tokens of the micro-batch.
            positions: [3, batch, sequence]; missing where positions have one axis.
            behind: [sequences], what an answer behind each adds to the count of tokens; as those.
            lengths: tokens of each sequence; as those.
            blocks: of each sequence, the spans whose tokens see each other: of its media, or all
                before its answer; missing where no token sees a later one.
        """
        family = self._model.family
        given, places, positions, blocks = [], [], [], []
        start = 0
        read = read_each(self._inputs, [medium for own in media for medium in own])
        ends = answers or [len(tokens) for tokens in ids]
        for own, tokens, end in zip(media, ids, ends, strict=True):
            sequence = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
            found = [next(read) for _ in own]
            is_of_media = sequence == self._model.token_id
            given += [self._model.read(inputs) for inputs in found]
            places.append(is_of_media.nonzero()[:, 0] + start)
            if family.axes:
                positions.append(self._model.positions(sequence, found))
            spans = tuple((medium.first, medium.end) for medium in own)
            blocks.append(((0, end),) if family.has_prefix else spans)
            start += len(sequence) if width is None else width
        made: dict[str, Any] = {"inputs": given, "places": torch.cat(places)}
        if not given:
            made |= {"inputs": [self._model.blank], "is_blank": True}
        if family.axes:
            made["positions"] = _laid_out(positions, width)
            made["lengths"] = tuple(own.size(1) for own in positions)
            made["behind"] = torch.tensor([int(own.max()) + 1 - own.size(1) for own in positions])
        if self._model.has_blocks:
            made["blocks"] = tuple(blocks)
        return made

    def _inputs(self, medium: Medium) -> Mapping[str, Any]:
        try:
            content = self._model.files.content(medium.file, medium.digest)
            return self._model.inputs(content, medium.end - medium.first)
        except BrokenMedium as broken:
            raise UserError(f"The {medium.kind} {medium.file} {broken}.") from None


def _laid_out(positions: Sequence[torch.Tensor], width: int | None) -> torch.Tensor:
    """[3, batch, sequence], of the positions of each sequence."""
    if width is None:
        return torch.cat(list(positions), dim=1)[:, None]
    made = torch.zeros(3, len(positions), width, dtype=torch.int64)
    for row, own in enumerate(positions):
        made[:, row, : own.size(1)] = own
    return made
