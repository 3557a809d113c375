"""The layout of a step: which samples share a micro-batch, and on which rank and when it runs.

Padded micro-batches are made of neighbours by length, those without padding are made to cost the
same. In both, micro-batches of like cost run together, and the largest comes first. Where shapes
are fixed, padded ones have equally many rows.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from ftkit.recipe.batches import count_micro_steps
from ftkit.recipe.mesh import WHOLE, Piece
from ftkit.recipe.plan import Plan

if TYPE_CHECKING:
    from ftkit.data.samples.shapes import FixedShapes

IntArray = npt.NDArray[np.int64]

FILLER = -1
"""Number in place of a sample, where a rank has to run a micro-step but has no sample left."""


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """Limits and costs by which a step is laid out, seen from one rank."""

    micro_batch_size: int
    """Most samples per micro-step."""
    micro_batch_tokens: int | None = None
    """Most tokens per micro-step, where nothing is padded; a longer sample runs alone. Encoding
    media counts as the tokens that cost as much. None: as many as the samples have."""
    padding_free: bool = False
    """Whether the samples of a micro-batch lie one behind the other in a row; else each is padded
    to the longest."""
    shapes: "FixedShapes | None" = None
    """Sizes of padded micro-batches, where few shapes have to repeat; None: as their samples."""
    attention_cost: float = 0.0
    """Cost of attention per token and token of its sample, relative to the matrices."""
    rank: int = 0
    """Number of this rank, in [0, world_size)."""
    world_size: int = 1
    """Number of ranks that have micro-batches of their own; some that share them count as one."""
    piece: Piece = WHOLE
    """Piece of each row that this rank has."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        *,
        padding_free: bool,
        attention_cost: float,
        longest: int,
        rank: int = 0,
        shapes: "FixedShapes | None" = None,
    ) -> Self:
        """Take the layout of a plan on one of its ranks.

        Padded micro-batches have as many samples as keep to `micro_batch_tokens` if all are as long
        as the longest: `longest` input tokens, of the samples to train on and to validate on.
        """
        padded = plan.padded_samples(max(1, longest))
        return cls(
            micro_batch_size=plan.micro_batch_size if padding_free else padded,
            micro_batch_tokens=plan.micro_batch_tokens if padding_free else None,
            padding_free=padding_free,
            shapes=shapes,
            attention_cost=attention_cost,
            rank=plan.mesh.data_rank(rank),
            world_size=plan.mesh.data_ranks,
            piece=plan.mesh.piece(rank),
        )

    def positions(self, lengths: IntArray) -> int:
        """Count the positions of a micro-batch, padding included.

        Args:
            lengths: [samples], input tokens of each; at least one.
        """
        if self.shapes is not None:
            of_row = self.shapes.length_for(int(lengths.max()) // self.shapes.per_sample)
            return of_row * self.shapes.per_sample * self.shapes.rows
        return int(lengths.sum() if self.padding_free else lengths.max() * len(lengths))


StepLayout = list[list[IntArray]]
"""Samples of each rank in each micro-step; none only where there are fewer samples than places."""


def lay_out(
    lengths: IntArray,
    layout: RankLayout,
    *,
    samples_of_full_step: int,
    work: IntArray | None = None,
) -> StepLayout:
    """Spread samples over micro-steps and ranks, so that little is padded and no rank waits.

    Args:
        lengths: [samples], input tokens of each.
        layout: how much a micro-batch may hold, and on how many ranks.
        samples_of_full_step: padded steps have as many micro-steps as these need, shorter ones too.
        work: [samples], tokens that cost as much as encoding the media of each; None: none has any.

    Returns:
        Indices into lengths.
    """
    if layout.padding_free:
        return _lay_out_rows(lengths, layout, work)
    most = layout.micro_batch_size if layout.shapes is None else layout.shapes.rows
    micro_steps = count_micro_steps(samples_of_full_step, most, layout.world_size)
    return _lay_out_padded(lengths, layout, micro_steps, work)


def validation_batches(lengths: npt.ArrayLike, limit: int, layout: RankLayout) -> list[list[int]]:
    """Lay out the first validation samples like a step, and return the batches of one rank.

    Args:
        lengths: [samples of the data set], input tokens of each.
        limit: validate on the first `limit` samples, whatever the layout.
        layout: of this rank.

    Returns:
        Samples per batch; as many batches on every rank, [FILLER] where a rank has none left.
    """
    chosen = np.asarray(lengths, dtype=np.int64)[:limit]
    found = lay_out(chosen, layout, samples_of_full_step=len(chosen))
    return [samples_or_filler(ranks[layout.rank]) for ranks in found]


def samples_or_filler(samples: IntArray) -> list[int]:
    """Convert a micro-batch for the loader, which runs a filler where it is empty."""
    return samples.tolist() or [FILLER]


def _balance(
    micro_steps: Sequence[Sequence[IntArray]], cost: Callable[[IntArray], float], world_size: int
) -> StepLayout:
    """Give the costliest micro-batch of each micro-step to the rank with the least work so far."""
    none = np.empty(0, dtype=np.int64)
    # Work of each rank over all micro-steps so far.
    done = [0.0] * world_size
    layout = []
    for micro_batches in micro_steps:
        by_cost_desc = sorted(micro_batches, key=lambda run: -cost(run))
        ranks = [none] * world_size
        # strict=False: the last micro-step may have fewer micro-batches than ranks. stable: all
        # ranks compute this layout for themselves and have to agree.
        for rank, run in zip(np.argsort(done, kind="stable").tolist(), by_cost_desc, strict=False):
            ranks[rank] = run
            done[rank] += cost(run)
        layout.append(ranks)
    return layout


# --- Rows without padding -----------------------------------------------------------------------


def _lay_out_rows(lengths: IntArray, layout: RankLayout, work: IntArray | None) -> StepLayout:
    """Spread samples over the fewest micro-steps that have room, in rows of like cost."""
    # Attention costs the square of a sample's length, all else its length.
    costs = lengths * (1 + layout.attention_cost * lengths)
    filled = lengths
    if work is not None:
        costs, filled = costs + work, lengths + work
    by_filled_desc = np.argsort(-filled, kind="stable")
    found = _fewest_rows(filled[by_filled_desc], costs[by_filled_desc], layout)
    rows = [by_filled_desc[row] for row in found]

    def cost(row: IntArray) -> float:
        return float(costs[row].sum())

    # Rows of like cost run together: FSDP and ZeRO wait for each other in every micro-step.
    rows.sort(key=cost, reverse=True)
    ranks = layout.world_size
    micro_steps = [rows[first : first + ranks] for first in range(0, len(rows), ranks)]
    # The largest first, so that a step that does not fit fails at once; by tokens and not by cost,
    # because memory follows tokens.
    micro_steps.sort(key=lambda some: -max(int(lengths[row].sum()) for row in some))
    return _balance(micro_steps, cost, ranks)


def _fewest_rows(
    lengths: IntArray, costs: npt.NDArray[np.float64], layout: RankLayout
) -> list[list[int]]:
    """Pack samples of descending lengths into rows of like cost, in the fewest micro-steps."""
    if not len(lengths):
        return []
    listed, of_each = lengths.tolist(), costs.tolist()
    # No limit of tokens: one row could hold all samples.
    most_tokens = layout.micro_batch_tokens or sum(listed)
    least_rows = _least_rows(lengths, layout.micro_batch_size, most_tokens)
    least = math.ceil(least_rows / layout.world_size)
    # The bound may be too low, so one more micro-step is tried until all samples fit.
    for micro_steps in count(least):
        rows = micro_steps * layout.world_size
        found = _fill(listed, of_each, rows, layout.micro_batch_size, most_tokens)
        if found is not None:
            return [row for row in found if row]
    raise AssertionError("there is room where each sample has a row")


def _least_rows(lengths: IntArray, most: int, most_tokens: int) -> int:
    """Lower bound on the rows that samples of descending lengths need."""
    # Where a sample is longer than a row, it has a row to itself.
    alone = int((lengths > most_tokens).sum())
    rest = lengths[alone:]
    if not len(rest):
        return alone
    # A row has room for at most k samples that are longer than most_tokens / (k + 1).
    k = np.arange(1, most_tokens // int(rest[-1]) + 1)
    # Lengths descend: negated they ascend, as searchsorted requires.
    longer = np.searchsorted(-rest, -(most_tokens / (k + 1)))
    by_length = int(np.ceil(longer / k).max())
    by_tokens = math.ceil(int(rest.sum()) / most_tokens)
    return alone + max(by_length, by_tokens, math.ceil(len(rest) / most))


def _fill(
    lengths: Sequence[int], costs: Sequence[float], rows: int, most: int, most_tokens: int
) -> list[list[int]] | None:
    """Put each sample into the row of least cost that has room; None: not all fit.

    Longest processing time first: the samples are in descending order of length.
    """
    found: list[list[int]] = [[] for _ in range(rows)]
    room = [most_tokens] * rows
    # A heap by cost: the cheapest row comes first.
    open_ = [(0.0, row) for row in range(rows)]
    waiting: list[tuple[int, int, float]] = []
    """Rows with too little room for the sample at hand, those with most room first."""
    for sample, (length, cost) in enumerate(zip(lengths, costs, strict=True)):
        # Samples become shorter: a row that had too little room may have enough now.
        while waiting and -waiting[0][0] >= length:
            _, row, load = heapq.heappop(waiting)
            heapq.heappush(open_, (load, row))
        # min: a sample longer than a row gets an empty one.
        while open_ and room[open_[0][1]] < min(length, most_tokens):
            load, row = heapq.heappop(open_)
            heapq.heappush(waiting, (-room[row], row, load))
        if not open_:
            return None
        load, row = heapq.heappop(open_)
        found[row].append(sample)
        room[row] -= length
        # A row with the most samples allowed is full, whatever room it has.
        if len(found[row]) < most:
            heapq.heappush(open_, (load + cost, row))
    return found


# --- Padded micro-batches -----------------------------------------------------------------------


def _lay_out_padded(
    lengths: IntArray, layout: RankLayout, micro_steps: int, work: IntArray | None
) -> StepLayout:
    """Spread samples over micro-steps in runs of neighbours by length."""
    ranks = layout.world_size
    by_length_desc = np.argsort(-lengths, kind="stable")
    # Neighbours by length become micro-batches, as many as there are places for.
    if layout.shapes is None:
        sizes = _cut(lengths[by_length_desc].tolist(), micro_steps * ranks, layout.micro_batch_size)
        runs = np.split(by_length_desc, np.cumsum(sizes)[:-1]) if sizes else []
    else:
        # Rows cost the same without a sample: full micro-batches of the longest samples leave the
        # shortest for the one that is filled up.
        rows = layout.shapes.rows
        runs = [by_length_desc[first : first + rows] for first in range(0, len(lengths), rows)]
    # The first sample of each is its longest: this is its size after padding. Runs of like size go
    # together, as above, and the largest first.
    runs.sort(key=lambda run: -int(lengths[run[0]]) * len(run))
    groups = [runs[first : first + ranks] for first in range(0, micro_steps * ranks, ranks)]
    costs = lengths if work is None else lengths + work
    return _balance(groups, lambda run: int(costs[run].sum()), ranks)


def _cut(lengths: list[int], places: int, most: int) -> list[int]:
    """Cut samples of descending lengths into runs, so that the largest after padding is smallest.

    Where there are more places than the samples fill, long sequences get short runs: the step is
    faster and its peak of memory lower.
    """
    # The two simple cases: a place for each sample, or every place full.
    if len(lengths) <= places:
        return [1] * len(lengths)
    if len(lengths) == places * most:
        return [most] * places
    # The smallest size, in padded tokens, at which the runs fit into the places: by halving.
    too_small, enough = 0, lengths[0] * most
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        # The number of runs falls as their size grows, so halving finds the smallest size.
        if len(_cut_to(lengths, middle, most)) <= places:
            enough = middle
        else:
            too_small = middle
    return _split_largest(lengths, _cut_to(lengths, enough, most), places)


def _cut_to(lengths: list[int], padded_tokens: int, most: int) -> list[int]:
    """Cut into the fewest runs of at most `padded_tokens` each (or of one sample)."""
    sizes = []
    start = 0
    while start < len(lengths):  # lengths descend: the first sample of a run sets its width
        size = min(most, max(1, padded_tokens // lengths[start]), len(lengths) - start)
        sizes.append(size)
        start += size
    return sizes


def _split_largest(lengths: list[int], sizes: list[int], places: int) -> list[int]:
    """Split the largest runs until there are `places`, so that no place stays empty."""
    heap = []  # (-padded tokens, 0 if it cannot be split; first sample; samples)
    start = 0
    for size in sizes:
        heap.append((-lengths[start] * size if size > 1 else 0, start, size))
        start += size
    heapq.heapify(heap)
    while len(heap) < places:
        _, start, size = heapq.heappop(heap)
        for begin, part in ((start, size // 2), (start + size // 2, size - size // 2)):
            heapq.heappush(heap, (-lengths[begin] * part if part > 1 else 0, begin, part))
    return [size for _, _, size in sorted(heap, key=lambda run: run[1])]
