"""The elastic sampler: which samples a step takes, and how they are laid out on the ranks.

Which samples a step takes is a function of seed, data set, weights of its sources and global batch
size alone. How they are laid out over ranks and micro-steps costs time and memory, but does not
change the loss, which is the sum over the tokens of the step divided by their number. So a position
in the data is one integer, and a run can be continued on other hardware, or with another global
batch size, without replaying anything.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ftkit.data.samples.layout import IntArray, RankLayout, StepLayout, lay_out, samples_or_filler


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position in the data of a run, whatever its batches were."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Samples that they consumed."""


class EpochOrder:
    """The samples of every epoch, in their order.

    An epoch takes a fixed number of samples of each source. Where that is all of them, each is
    taken once. Else the source is walked through from epoch to epoch, in one random order after
    the other: none of its samples is taken again before all others were.
    """

    def __init__(
        self, sizes: Sequence[int], takes: Sequence[int], seed: int, *, in_order: bool = False
    ) -> None:
        """Define the epochs.

        Args:
            sizes: samples of each source; they are numbered through, source by source.
            takes: samples of each that an epoch takes, none of a source without samples.
            seed: with the number of the epoch, determines its order.
            in_order: whether each takes all samples as they are numbered, whatever the seed.
        """
        assert not in_order or tuple(sizes) == tuple(takes)
        self._in_order = in_order
        assert all((size > 0) == (take > 0) for size, take in zip(sizes, takes, strict=True))
        self._sizes, self._takes, self._seed = tuple(sizes), tuple(takes), seed
        self._ends: IntArray = np.cumsum(self._sizes)
        self.samples = sum(self._takes)
        """Samples of one epoch."""

    def of(self, epoch: int) -> IntArray:
        """[samples of an epoch], in their order."""
        if self._in_order:
            return np.arange(self.samples, dtype=np.int64)
        order = permutation(self.samples, self._seed, epoch)
        if self._sizes == self._takes:
            return order
        parts = [self._of_source(source, epoch) for source in range(len(self._sizes))]
        return np.concatenate(parts)[order]

    def sources(self, samples: IntArray) -> IntArray:
        """[sources], how many of the samples are of each."""
        return np.bincount(
            np.searchsorted(self._ends, samples, side="right"), minlength=len(self._sizes)
        )

    def _of_source(self, source: int, epoch: int) -> IntArray:
        """The samples of a source that an epoch takes, in the order of its walk."""
        size, take = self._sizes[source], self._takes[source]
        base = int(self._ends[source]) - size
        if take == size:
            return base + np.arange(size, dtype=np.int64)
        first, last = epoch * take, (epoch + 1) * take
        parts = []
        while first < last:
            walk, place = divmod(first, size)
            # The walk goes on from epoch to epoch: its place follows from the epoch alone, so that
            # a run can continue anywhere.
            part = permutation(size, self._seed, walk, source)[place : place + last - first]
            parts.append(part)
            first += len(part)
        return base + np.concatenate(parts)


class StepOrder(ABC):
    """The samples of every step of a run, and their layout on one rank.

    Epochs are concatenated; step s takes the samples [s * G, (s + 1) * G) of that sequence, with
    G the global batch size; only the last step may be shorter. A run that continues at step s0
    after n0 samples continues from there: step s takes [n0 + (s - s0) * G, n0 + (s + 1 - s0) * G),
    whatever G was before. Steps of other sizes are given by the positions between them.
    """

    sees_ahead = True
    """Whether the sizes of samples are known before the samples are made."""

    def __init__(
        self,
        *,
        global_batch_size: int,
        total_samples: int,
        layout: RankLayout,
        start: Position,
        positions: IntArray | None = None,
    ) -> None:
        """Define the steps of a run.

        Args:
            global_batch_size: samples per step, over all ranks.
            total_samples: samples of the whole run, from its very first step to its last.
            layout: of this rank.
            start: position to start from; earlier steps are not available.
            positions: [steps to come + 1], samples before each of them, where they are not all of
                one size.
        """
        assert min(global_batch_size, layout.micro_batch_size, total_samples) > 0
        assert start.step >= 0 and 0 <= start.samples <= total_samples
        assert 0 <= layout.rank < layout.world_size
        self._global_batch_size = global_batch_size
        self.layout = layout
        """Layout of a step on this rank."""
        self._total_samples = total_samples
        self.start_step = start.step
        self._start_samples = start.samples
        self._positions = positions

    @abstractmethod
    def samples(self, step: int) -> IntArray:
        """Samples of the data set that a step takes over all ranks, whatever the layout.

        Returns:
            [samples of the step], in the order of the run.
        """

    @abstractmethod
    def sources(self, step: int) -> IntArray:
        """[sources], samples that the step takes of each, over all ranks."""

    @abstractmethod
    def _widths(self, samples: IntArray) -> IntArray:
        """[samples], positions that each takes."""

    @abstractmethod
    def _amounts_of(self, samples: IntArray) -> Mapping[str, npt.NDArray[Any]]:
        """By name, [samples]: how much each adds to a divisor of the loss of its step."""

    def _work_of(self, samples: IntArray) -> IntArray | None:
        """[samples], as of `ftkit.data.samples.layout.lay_out`."""
        return None

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, those before the start included."""
        if self._positions is not None:
            return self.start_step + len(self._positions) - 1
        remaining = self._total_samples - self._start_samples
        # Rounded up: the last step may be shorter.
        return self.start_step - (-remaining // self._global_batch_size)

    def consumed(self, step: int) -> int:
        """Samples of the whole run up to this number of steps done: the position in the data."""
        assert self.start_step <= step <= self.total_steps, self._range(step)
        if self._positions is not None:
            return int(self._positions[step - self.start_step])
        done = (step - self.start_step) * self._global_batch_size
        return min(self._start_samples + done, self._total_samples)

    def divisors(self, step: int) -> dict[str, float]:
        """Amounts of the step by name, over all ranks and micro-steps."""
        samples = self.samples(step)
        return {name: float(values.sum()) for name, values in self._amounts_of(samples).items()}

    def micro_batches(self, step: int) -> list[list[int]]:
        """Samples that this rank runs in each micro-step; [FILLER] where it has none.

        All ranks have equally many. The first micro-step has the largest micro-batch.
        """
        samples = self.samples(step)
        return [samples_or_filler(samples[places]) for places in self.places(step)]

    def places(self, step: int) -> list[IntArray]:
        """Places in the step of the samples that this rank runs in each micro-step."""
        return [ranks[self.layout.rank] for ranks in self._laid_out(self.samples(step))]

    def largest_micro_batch(self, step: int) -> int:
        """Positions of the step's largest micro-batch over all ranks, padding included."""
        samples = self.samples(step)
        lengths = self._widths(samples)
        (first, *_) = self._laid_out(samples)
        return max(self.layout.positions(lengths[run]) for run in first if len(run))

    def imbalance(self, step: int) -> float:
        """Tokens of the fullest rank, relative to the mean of all ranks; 1.0 is perfect."""
        samples = self.samples(step)
        lengths = self._widths(samples)
        tokens = np.zeros(self.layout.world_size)
        for ranks in self._laid_out(samples):
            tokens += [lengths[chosen].sum() for chosen in ranks]
        return float(tokens.max() / tokens.mean())

    def _span(self, step: int) -> tuple[int, int]:
        """First and last + 1 of the step's samples, counted from the start of the run."""
        assert step < self.total_steps, self._range(step)
        return self.consumed(step), self.consumed(step + 1)

    def _range(self, step: int) -> str:
        return f"step {step} of [{self.start_step}, {self.total_steps})"

    def _laid_out(self, samples: IntArray) -> StepLayout:
        full = self._global_batch_size if self._positions is None else len(samples)
        return lay_out(
            self._widths(samples),
            self.layout,
            samples_of_full_step=full,
            work=self._work_of(samples),
        )


