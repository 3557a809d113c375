"""Shapes that repeat: micro-batches of few sizes, for kinds of devices that compile each anew.

A micro-batch has three sizes: its rows, the positions of a row, and its labels. Rows are always as
many; they are padded to one of a few lengths, chosen from the data; and the labels are as many as
rows of that length may have. What is added is padding: it costs time and changes no loss.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from ftkit.recipe.plan import Plan

MOST_LENGTHS = 8
"""Lengths that rows are padded to: each costs a compilation of all programs of a step."""
_MOST_CANDIDATES = 2048
"""Lengths that are tried: the search takes the square of their number, 0.4 s for these."""


class Measured(Protocol):
    """Samples of which sizes are known, whatever their tokens are."""

    per_sample: int

    def __len__(self) -> int: ...
    @property
    def longest(self) -> npt.NDArray[np.int64]: ...
    @property
    def label_counts_by_sequence(self) -> npt.NDArray[np.int64]: ...


@dataclass(frozen=True, kw_only=True)
class FixedShapes:
    """Sizes of all micro-batches of a run."""

    rows: int
    """Samples of every micro-batch, fillers included."""
    per_sample: int
    """Rows of each sample."""
    lengths: tuple[int, ...]
    """Positions of a row, ascending; the last one has room for every sequence."""
    most_labels: int
    """Most label tokens of a sequence."""
    pads_labels: bool
    """Whether labels are added that count for nothing, so that their number is fixed too."""

    @classmethod
    def of(cls, plan: Plan, sets: Iterable[Measured], *, pads_labels: bool) -> Self | None:
        """Choose the shapes of a run; None: its devices compute any shape at once.

        Args:
            plan: of the run.
            sets: all samples that it computes, to train on and to validate on; at least one.
            pads_labels: see there.
        """
        if not plan.kind.compiles_shapes:
            return None
        known = [samples for samples in sets if len(samples)]
        return cls(
            rows=plan.rows,
            per_sample=known[0].per_sample,
            lengths=tuple(choose_lengths(samples.longest for samples in known)),
            most_labels=max(int(each.label_counts_by_sequence.max()) for each in known),
            pads_labels=pads_labels,
        )

    def length_for(self, tokens: int) -> int:
        """Positions of rows whose longest sequence has this many tokens."""
        return self.lengths[bisect_left(self.lengths, tokens)]

    def labels(self, length: int) -> int:
        """Labels of a micro-batch with rows of this length."""
        return self.rows * self.per_sample * min(length, self.most_labels)


def choose_lengths(tokens: Iterable[npt.NDArray[np.int64]], most: int = MOST_LENGTHS) -> list[int]:
    """Choose the lengths to which rows are padded, so that the fewest positions are padding.

    Args:
        tokens: of the rows of each set of samples; at least one row in all.
        most: lengths.

    Returns:
        At most so many, ascending; the last one is that of the longest row. If rows have more than
        2048 different lengths, multiples of a small number are chosen from.
    """
    counts = np.bincount(np.concatenate([np.empty(0, dtype=np.int64), *tokens]))
    longest = len(counts) - 1
    # Candidates are a few positions apart where there are more than can be tried.
    apart = -(-longest // _MOST_CANDIDATES)
    ends = np.minimum(np.arange(apart, longest + apart, apart), longest)
    rows = np.diff(np.cumsum(counts)[ends], prepend=counts[0])
    taken = rows > 0
    ends, rows = ends[taken], rows[taken]
    # Dynamic programming: the fewest positions of all rows up to each candidate, in one length,
    # then in two, ... Rows between two neighbouring lengths take the upper one.
    up_to = np.cumsum(rows)
    best = ends * up_to
    is_before = np.tri(len(ends), k=-1, dtype=np.bool_)
    splits = []
    for _ in range(min(most, len(ends)) - 1):
        added = ends[:, None] * (up_to[:, None] - up_to[None, :])
        positions = np.where(is_before, best[None, :] + added, np.iinfo(np.int64).max)
        split = positions.argmin(1)
        found = positions.min(1)
        # -1: one length less is as good.
        splits.append(np.where(found < best, split, -1))
        best = np.minimum(found, best)
    chosen = [len(ends) - 1]
    for split in reversed(splits):
        before = int(split[chosen[-1]])
        if before >= 0:
            chosen.append(before)
    return [int(ends[place]) for place in reversed(chosen)]
