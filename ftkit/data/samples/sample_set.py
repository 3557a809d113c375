"""Samples: tokenised, in arrays, of one source or of several in one order."""

import hashlib
import json
import os
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from ftkit.data.media import MediaReader
from ftkit.data.records.media import MediaFile, MediaNumbers, Medium
from ftkit.data.rendering import Rendered
from ftkit.data.samples.layout import IntArray

_Number = TypeVar("_Number", bound=np.number[Any] | np.bool_)


class Sample(NamedTuple):
    """The tokens of a sequence, and which of them carry loss."""

    ids: npt.NDArray[np.int32]
    """[tokens]."""
    trained: npt.NDArray[np.int32]
    """[spans, 2]: first token and end of each span that carries loss. The first token of all never
    does: nothing predicts it."""
    weights: npt.NDArray[np.float32] | None = None
    """[spans], weight of the tokens of each; None: all weigh 1."""
    target: npt.NDArray[np.float32] | None = None
    """[numbers], what is learned of it as a whole; None: its tokens are learned."""
    media: tuple[Medium, ...] = ()
    """Its media, in the order of their tokens."""


Joined = Callable[[Sample, Sample, int], Sample]
"""Makes a sequence of a sample and the one before it in a step, of so many tokens at most."""


class Samples(Dataset[Sample]):
    """Tokenised samples by their number; each has one sequence, or as many as an objective needs.

    The sequences of a sample stay together: they are trained on in one micro-batch.
    """

    per_sample: int
    """Sequences of each sample."""
    media_reader: MediaReader | None = None
    """Reads their media; None: they have none."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sequences(self, index: int) -> tuple[Sample, ...]:
        """The sequences of a sample."""

    def __getitem__(self, index: int) -> Sample:
        """The first sequence of a sample."""
        return self.sequences(index)[0]

    @property
    @abstractmethod
    def lengths_by_sequence(self) -> IntArray:
        """[samples, per_sample], tokens that the model is given: all but the last."""

    @property
    @abstractmethod
    def label_counts_by_sequence(self) -> IntArray:
        """[samples, per_sample], tokens that carry loss."""

    @property
    @abstractmethod
    def label_weights(self) -> npt.NDArray[np.float64] | None:
        """[samples], sum of the weights of all tokens that carry loss; None: all weigh 1."""

    @property
    @abstractmethod
    def targets(self) -> npt.NDArray[np.float32] | None:
        """[samples, numbers], what is learned of each as a whole; None: tokens are learned."""

    @property
    def lengths(self) -> IntArray:
        """[samples], tokens that the model is given of all sequences."""
        return self.lengths_by_sequence.sum(1)

    @property
    def label_counts(self) -> IntArray:
        """[samples], tokens that carry loss."""
        return self.label_counts_by_sequence.sum(1)

    @property
    def longest(self) -> IntArray:
        """[samples], tokens that the model is given of the longest sequence."""
        return self.lengths_by_sequence.max(1)

    def widths(self, *, padding_free: bool) -> IntArray:
        """[samples], positions that a sample takes: padded ones are as wide as their longest."""
        return self.lengths if padding_free else self.longest * self.per_sample

    @property
    def media_sizes(self) -> IntArray | None:
        """[samples], what the media of each cost to encode, in their units; None: none has any."""
        return None

    @property
    @abstractmethod
    def sources(self) -> npt.NDArray[np.int32]:
        """[samples], the number of the source that each is of."""

    @property
    @abstractmethod
    def sets(self) -> "tuple[SampleSet, ...]":
        """Samples of each source."""

    @property
    @abstractmethod
    def places(self) -> IntArray:
        """[samples], where each lies in the set of its source."""


class SampleArrays(NamedTuple):
    """Sequences, one behind the other."""

    tokens: npt.NDArray[np.int32]
    """[tokens of all sequences]."""
    offsets: IntArray
    """[sequences + 1], where each sequence starts, and the end."""
    spans: npt.NDArray[np.int32]
    """[spans of all sequences, 2], as in Sample."""
    span_offsets: IntArray
    """[sequences + 1], where the spans of each sequence start, and the end."""
    weights: npt.NDArray[np.float32] | None = None
    """[spans of all sequences], as in Sample."""
    targets: npt.NDArray[np.float32] | None = None
    """[sequences, numbers], as in Sample."""
    media: npt.NDArray[np.int32] | None = None
    """[media of all sequences, 4]: number among the files, first token, end and size; None: there
    are none."""
    media_offsets: IntArray | None = None
    """[sequences + 1], where the media of each sequence start, and the end."""
    media_files: npt.NDArray[np.uint8] | None = None
    """A JSON list in UTF-8: each `MediaFile`; also of media of records that are no samples."""


class SampleSet(Samples):
    """Samples of one source in few arrays, so that millions fit."""

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        offsets: IntArray,
        spans: npt.NDArray[np.int32],
        span_offsets: IntArray,
        weights: npt.NDArray[np.float32] | None = None,
        targets: npt.NDArray[np.float32] | None = None,
        media: npt.NDArray[np.int32] | None = None,
        media_offsets: IntArray | None = None,
        media_files: npt.NDArray[np.uint8] | None = None,
        *,
        per_sample: int = 1,
        fingerprint: str | None = None,
        media_folder: str = "",
    ) -> None:
        """Wrap arrays of sequences with at least one label each.

        Args:
            tokens: as in SampleArrays, and so are the others.
            offsets: of the sequences.
            spans: that carry loss.
            span_offsets: of the spans.
            weights: of the spans, above 0; None: all are 1.
            targets: of the sequences, the same for all of a sample; None: they have none.
            media: of the sequences; None: they have none.
            media_offsets: of the media.
            media_files: that they are of.
            per_sample: neighbours that are one sample.
            fingerprint: if it is known.
            media_folder: in which relative paths of files of media begin.
        """
        assert (len(offsets) - 1) % per_sample == 0
        self.arrays = SampleArrays(
            *(tokens, offsets, spans, span_offsets, weights, targets),
            *(media, media_offsets, media_files),
        )
        self.per_sample = per_sample
        self._fingerprint, self._media_folder = fingerprint, media_folder

    @classmethod
    def of(cls, samples: Iterable[Rendered], *, per_sample: int = 1) -> "SampleSet":
        """Concatenate rendered sequences."""
        rows = SampleRows(per_sample)
        rows.extend(samples)
        return rows.finish()

    def __len__(self) -> int:
        return (len(self.arrays.offsets) - 1) // self.per_sample

    def sequences(self, index: int) -> tuple[Sample, ...]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        tokens, offsets, spans, span_offsets, weights, targets, *_ = self.arrays
        first = index * self.per_sample

        def sequence(place: int) -> Sample:
            of_sequence = slice(span_offsets[place], span_offsets[place + 1])
            return Sample(
                tokens[offsets[place] : offsets[place + 1]],
                spans[of_sequence],
                None if weights is None else weights[of_sequence],
                None if targets is None else targets[place],
                self._media(place),
            )

        return tuple(sequence(place) for place in range(first, first + self.per_sample))

    def _media(self, place: int) -> tuple[Medium, ...]:
        media, offsets = self.arrays.media, self.arrays.media_offsets
        if media is None or offsets is None:
            return ()
        rows = media[offsets[place] : offsets[place + 1]].tolist()
        made = []
        for number, first, end, size in rows:
            kind, digest, file, is_relative = self.media_files[number]
            made.append(Medium(kind, digest, file, first, end, size, is_relative))
        return tuple(made)

    @cached_property
    def media_sizes(self) -> IntArray | None:
        media, offsets = self.arrays.media, self.arrays.media_offsets
        if media is None or offsets is None:
            return None
        # By differences of sums, because many sequences may have none.
        sums = np.concatenate([[0], np.cumsum(media[:, 3], dtype=np.int64)])[offsets]
        sizes: IntArray = np.diff(sums).reshape(-1, self.per_sample).sum(1)
        return sizes

    @cached_property
    def media_files(self) -> list[MediaFile]:
        """Files of the media of all records, also of those that are no samples."""
        files = self.arrays.media_files
        if files is None:
            return []
        found = [MediaFile(*values) for values in json.loads(files.tobytes())]
        if self._media_folder:
            # Not as paths: 100,000 of these take a second.
            begin = os.path.join(self._media_folder, "")  # noqa: PTH118
            found = [
                one._replace(file=begin + one.file) if one.is_relative else one for one in found
            ]
        return found

    @cached_property
    def lengths_by_sequence(self) -> IntArray:
        return (np.diff(self.arrays.offsets) - 1).reshape(-1, self.per_sample)

    @cached_property
    def label_counts_by_sequence(self) -> IntArray:
        return self._sums(self._labels_by_span)

    @cached_property
    def label_weights(self) -> npt.NDArray[np.float64] | None:
        weights = self.arrays.weights
        if weights is None:
            return None
        of_sequences = self._sums(self._labels_by_span * weights.astype(np.float64))
        return of_sequences.sum(1)

    @property
    def _labels_by_span(self) -> IntArray:
        """[spans of all sequences], tokens that carry loss."""
        spans = self.arrays.spans
        return (spans[:, 1] - np.maximum(spans[:, 0], 1)).astype(np.int64)

    def _sums(self, values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        """[samples, per_sample], sums over the spans of each sequence."""
        starts = self.arrays.span_offsets[:-1]
        if not len(starts):
            return np.empty((0, self.per_sample), dtype=values.dtype)
        # Every sequence has a span: without one, reduceat would take the first of the next one.
        sums: npt.NDArray[_Number] = np.add.reduceat(values, starts)
        return sums.reshape(-1, self.per_sample)

    @property
    def targets(self) -> npt.NDArray[np.float32] | None:
        targets = self.arrays.targets
        return None if targets is None else targets[:: self.per_sample]

    @cached_property
    def lengths(self) -> IntArray:
        return super().lengths

    @cached_property
    def label_counts(self) -> IntArray:
        return super().label_counts

    @property
    def sources(self) -> npt.NDArray[np.int32]:
        return np.zeros(len(self), dtype=np.int32)

    @property
    def sets(self) -> "tuple[SampleSet, ...]":
        return (self,)

    @property
    def places(self) -> IntArray:
        return np.arange(len(self))

    @property
    def largest_label(self) -> int:
        """Largest id of a token that carries loss; -1: there is none."""
        tokens, offsets, spans, span_offsets, *_ = self.arrays
        ends = np.repeat(offsets[:-1], np.diff(span_offsets))[:, None] + spans
        # Spans that begin before a token minus those that end before it.
        within = np.bincount(ends[:, 0], minlength=len(tokens) + 1)
        within -= np.bincount(ends[:, 1], minlength=len(tokens) + 1)
        return int(np.max(tokens[np.cumsum(within[:-1]) > 0], initial=-1))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of tokens, sample boundaries and masks, whatever files they came from.

        Where every sample is a prompt and an answer, its mask counts as the length of its prompt,
        as it did when there were no others.
        """
        if self._fingerprint is not None:
            return self._fingerprint
        tokens, offsets, spans, span_offsets, weights, targets, *_ = self.arrays
        media, media_offsets = self.arrays.media, self.arrays.media_offsets
        masks: list[tuple[npt.NDArray[Any], str]] = [(spans, "<i4"), (span_offsets, "<i8")]
        # Checkpoints of earlier versions hold this fingerprint.
        if len(spans) == len(offsets) - 1 and (spans[:, 1] == np.diff(offsets)).all():
            masks = [(spans[:, 0], "<i4")]
        if weights is not None:
            masks.append((weights, "<f4"))
        if targets is not None:
            # Whether answers are desirable was a bool each, which earlier checkpoints count as.
            is_flag = targets.shape[1] == 1 and np.isin(targets, (0, 1)).all()
            masks.append((targets, "|b1" if is_flag else "<f4"))
        if media is not None and media_offsets is not None:
            # What the files hold, not where they lie.
            digests = b"".join(
                bytes.fromhex(self.media_files[number].digest) for number in media[:, 0].tolist()
            )
            of_media = np.frombuffer(digests, dtype=np.uint8).reshape(-1, 32)
            masks += [(of_media, "u1"), (media[:, 1:3], "<i4"), (media_offsets, "<i8")]
        digest = hashlib.sha256(b"" if self.per_sample == 1 else b"%d" % self.per_sample)
        for values, dtype in [(tokens, "<i4"), (offsets, "<i8"), *masks]:
            digest.update(np.ascontiguousarray(values, dtype=dtype).data)
        return digest.hexdigest()


