"""The memory of a step in reports: what it consists of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

Category = Literal[
    "parameters", "gradients", "optimizer_state", "activations", "temporaries", "unattributed"
]
"""What a tensor in memory is; the fields of `Breakdown` say what each means."""
CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Bytes in tensors on the device of one rank, by what they are; on CPU, in host memory.

    Every storage counts once, in one category.
    """

    parameters: int = 0
    """Weights of this rank, adapters, scales of quantised weights and tables included."""
    gradients: int = 0
    """Gradients that outlive a backward pass, and the buffers in which ranks add them up."""
    optimizer_state: int = 0
    """What the optimizer keeps between steps; under DeepSpeed also its float32 weights."""
    activations: int = 0
    """What a forward pass makes and is alive when it ends, for the backward pass; the batch."""
    temporaries: int = 0
    """Everything else that a step takes and gives back: gathered weights of other ranks, what is
    computed again, gradients on their way."""
    unattributed: int = 0
    """Known to be taken and not to be any of these; memory that libraries take for themselves."""

    @property
    def total(self) -> int:
        """Of all categories."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer_state
            + self.activations
            + self.temporaries
            + self.unattributed
        )


@dataclass(frozen=True, kw_only=True)
class StepMoments:
    """Four moments of a step; with several micro-steps, the one where most is taken."""

    before_forward: Breakdown | None = None
    """Batch at hand."""
    after_forward: Breakdown | None = None
    """Loss known."""
    after_backward: Breakdown | None = None
    """Gradients known."""
    after_optimizer: Breakdown | None = None
    """Parameters updated, gradients freed."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchSize:
    """What one forward pass computes on."""

    sequences: int
    """How many."""
    positions: int
    """Of each sequence, padding included; of a row, of its longest one."""
    targets: int
    """Positions in all that carry loss."""
    tokens: int | None = None
    """Of all sequences, which lie in a row; None: each is padded to as many positions."""

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Of the sequences in a row, as even as the longest one allows; None: they are padded."""
        if self.tokens is None:
            return None
        others = self.sequences - 1
        least, more = divmod(self.tokens - self.positions, others) if others else (0, 0)
        return (self.positions, *(least + 1,) * more, *(least,) * (others - more))


@dataclass(frozen=True, kw_only=True)
class RankStepMemory:
    """Memory of one rank in the measured step that took most."""

    rank: int
    """Global rank."""
    step: int
    """Which step, counted from 1."""
    peak_bytes: int
    """Highest total within the step."""
    peak_breakdown_bytes: Breakdown
    """At that moment."""
    moments_bytes: StepMoments
    """At four moments of it."""
    micro_step: int | None = None
    """Which micro-step of it needed most for its forward and backward pass, counted from 1."""
    micro_batch: MicroBatchSize | None = None
    """What this micro-step computed on."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """How much memory was missing on the rank that ran out of it, and what to do."""

    held_bytes: int | None = None
    """The most that the rank held before, as torch counts it; on CPU, its host memory."""
    asked_bytes: int | None = None
    """What it asked for besides."""
    available_bytes: int | None = None
    """What there is for a rank: memory of its GPU; on CPU, its part of the free host memory, or
    the limit that was set."""
    predicted_peak_bytes: int | None = None
    """Bytes in tensors at the peak of a step with samples as long as the longest."""
    predicted_for: str | None = None
    """How long that is, and how it is known."""
    changes: list[str] = field(default_factory=list)
    """Runs that would fit, the cheapest in speed first: what changes, and the command line."""


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """The same step of rank 0, predicted from the recipe and one micro-batch's size."""

    peak_bytes: int
    """Highest total within the step."""
    peak_breakdown_bytes: Breakdown
    """At that moment."""
    error_fraction: float
    """Predicted peak relative to the measured one of rank 0, minus 1."""


@dataclass(frozen=True, kw_only=True)
class HeaviestStep:
    """The heaviest step that there can be, predicted: the peak that `ftkit plan` says beforehand.

    Every sample in it is as long as the longest one, and every token carries loss.
    """

    peak_bytes: int
    """Highest total within the step."""
    peak_breakdown_bytes: Breakdown
    """At that moment."""
    micro_batch: MicroBatchSize
    """What a forward pass computes on."""


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Memory of the measured step that took most, of all ranks."""

    ranks: list[RankStepMemory]
    """One entry per rank."""
    predicted: PredictedStep | None = None
    """What was expected of rank 0."""
    heaviest: HeaviestStep | None = None
    """What was expected of rank 0 in the heaviest step that there can be."""

    @property
    def fullest(self) -> RankStepMemory:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @classmethod
    def of(cls, parts: Sequence["StepMemory | None"]) -> "StepMemory | None":
        """Those of all ranks in one; None: none was measured."""
        ranks = [rank for part in parts if part is not None for rank in part.ranks]
        if not ranks:
            return None
        first = next((part for part in parts if part is not None and part.heaviest), cls(ranks=[]))
        return cls(ranks=ranks, predicted=first.predicted, heaviest=first.heaviest)
