"""Streams: samples in an order without a known length, which are made as they are taken.

A run over one ends by its steps. Its samples are numbered from its beginning, and which sample a
number is follows from seed and data alone; so steps, ranks and checkpoints know nothing else of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ftkit.data.media import MediaReader
from ftkit.data.samples.layout import IntArray, RankLayout
from ftkit.data.samples.sample_set import Sample, Samples, SampleSet
from ftkit.data.samples.sampler import Position, StepOrder

StreamPosition = Sequence[Mapping[str, int]]
"""Of each source of a stream, where its samples go on; what the numbers are the stream knows."""


class Stream(ABC):
    """Samples by their number in a run, each of one sequence without weights and media."""

    per_sample = 1
    label_weights: npt.NDArray[np.float64] | None = None
    media_reader: MediaReader | None = None

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Equal for equal data with equal settings, wherever they lie."""

    @property
    @abstractmethod
    def most_tokens(self) -> int:
        """Tokens that no sample exceeds."""

    @abstractmethod
    def begin(self, seed: int, samples: int, position: StreamPosition | None) -> None:
        """Go to a number; earlier samples are not taken.

        Args:
            seed: of the run.
            samples: of the run, before that number.
            position: what `position` returned for it; None: it is found by making what lies before.

        Raises:
            UserError: what lies there has changed.
        """

    @abstractmethod
    def position(self, samples: int) -> StreamPosition:
        """Where a run goes on after so many samples, the newest of which were made."""

    @abstractmethod
    def epochs(self, samples: int) -> float:
        """Passes over the data in so many samples, of the source that had the fewest."""

    @abstractmethod
    def sources(self, numbers: IntArray) -> IntArray:
        """[sources], how many of some samples are of each."""

    @abstractmethod
    def gathered(self, numbers: IntArray) -> Samples:
        """Samples of neighbouring numbers.

        Raises:
            UserError: what they are made of cannot be read, or has changed.
        """

    @abstractmethod
    def as_trained(self, documents: SampleSet) -> SampleSet:
        """What documents become that were cut one by one, of how their samples are like."""

    @abstractmethod
    def sequences(self, index: int) -> tuple[Sample, ...]:
        """The only sequence of a sample, as of `Samples`."""

    @cached_property
    def largest(self) -> Samples:
        """One sample, as long as the longest may be."""
        most = self.most_tokens
        return SampleSet(
            np.zeros(most, dtype=np.int32),
            np.array([0, most], dtype=np.int64),
            np.array([[0, most]], dtype=np.int32),
            np.array([0, 1], dtype=np.int64),
        )


class StreamedOrder(StepOrder):
    """The steps of a run over a stream: it takes the samples in the order of their numbers."""

    sees_ahead = False

    def __init__(
        self,
        stream: Stream,
        *,
        view: Callable[[Samples], Samples],
        amounts: Callable[[Samples], Mapping[str, npt.NDArray[Any]]],
        global_batch_size: int,
        total_samples: int,
        layout: RankLayout,
        start: Position,
    ) -> None:
        """Define the steps of a run.

        Args:
            stream: which has begun at the start.
            view: what the model is given of samples.
            amounts: by name, what they add to a divisor of the loss of their step.
            global_batch_size: as of `StepOrder`, and so are the others.
            total_samples: of the whole run.
            layout: of this rank.
            start: position to start from.
        """
        super().__init__(
            global_batch_size=global_batch_size,
            total_samples=total_samples,
            layout=layout,
            start=start,
        )
        self._stream, self._view, self._counted = stream, view, amounts
        self._newest: tuple[tuple[int, int], Samples] | None = None

    def samples(self, step: int) -> IntArray:
        return np.arange(*self._span(step))

    def sources(self, step: int) -> IntArray:
        return self._stream.sources(self.samples(step))

    def _widths(self, samples: IntArray) -> IntArray:
        return self._gathered(samples).widths(padding_free=self.layout.padding_free)

    def _amounts_of(self, samples: IntArray) -> Mapping[str, npt.NDArray[Any]]:
        return self._counted(self._gathered(samples))

    def _gathered(self, samples: IntArray) -> Samples:
        """The samples of a step; those of the newest are kept."""
        span = int(samples[0]), int(samples[-1])
        if self._newest is None or self._newest[0] != span:
            self._newest = span, self._view(self._stream.gathered(samples))
        return self._newest[1]
