"""What the memory of a step consists of, as reports say it."""

from collections.abc import Sequence
from dataclasses import dataclass


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


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Memory of a step, measured in a few: the second, and the one with the largest micro-batch."""

    ranks: list[RankStepMemory]
    """One entry per rank."""

    @property
    def fullest(self) -> RankStepMemory:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @classmethod
    def of(cls, parts: Sequence["StepMemory | None"]) -> "StepMemory | None":
        """Those of all ranks in one; None: none was measured."""
        ranks = [rank for part in parts if part is not None for rank in part.ranks]
        return cls(ranks=ranks) if ranks else None
