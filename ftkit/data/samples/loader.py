"""Data loaders: the micro-batches of a step with their labels, and those of validation."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ftkit.data.media import MediaReader, Pending
from ftkit.data.records.media import MEDIA, MEDIA_OF
from ftkit.data.samples.layout import (
    FILLER,
    IntArray,
    RankLayout,
    samples_or_filler,
    validation_batches,
)
from ftkit.data.samples.sample_set import Joined, Sample, Samples
from ftkit.data.samples.sampler import StepOrder
from ftkit.recipe.mesh import WHOLE, Piece

if TYPE_CHECKING:
    from ftkit.data.samples.shapes import FixedShapes
    from ftkit.data.samples.stream import Stream


def collate(
    samples: Sequence[Sample | None],
    divisors: Mapping[str, float],
    *,
    per_sample: int = 1,
    target_size: int = 0,
    weighted: bool = False,
    padding_free: bool = False,
    piece: Piece = WHOLE,
    shapes: "FixedShapes | None" = None,
    is_last_of_step: bool = True,
    source: int | None = None,
    numbers: Sequence[int] = (),
    reader: MediaReader | None = None,
    fills_media: bool = False,
) -> dict[str, Any]:
    """Make a micro-batch of samples: one after the other in a row, or padded to a rectangle.

    Args:
        samples: sequences, at least one; None is a filler, which becomes one token without a label.
        divisors: by name, what the sums of the loss are divided by: amounts of the whole step, over
            all ranks and micro-steps.
        per_sample: neighbours that are one sample.
        target_size: numbers of the target of a sequence; 0: it has none.
        weighted: whether some label of the data set has a weight other than 1.
        padding_free: whether they come in a row.
        piece: of the row, which ranks share: what is of tokens is of those in it.
        shapes: sizes to which micro-batches are padded; their rows are there, fillers included.
        is_last_of_step: whether an update follows it.
        source: the number of the one that all samples are of, if that counts.
        numbers: of the sequences in the data set, if they are known; FILLER for a filler.
        reader: reads their media, if they may have some.
        fills_media: whether a micro-batch without media gets a blank one, which stands nowhere.

    Returns:
        input_ids: [1, tokens] int64, all but the last token of each sample; or [batch, sequence],
            padded on the right with 0. A row that is shared ends with zeros that make its pieces
            equal.
        first: the place in the row of the first token here.
        is_real: like input_ids, bool: a token of a sample, no padding and no filler.
        sequence_lengths: tokens of each sample in the whole row, with fillers and what makes pieces
            equal; or None.
        lengths: tokens of each sample, in a row or padded.
        numbers: as given.
        label_indices: [labels] int64, indices into the flattened input_ids of the tokens whose
            next token carries loss.
        labels: [labels] int64, those next tokens.
        weights: [labels] float32, their weights; missing if all of the data set are 1. Labels that
            only pad are at the end, with weight 0.
        label_sequences: [labels] int64, the index of the sequence that each is of; the number of
            sequences for those that only pad.
        label_tokens: how many labels, without those that only pad.
        is_real_sequence: [sequences] bool: no filler.
        targets: [sequences, numbers] float32, what is learned of whole sequences, 0 for fillers;
            missing if they have none.
        divisors: by name, scalars in float64.
        is_last_of_step: as given.
        samples: how many, without fillers; 0 but for the first piece.
        tokens: how many, without padding and fillers.
        padded_tokens: numbers in input_ids.
        source: as given.
        media: `ftkit.data.media.Pending`; missing if the sequences have none, like the next.
        media_of: `ftkit.data.records.media.Medium` of each sequence.
    """
    lengths = [1 if sample is None else len(sample.ids) - 1 for sample in samples]
    width = max(lengths) if shapes is None else shapes.length_for(max(lengths))
    starts = np.cumsum([0, *lengths]) if padding_free else np.arange(len(lengths) + 1) * width
    own = piece.span(int(starts[-1]))
    filled = piece.tokens(int(starts[-1])) * piece.count
    input_ids = np.zeros(filled, dtype=np.int64)
    is_real = np.zeros(filled, dtype=np.bool_)
    label_indices = [np.empty(0, dtype=np.int64)]
    labels = [np.empty(0, dtype=np.int64)]
    weights = [np.empty(0, dtype=np.float32)]
    label_counts = np.zeros(len(samples), dtype=np.int64)
    for number, (sample, start, length) in enumerate(
        zip(samples, starts.tolist(), lengths, strict=False)
    ):
        if sample is None:
            continue
        input_ids[start : start + length] = sample.ids[:-1]
        is_real[start : start + length] = True
        before = start - 1  # a token is predicted at the place of the one before it
        of_spans = repeat(1.0) if sample.weights is None else sample.weights
        for (first, end), weight in zip(sample.trained, of_spans, strict=False):
            first = max(first, 1)
            label_indices.append(np.arange(before + first, before + end))
            labels.append(sample.ids[first:end].astype(np.int64))
            if weighted:
                weights.append(np.full(end - first, weight, dtype=np.float32))
            label_counts[number] += end - first
    label_sequences = np.repeat(np.arange(len(samples)), label_counts)
    row_lengths = [*lengths, filled - int(starts[-1])] if filled > starts[-1] else lengths
    if piece.count > 1:
        # The label of a token is of the next one, which another rank may have.
        places = np.concatenate(label_indices)
        here = (own.start <= places) & (places < own.stop)
        label_indices, label_sequences = [places[here] - own.start], label_sequences[here]
        labels = [np.concatenate(labels)[here]]
        weights = [np.concatenate(weights)[here]] if weighted else weights
        # Copies, so that nothing keeps the rest of the row.
        input_ids, is_real = input_ids[own].copy(), is_real[own].copy()
    label_tokens = len(label_sequences)
    if shapes is not None and shapes.pads_labels:
        missing = shapes.labels(width) - label_tokens
        # At the first place, whose token sees nothing but itself: its numbers are always finite.
        label_indices.append(np.zeros(missing, dtype=np.int64))
        labels.append(np.zeros(missing, dtype=np.int64))
        if not weighted:
            weights.append(np.ones(label_tokens, dtype=np.float32))
        weights.append(np.zeros(missing, dtype=np.float32))
        label_sequences = np.append(label_sequences, np.full(missing, len(samples)))
        weighted = True
    media: dict[str, Any] = {}
    has_media = fills_media or any(sample is not None and sample.media for sample in samples)
    if reader is not None and has_media:
        ids = [np.zeros(1, np.int32) if sample is None else sample.ids[:-1] for sample in samples]
        found = [() if sample is None else sample.media for sample in samples]
        media[MEDIA_OF] = found
        answers = [
            len(own) if sample is None or not len(sample.trained) else int(sample.trained[0][0])
            for sample, own in zip(samples, ids, strict=True)
        ]
        place = None if padding_free else width
        media[MEDIA] = Pending(partial(reader.read, found, ids, place, answers))
    fillers = sum(sample is None for sample in samples)
    return {
        "input_ids": torch.from_numpy(input_ids).view(1 if padding_free else len(lengths), -1),
        "is_real": torch.from_numpy(is_real).view(1 if padding_free else len(lengths), -1),
        "first": own.start,
        "sequence_lengths": tuple(row_lengths) if padding_free else None,
        "lengths": tuple(lengths),
        "numbers": tuple(numbers),
        "label_indices": torch.from_numpy(np.concatenate(label_indices)),
        "labels": torch.from_numpy(np.concatenate(labels)),
        **({"weights": torch.from_numpy(np.concatenate(weights))} if weighted else {}),
        "label_sequences": torch.from_numpy(label_sequences),
        "label_tokens": label_tokens,
        "is_real_sequence": torch.tensor([sample is not None for sample in samples]),
        **({"targets": _targets(samples, target_size)} if target_size else {}),
        # float64: float32 holds integers exactly up to 16.8 million alone.
        "divisors": {
            name: torch.tensor(value, dtype=torch.float64) for name, value in divisors.items()
        },
        "is_last_of_step": is_last_of_step,
        "samples": (len(samples) - fillers) // per_sample if piece.index == 0 else 0,
        "tokens": int(is_real.sum()),
        "padded_tokens": input_ids.size,
        "source": source,
        **media,
    }


def _targets(samples: Sequence[Sample | None], size: int) -> torch.Tensor:
    made = torch.zeros(len(samples), size)
    for row, sample in zip(made, samples, strict=True):
        if sample is not None:
            assert sample.target is not None, "all samples of a data set have one"
            row.copy_(torch.tensor(sample.target))
    return made


def train_batches(
    samples: "Samples | Stream",
    order: StepOrder,
    start_step: int,
    end_step: int,
    *,
    joined: Joined | None = None,
    fills_media: bool = False,
    pin_memory: bool = False,
) -> DataLoader[dict[str, Any]]:
    """Load this rank's micro-batches of the steps [start_step, end_step), one per micro-step.

    Starting at a later step replays nothing.

    Args:
        samples: the training data.
        order: of these samples.
        start_step: first step, counted from the start of the run.
        end_step: last step + 1.
        joined: makes the sequences of a second one under "joined", of each sample and the one
            before it in the order of the step, of the first and the last one; None: there is none.
        fills_media: as of `collate`.
        pin_memory: for copies to a GPU beside the computation.

    Returns:
        Loader of what collate returns, with
        places: of each sequence in the order of the step, over all ranks; of a filler their number.
        sequences_of_step: their number.
        It has no len: steps may have different numbers of micro-steps.
    """
    batches = _MicroBatches(samples, order.layout, joined=joined, fills_media=fills_media)
    return _loader(batches, _StepSampler(order, start_step, end_step), pin_memory)


def validation_loader(
    samples: Samples,
    amounts: Mapping[str, npt.NDArray[Any]],
    limit: int,
    layout: RankLayout,
    *,
    joined: Joined | None = None,
    pin_memory: bool = False,
) -> DataLoader[dict[str, Any]]:
    """Load this rank's batches of the first `limit` validation samples, as many on every rank.

    The samples of a batch are all of one source, so that the loss of each is known.

    Args:
        samples: the validation data.
        amounts: by name, [samples]: what sums over them are divided by.
        limit: samples over all ranks.
        layout: of a batch, on this rank.
        joined: as in `train_batches`, in the order of these samples.
        pin_memory: for copies to a GPU beside the computation.

    Returns:
        Loader of what `train_batches` yields, of samples that are all one step; the divisors are
        amounts of the batch alone, 0 but for the first of the ranks that share it.
    """
    sources = samples.sources[:limit]
    keys: list[_Key] = []
    for source in np.unique(sources).tolist():
        for found in _batches(samples, np.flatnonzero(sources == source), layout):
            real = [i for i in found if i != FILLER]
            # Once for all ranks that share the batch.
            counted = real if layout.piece.index == 0 else []
            sums = {name: float(values[counted].sum()) for name, values in amounts.items()}
            before = [i if i == FILLER else (i - 1) % len(sources) for i in found]
            keys.append(_Key(found, sums, source=source, step=_Places(found, before, len(sources))))
    batches = _MicroBatches(samples, layout, joined=joined)
    return _loader(batches, keys, pin_memory)


def inference_loader(
    samples: Samples, numbers: IntArray, layout: RankLayout
) -> DataLoader[dict[str, Any]]:
    """Load this rank's batches of some samples, as many on every rank.

    Args:
        samples: the data set.
        numbers: of the samples, without repetition.
        layout: of a batch, on this rank.

    Returns:
        Loader of what collate returns, without divisors.
    """
    keys = [_Key(found, {}) for found in _batches(samples, numbers, layout)]
    batches = _MicroBatches(samples, layout)
    return _loader(batches, keys, False)


def _batches(samples: Samples, numbers: IntArray, layout: RankLayout) -> Iterator[list[int]]:
    """Yield the numbers of each of this rank's batches of some samples."""
    lengths = samples.widths(padding_free=layout.padding_free)[numbers]
    for batch in validation_batches(lengths, len(numbers), layout):
        # The layout numbers the samples that it was given; the loader those of the data set.
        yield [i if i == FILLER else int(numbers[i]) for i in batch]


