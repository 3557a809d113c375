"""Media in the memory of a step: which a micro-batch has, measured and at most."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftkit.data.media import AHEAD
from ftkit.data.records.media import Medium, media_row
from ftkit.data.samples.sample_set import Samples, SampleSet
from ftkit.errors import UserError
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.recipe.companions import companion_row
from ftkit.recipe.plan import Plan
from ftkit.strategies.step_memory import MediaSize, MicroBatchSize
from ftkit.strategies.strategy import tensors_in
from ftkit.utils.registry import imported


def with_encoder(base: BaseModel, plan: Plan, kinds: Iterable[str]) -> BaseModel:
    """Return a base model that takes the media of its data, if they have some.

    Args:
        base: the model.
        plan: of the run.
        kinds: names of the kinds of media in the data; their extension is here.

    Raises:
        UserError: the run cannot give it any.
    """
    found = sorted({*kinds})
    if not found:
        return base
    row = media_row(found[0])
    if companion_row(plan.recipe.objective) is not None:
        raise UserError(
            f"The records have {row.noun}, but the other model of the objective is given none so "
            "far. Try --objective sft."
        )
    if plan.kind.compiles_shapes:
        raise UserError(
            f"The records have {row.noun}, whose sizes differ, but {plan.accelerator} devices "
            "compile a program for each size. Try another --accelerator."
        )
    if plan.mesh.context > 1:
        raise UserError(
            f"The records have {row.noun}, but strategy.context is {plan.mesh.context}, and ranks "
            "share sequences of texts alone so far. Try --strategy.context 1."
        )
    made = base.architecture.with_encoder(row.encoder_place)
    return dataclasses.replace(base, architecture=made)


def size_of(media: Sequence[Sequence[Medium]], lengths: Sequence[int]) -> MediaSize | None:
    """Size of the media of sequences; None: they have none.

    Args:
        media: of each sequence.
        lengths: input tokens of each sequence.
    """
    found = [medium for own in media for medium in own]
    if not found:
        return None
    return MediaSize(
        kind=found[0].kind,
        lengths=tuple(n for own, n in zip(media, lengths, strict=True) if own),
        sizes=tuple(medium.size for medium in found),
    )


def heaviest_media(samples: Iterable[Samples]) -> MediaSize | None:
    """As `heaviest_of`, of the media of each sample; None: none has any."""
    return heaviest_of(found for whole in samples for one in whole.sets for found in _heavy_in(one))


def heaviest_of(found: Iterable[MediaSize | None]) -> MediaSize | None:
    """Those that cost most to encode, of which the largest is as large as any of all.

    All of them are in memory at once, but they are encoded one by one.
    """
    known = [media for media in found if media is not None]
    if not known:
        return None
    heaviest = max(known, key=lambda media: sum(media.sizes))
    largest = max(size for media in known for size in media.sizes)
    # First, because gradients of all behind it are there when its own are computed.
    sizes = (largest, *sorted(heaviest.sizes)[:-1])
    return dataclasses.replace(heaviest, sizes=sizes)


def _heavy_in(samples: SampleSet) -> Iterator[MediaSize | None]:
    """Media of the sample that has most, and of that with the largest one."""
    media, offsets, sizes = samples.arrays.media, samples.arrays.media_offsets, samples.media_sizes
    if media is None or offsets is None or sizes is None or not len(media):
        return
    with_largest = np.searchsorted(offsets, int(media[:, 3].argmax()), side="right") - 1
    for index in (int(sizes.argmax()), int(with_largest) // samples.per_sample):
        own = samples.sequences(index)
        yield size_of([one.media for one in own], [len(one.ids) - 1 for one in own])


def with_media(
    batch: MicroBatchSize, heaviest: MediaSize | None, most_sequences: int
) -> MicroBatchSize:
    """Upper bound of a micro-batch whose sequences all have the heaviest media.

    Args:
        batch: without media.
        heaviest: media of one sequence; None: there are none.
        most_sequences: in a micro-batch, however short they are.
    """
    if heaviest is None:
        return batch
    size, count = batch, batch.sequences
    if batch.tokens is not None:
        # More of them than of the longest may have room in a row.
        count = max(count, min(most_sequences, batch.tokens // sum(heaviest.lengths)))
        if count > batch.sequences:
            positions = -(-batch.tokens // count)
            size = dataclasses.replace(batch, sequences=count, positions=positions)
    return dataclasses.replace(
        size,
        media=MediaSize(
            kind=heaviest.kind,
            lengths=size.lengths or (size.positions,) * count,
            sizes=heaviest.sizes * count,
        ),
    )


def simulated_media(base: BaseModel, size: MicroBatchSize, dtype: torch.dtype) -> Any:
    """Media of a micro-batch as `ftkit.data.media.MediaReader` reads them, of tensors on meta.

    Args:
        base: the model that takes them.
        size: of the micro-batch.
        dtype: of the model.

    Returns:
        None if it has none.
    """
    if size.media is None:
        return None
    return imported(media_row(size.media.kind).simulated_place)(base, size, dtype)


def waiting_bytes(base: BaseModel, size: MicroBatchSize, *, is_copied: bool) -> int:
    """Host memory of the media that are read, but not on the device, beside a micro-step.

    Args:
        base: the model that takes them.
        size: of the largest micro-batch.
        is_copied: whether the micro-step computes on a copy, and those that were read stay.
    """
    media = simulated_media(base, size, torch.float32)
    return (AHEAD + is_copied) * sum(tensor.nbytes for tensor in tensors_in(media))


def allocated(media: Any) -> Any:
    """Return media whose tensors on the meta device are allocated; what they hold is undefined."""
    if isinstance(media, Tensor):
        return torch.empty(media.shape, dtype=media.dtype)
    if isinstance(media, dict):
        return {name: allocated(value) for name, value in media.items()}
    if isinstance(media, list | tuple):
        return type(media)(allocated(value) for value in media)
    return media