def media_numbers(sets: Iterable[SampleSet]) -> list[MediaNumbers]:
    """Numbers about the media in samples, by kind."""
    tokens, found = 0, dict[str, list[IntArray]]()
    for one in sets:
        tokens += len(one.arrays.tokens)
        if (media := one.arrays.media) is None:
            continue
        kinds = np.array([file.kind for file in one.media_files])[media[:, 0]]
        for kind in np.unique(kinds).tolist():
            spans = media[kinds == kind, 1:3].astype(np.int64)
            found.setdefault(kind, []).append(spans[:, 1] - spans[:, 0])
    made = []
    for kind, groups in sorted(found.items()):
        each = np.concatenate(groups)
        made.append(
            MediaNumbers(
                kind=kind,
                count=len(each),
                least_tokens=int(each.min()),
                median_tokens=int(np.percentile(each, 50, method="higher")),
                most_tokens=int(each.max()),
                share=float(each.sum() / tokens),
            )
        )
    return made


class SampleRows:
    """Growing arrays of sequences."""

    def __init__(self, per_sample: int = 1) -> None:
        """Start empty; per_sample: see `SampleSet`."""
        self._per_sample = per_sample
        # 4 bytes a token; a list would take 8 and the integers.
        self._tokens, self._spans, self._weights = array("i"), array("i"), array("f")
        self._offsets, self._span_offsets = array("q", [0]), array("q", [0])
        self._targets, self._target_size = array("f"), 0
        self._media, self._media_offsets = array("i"), array("q", [0])
        self._media_files: dict[MediaFile, int] = {}

    def extend(self, samples: Iterable[Rendered]) -> None:
        """Append the sequences of samples."""
        for ids, trained, weights, target, media in samples:
            self._tokens.extend(ids)
            self._offsets.append(len(self._tokens))
            for span in trained:
                self._spans.extend(span)
            self._span_offsets.append(len(self._spans) // 2)
            self._weights.extend(weights or repeat(1.0, len(trained)))
            self._targets.extend(target)
            self._target_size = len(target)
            for medium in media:
                file = MediaFile(medium.kind, medium.digest, medium.file, medium.is_relative)
                number = self._media_files.setdefault(file, len(self._media_files))
                self._media.extend((number, medium.first, medium.end, medium.size))
            self._media_offsets.append(len(self._media) // 4)

    def note_files(self, files: Iterable[MediaFile]) -> None:
        """Note files of a record, which decide whether it becomes a sample."""
        for file in files:
            self._media_files.setdefault(file, len(self._media_files))

    def finish(self) -> SampleSet:
        """Return the samples; none can be added after."""
        weights = np.frombuffer(self._weights, dtype=np.float32)
        return SampleSet(
            np.frombuffer(self._tokens, dtype=np.int32),
            np.frombuffer(self._offsets, dtype=np.int64),
            np.frombuffer(self._spans, dtype=np.int32).reshape(-1, 2),
            np.frombuffer(self._span_offsets, dtype=np.int64),
            None if (weights == 1).all() else weights,
            np.frombuffer(self._targets, dtype=np.float32).reshape(-1, self._target_size)
            if self._targets
            else None,
            *self._finished_media(),
            per_sample=self._per_sample,
        )

    def _finished_media(self) -> tuple[Any, Any, Any]:
        if not self._media_files:
            return None, None, None
        files = np.frombuffer(json.dumps([*self._media_files]).encode(), dtype=np.uint8)
        if not self._media:
            return None, None, files
        return (
            np.frombuffer(self._media, dtype=np.int32).reshape(-1, 4),
            np.frombuffer(self._media_offsets, dtype=np.int64),
            files,
        )


class JoinedSamples(Samples):
    """Samples of several sources in one order."""

    def __init__(
        self, sets: Sequence[SampleSet], sources: npt.NDArray[np.int32], places: IntArray
    ) -> None:
        """Join samples without copying them.

        Args:
            sets: of each source.
            sources: [samples], the number of the source of each.
            places: [samples], where it lies in that source.
        """
        self._sets, self._sources, self._places = tuple(sets), sources, places
        (self.per_sample,) = {each.per_sample for each in sets}
        # All are read for one base model.
        readers = (each.media_reader for each in sets)
        self.media_reader = next((one for one in readers if one is not None), None)

    @classmethod
    def one_after_another(
        cls, sets: Sequence[SampleSet], *, most: int | None = None
    ) -> "JoinedSamples":
        """Concatenate the sources, or the first `most` samples of each."""
        sizes = [len(each) if most is None else min(len(each), most) for each in sets]
        sources = np.repeat(np.arange(len(sets), dtype=np.int32), sizes)
        return cls(sets, sources, np.concatenate([np.arange(size) for size in sizes]))

    @classmethod
    def interleaved(cls, sets: Sequence[SampleSet]) -> "JoinedSamples":
        """Interleave the sources, so that the first samples have the same share of each."""
        sources, places = interleave([len(each) for each in sets])
        return cls(sets, sources, places)

    def __len__(self) -> int:
        return len(self._sources)

    def sequences(self, index: int) -> tuple[Sample, ...]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._sets[self._sources[index]].sequences(int(self._places[index]))

    @cached_property
    def lengths_by_sequence(self) -> IntArray:
        return self._gathered([each.lengths_by_sequence for each in self._sets])

    @cached_property
    def label_counts_by_sequence(self) -> IntArray:
        return self._gathered([each.label_counts_by_sequence for each in self._sets])

    @cached_property
    def lengths(self) -> IntArray:
        return super().lengths

    @cached_property
    def label_counts(self) -> IntArray:
        return super().label_counts

    @cached_property
    def label_weights(self) -> npt.NDArray[np.float64] | None:
        of_sets = [each.label_weights for each in self._sets]
        if all(weights is None for weights in of_sets):
            return None
        return self._gathered(
            [
                each.label_counts.astype(np.float64) if weights is None else weights
                for each, weights in zip(self._sets, of_sets, strict=True)
            ]
        )

    @cached_property
    def media_sizes(self) -> IntArray | None:
        of_sets = [each.media_sizes for each in self._sets]
        if all(sizes is None for sizes in of_sets):
            return None
        return self._gathered(
            [
                np.zeros(len(each), dtype=np.int64) if sizes is None else sizes
                for each, sizes in zip(self._sets, of_sets, strict=True)
            ]
        )

    @cached_property
    def targets(self) -> npt.NDArray[np.float32] | None:
        found = [targets for each in self._sets if (targets := each.targets) is not None]
        # A set without samples has no targets.
        nothing = found[0][:0] if found else None
        if nothing is None:
            return None
        every = (each.targets for each in self._sets)
        return self._gathered([nothing if targets is None else targets for targets in every])

    @property
    def sources(self) -> npt.NDArray[np.int32]:
        return self._sources

    @property
    def sets(self) -> tuple[SampleSet, ...]:
        return self._sets

    @property
    def places(self) -> IntArray:
        return self._places

    def _gathered(self, values: Sequence[npt.NDArray[_Number]]) -> npt.NDArray[_Number]:
        """[samples, ...], of values of the samples of each source."""
        starts = np.cumsum([0, *map(len, values)])
        return np.concatenate(values)[starts[self._sources] + self._places]


class ScoredSamples(Samples):
    """Samples of which the model is given whole sequences, each with a label at its last token."""

    def __init__(self, samples: Samples) -> None:
        """Wrap samples without copying them."""
        self._samples, self.per_sample = samples, samples.per_sample
        self.media_reader = samples.media_reader

    def __len__(self) -> int:
        return len(self._samples)

    def sequences(self, index: int) -> tuple[Sample, ...]:
        return tuple(map(scored, self._samples.sequences(index)))

    @cached_property
    def lengths_by_sequence(self) -> IntArray:
        return self._samples.lengths_by_sequence + 1

    @cached_property
    def label_counts_by_sequence(self) -> IntArray:
        return np.ones((len(self), self.per_sample), dtype=np.int64)

    @property
    def label_weights(self) -> None:
        """None: scores have no weights."""

    @property
    def targets(self) -> npt.NDArray[np.float32] | None:
        return self._samples.targets

    @property
    def sources(self) -> npt.NDArray[np.int32]:
        return self._samples.sources

    @property
    def sets(self) -> tuple[SampleSet, ...]:
        return self._samples.sets

    @property
    def places(self) -> IntArray:
        return self._samples.places


def scored(sample: Sample) -> Sample:
    """Append a token that is a label and is never read: it is not given to the model."""
    length = len(sample.ids)
    ids = np.append(sample.ids, sample.ids[-1:])
    trained = np.array([[length, length + 1]], dtype=np.int32)
    return Sample(ids, trained, target=sample.target)


def interleave(sizes: Sequence[int]) -> tuple[npt.NDArray[np.int32], IntArray]:
    """Order the members of several groups so that each group is spread evenly.

    Args:
        sizes: members of each group.

    Returns:
        [members] the group of each, and its number there; numbers of a group rise.
    """
    groups = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    nothing = np.empty(0, dtype=np.int64)
    numbers = np.concatenate([nothing, *(np.arange(size) for size in sizes)])
    shares = np.concatenate([nothing, *(np.arange(size) / max(size, 1) for size in sizes)])
    # stable: among equal shares, the order of the groups.
    order = np.argsort(shares, kind="stable")
    return groups[order], numbers[order]