class ElasticOrder(StepOrder):
    """The steps of a run whose data set is whole before it begins.

    The cost of a step does not depend on which step it is: each epoch needs one permutation, kept
    while the run is near it.
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        amounts: Mapping[str, npt.ArrayLike],
        *,
        epochs: EpochOrder,
        global_batch_size: int,
        total_samples: int,
        layout: RankLayout,
        start: Position,
        positions: IntArray | None = None,
        work: IntArray | None = None,
    ) -> None:
        """Define the steps of a run.

        Args:
            lengths: [samples of the data set], input tokens of each.
            amounts: by name, [samples of the data set]: how much each adds to a divisor of the loss
                of its step.
            epochs: the order of these samples.
            global_batch_size: as of `StepOrder`, and so are the others.
            total_samples: of the whole run.
            layout: of this rank.
            start: position to start from.
            positions: of the steps, where they are not all of one size.
            work: [samples of the data set], as of `ftkit.data.samples.layout.lay_out`.
        """
        super().__init__(
            global_batch_size=global_batch_size,
            total_samples=total_samples,
            layout=layout,
            start=start,
            positions=positions,
        )
        self._lengths: IntArray = np.asarray(lengths, dtype=np.int64)
        self._amounts = {name: np.asarray(values) for name, values in amounts.items()}
        assert {len(values) for values in self._amounts.values()} == {len(self._lengths)} != {0}
        self._epochs, self._work = epochs, work
        self._orders: dict[int, IntArray] = {}

    def samples(self, step: int) -> IntArray:
        """Samples of the data set that a step takes over all ranks, whatever the layout.

        Returns:
            [samples of the step], in the order of the epoch. A sample appears more than once only
            if the global batch is larger than an epoch, or an epoch takes it more than once.
        """
        first, last = self._span(step)
        parts = []
        while first < last:
            epoch, position = divmod(first, self._epochs.samples)
            part = self._order(epoch)[position : position + last - first]
            parts.append(part)
            first += len(part)
        return np.concatenate(parts)

    def sources(self, step: int) -> IntArray:
        return self._epochs.sources(self.samples(step))

    def _widths(self, samples: IntArray) -> IntArray:
        return self._lengths[samples]

    def _amounts_of(self, samples: IntArray) -> Mapping[str, npt.NDArray[Any]]:
        return {name: values[samples] for name, values in self._amounts.items()}

    def _work_of(self, samples: IntArray) -> IntArray | None:
        return None if self._work is None else self._work[samples]

    def _order(self, epoch: int) -> IntArray:
        """Return the order of an epoch; the last two are cached."""
        if epoch not in self._orders:
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = self._epochs.of(epoch)
        return self._orders[epoch]


def permutation(samples: int, seed: int, epoch: int, *source: int) -> IntArray:
    """A random order of range(samples), the same with every version of numpy.

    Numpy promises a stable stream for its bit generators, but not for Generator.permutation
    (https://numpy.org/doc/stable/reference/random/compatibility.html); so raw bits are sorted.
    """
    # SeedSequence refuses negative seeds.
    bits = np.random.Philox(np.random.SeedSequence(seed % 2**64, spawn_key=(epoch, *source)))
    return np.argsort(bits.random_raw(samples), kind="stable")