class _Places(NamedTuple):
    """Where samples of a micro-batch are in the order of their step."""

    places: list[int]
    """Of each, or FILLER."""
    before: list[int]
    """The sample before each."""
    samples: int
    """Samples of the step."""


class _Key(NamedTuple):
    """What to collate."""

    samples: list[int]
    divisors: Mapping[str, float]
    is_last: bool = True
    source: int | None = None
    step: _Places | None = None
    """None: they are of none."""


class _StepSampler(Sampler[_Key]):
    """Yields what to collate, micro-step by micro-step."""

    def __init__(self, order: StepOrder, start_step: int, end_step: int) -> None:
        assert order.start_step <= start_step <= end_step <= order.total_steps
        self._order = order
        self._start_step = start_step
        self._end_step = end_step

    def __iter__(self) -> Iterator[_Key]:
        for step in range(self._start_step, self._end_step):
            divisors = self._order.divisors(step)
            samples, places = self._order.samples(step), self._order.places(step)
            for number, of_micro_batch in enumerate(places, start=1):
                chosen = samples_or_filler(samples[of_micro_batch])
                of_step = _Places(
                    samples_or_filler(of_micro_batch),
                    samples_or_filler(samples[of_micro_batch - 1]),
                    len(samples),
                )
                yield _Key(chosen, divisors, is_last=number == len(places), step=of_step)


class _MicroBatches(Dataset[dict[str, Any]]):
    """Collated micro-batches, by the samples in them."""

    def __init__(
        self,
        samples: "Samples | Stream",
        layout: RankLayout,
        *,
        joined: Joined | None = None,
        fills_media: bool = False,
    ) -> None:
        self._samples, self._padding_free = samples, layout.padding_free
        self._piece = layout.piece
        self._fills_media = fills_media
        self._shapes = layout.shapes
        self._weighted = samples.label_weights is not None
        targets = samples.targets if isinstance(samples, Samples) else None
        self._target_size = 0 if targets is None else targets.shape[1]
        self._joined = joined
        if joined is not None:
            assert isinstance(samples, Samples), "a stream has documents"
            self._most = int(samples.longest.max()) + 1 if len(samples) else 0
            """Tokens of the longest sequence."""

    def __getitem__(self, key: _Key) -> dict[str, Any]:
        each, shapes, step = self._samples.per_sample, self._shapes, key.step
        missing = [] if shapes is None else [FILLER] * (shapes.rows - len(key.samples))
        indices = key.samples + missing
        sequences: list[Sample | None] = []
        numbers: list[int] = []
        for index in indices:
            is_filler = index == FILLER
            sequences += (None,) * each if is_filler else self._samples.sequences(index)
            numbers += (FILLER,) * each if is_filler else range(index * each, (index + 1) * each)
        batch = collate(
            sequences,
            key.divisors,
            per_sample=each,
            target_size=self._target_size,
            weighted=self._weighted,
            padding_free=self._padding_free,
            piece=self._piece,
            shapes=shapes,
            is_last_of_step=key.is_last,
            source=key.source,
            numbers=numbers,
            reader=self._samples.media_reader,
            fills_media=self._fills_media,
        )
        if step is None:
            return batch
        batch["sequences_of_step"] = end = step.samples * each
        places: list[int] = []
        for place in (*step.places, *missing):
            places += (end,) * each if place == FILLER else range(place * each, (place + 1) * each)
        batch["places"] = tuple(places)
        if self._joined is not None:
            samples = self._samples
            assert isinstance(samples, Samples)
            others = [None if i == FILLER else samples[i] for i in step.before + missing]
            batch["joined"] = collate(
                [
                    None if one is None or other is None else self._joined(one, other, self._most)
                    for one, other in zip(sequences, others, strict=True)
                ],
                {},
                padding_free=self._padding_free,
                piece=self._piece,
                shapes=shapes,
            )
        return batch


def _loader(
    batches: _MicroBatches, sampler: Sampler[_Key] | list[_Key], pin_memory: bool
) -> DataLoader[dict[str, Any]]:
    # Without workers, whatever num_workers says: the samples are tokenised already, collating
    # takes 0.05 ms, and forking a process that runs communication threads is not safe.
    return DataLoader(
        batches,
        batch_size=None,
        sampler=sampler,
        collate_fn=_keep,  # type: ignore[arg-type]  # without batch_size it gets one item
        pin_memory=pin_memory,
    )


def _keep(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch as it is; the default would turn its counts into tensors."""
    return batch
