"""Memory of a step by category: measured, as in reports, and simulated by `ftkit plan`."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

Category = Literal[
    "parameters", "gradients", "optimizer_state", "activations", "temporaries", "unattributed"
]
"""Categories of tensors in memory; the fields of `Breakdown` define them."""
CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Bytes in tensors on the device of one rank, by category; on CPU, in host memory.

    Every storage counts once, in one category.
    """

    parameters: int = 0
    """Weights of this rank, including adapters, scales of quantised weights and rotary tables."""
    gradients: int = 0
    """Gradients that outlive a backward pass, and the buffers in which ranks add them up."""
    optimizer_state: int = 0
    """State that the optimizer keeps between steps; under DeepSpeed also its float32 weights."""
    activations: int = 0
    """The batch, and tensors that a forward pass leaves for the backward pass."""
    temporaries: int = 0
    """All other tensors that a step allocates and frees: gathered weights of other ranks,
    recomputed activations, gradients before they are added up."""
    unattributed: int = 0
    """Allocated, but in none of the other categories, such as the workspaces of libraries."""

    @property
    def total(self) -> int:
        """Total bytes over all categories."""
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
    """Memory at four moments of a step; of several micro-steps, at the highest one."""

    before_forward: Breakdown | None = None
    """The batch is on the device."""
    after_forward: Breakdown | None = None
    """The loss is computed."""
    after_backward: Breakdown | None = None
    """The gradients are computed."""
    after_optimizer: Breakdown | None = None
    """Parameters are updated and gradients freed."""


@dataclass(frozen=True, kw_only=True)
class MediaSize:
    """Size of the media in the input of one forward pass."""

    kind: str
    """Name of their kind."""
    lengths: tuple[int, ...]
    """Input tokens of each sequence that has some."""
    sizes: tuple[int, ...]
    """What each medium costs to encode, in units of its kind: patches of an image."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchSize:
    """Size of the input of one forward pass."""

    sequences: int
    """Number of sequences."""
    positions: int
    """Positions of each padded sequence, or of the longest sequence in a row without padding."""
    targets: int
    """Positions that carry loss, over all sequences; of those that a rank has."""
    tokens: int | None = None
    """Tokens in a row without padding, of all sequences or of the piece that a rank has; None:
    sequences are padded."""
    pieces: int = 1
    """Ranks that have pieces of the row, equally long."""
    weighted: bool = False
    """Whether the targets have weights."""
    media: MediaSize | None = None
    """Their media; None: they have none."""

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Lengths of sequences in a whole row, equal but for the longest; None: they are padded.

        Those with media come first, with their own lengths.
        """
        if self.tokens is None:
            return None
        # Memory depends on the longest sequence and the total, so any lengths with both will do.
        known = () if self.media is None else self.media.lengths
        if self.positions not in known:
            known = (*known, self.positions)
        others = self.sequences - len(known)
        # Spread the remaining tokens over the other sequences as evenly as possible.
        rest = self.tokens * self.pieces - sum(known)
        least, more = divmod(rest, others) if others else (0, 0)
        return (*known, *(least + 1,) * more, *(least,) * (others - more))


@dataclass(frozen=True, kw_only=True)
class RankStepMemory:
    """Memory of one rank in the measured step that needed most."""

    rank: int
    """Global rank."""
    step: int
    """Number of the step, from 1."""
    peak_bytes: int
    """Highest total within the step."""
    peak_breakdown_bytes: Breakdown
    """Breakdown at the peak."""
    moments_bytes: StepMoments
    """Breakdown at four moments of the step."""
    micro_step: int | None = None
    """Number of the micro-step, from 1, whose forward and backward pass needed most."""
    micro_batch: MicroBatchSize | None = None
    """Size of the input of this micro-step."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Memory figures of the rank that ran out of memory, and changes that help."""

    held_bytes: int | None = None
    """Peak memory of the rank before, as torch counts it; on CPU, its host memory."""
    asked_bytes: int | None = None
    """Size of the allocation that failed."""
    available_bytes: int | None = None
    """Memory available to a rank: that of its GPU; on CPU, its share of the free host memory, or
    the limit that was set."""
    predicted_peak_bytes: int | None = None
    """Bytes in tensors at the peak of a step with samples as long as the longest."""
    predicted_for: str | None = None
    """Length of the longest sample, and its source."""
    changes: list[str] = field(default_factory=list)
    """Changes with which the run would fit, with command lines; the fastest comes first."""


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """Prediction of the measured step on rank 0, from the recipe and the size of a micro-batch."""

    peak_bytes: int
    """Highest total within the step."""
    peak_breakdown_bytes: Breakdown
    """Breakdown at the peak."""
    error_fraction: float
    """Predicted peak relative to the measured one of rank 0, minus 1."""


@dataclass(frozen=True, kw_only=True)
class HeaviestStep:
    """Prediction of the heaviest possible step, as `ftkit plan` makes it before a run.

    Every sample in it is as long as the longest one, and every token carries loss.
    """

    peak_bytes: int
    """Highest total within the step."""
    peak_breakdown_bytes: Breakdown
    """Breakdown at the peak."""
    micro_batch: MicroBatchSize
    """Size of the input of a forward pass."""


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Memory of all ranks in the measured step that needed most."""

    ranks: list[RankStepMemory]
    """One entry per rank."""
    predicted: PredictedStep | None = None
    """Prediction of the same step on rank 0."""
    heaviest: HeaviestStep | None = None
    """Prediction of the heaviest possible step on rank 0."""

    @property
    def fullest(self) -> RankStepMemory:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @classmethod
    def of(cls, parts: Sequence["StepMemory | None"]) -> "StepMemory | None":
        """Merge the measurements of all ranks; None: there are none."""
        ranks = [rank for part in parts if part is not None for rank in part.ranks]
        if not ranks:
            return None
        first = next((part for part in parts if part is not None and part.heaviest), cls(ranks=[]))
        return cls(ranks=ranks, predicted=first.predicted, heaviest=first.heaviest)


# Simulated steps: `ftkit.planning.simulate` makes them, a strategy places them.

PERSISTENT_ELEMENTS = 100_000
"""Smaller parameters stay gathered under ZeRO-3: DeepSpeed's stage3_param_persistence_threshold."""


@dataclass(frozen=True)
class Snapshot:
    """Bytes allocated at one moment."""

    bytes: dict[Category, int]
    """Bytes by category."""

    @property
    def total_bytes(self) -> int:
        """Total bytes over all categories."""
        return sum(self.bytes.values())


ANOTHER_MODEL = "another model"
"""Stretch of a step in which another model computes, before the trained one does."""
FIRST_GRADIENT = "first gradient, backward"
"""Stretch from the first gradient of a trained parameter to the next block, under DeepSpeed."""
OBSERVED = "the whole step"
"""Stretch before the first micro-step of a step, in which its sequences are observed."""
Peaks = dict[str, Snapshot]
"""The highest moment of each stretch of a step."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a whole model, however it is distributed over ranks."""

    parameters: int
    """Numbers in all parameters, however many of them a byte holds."""
    parameter_bytes: int
    """Bytes of all parameters, without the scales of quantised ones."""
    trained: int
    """Numbers that the optimizer updates."""
    matrices: int
    """Numbers that the optimizer updates in matrices."""
    hidden: int
    """Numbers in trained matrices of the blocks."""
    elements: int
    """Elements of all parameters: a quantised element holds two numbers."""
    small_elements: int
    """Elements of parameters below PERSISTENT_ELEMENTS, and of those that compute media: ZeRO-3
    keeps them gathered."""
    forward_only_elements: int
    """Elements of those above it that no backward pass needs, below everything that is trained."""
    largest_trained: int
    """Numbers of the largest trained parameter."""
    embedding_elements: int
    """Elements of the embedding, if it is not the output layer too; without small parameters, as
    in the three below."""
    head_elements: int
    """Elements of the output layer."""
    block_elements: int
    """Elements of a block."""
    largest_in_block: int
    """Elements of the largest parameter of a block."""
    pinned_bytes: int
    """Page-locked memory for one rank's rows of all parameters, one block for each, with those of a
    model beside it."""
    pinned_trained_bytes: int
    """Page-locked memory for one rank's rows of the trained parameters."""
    frozen_bytes: int
    """Bytes of all parameters of another model, which computes beside the trained one."""
    frozen_elements: int
    """Elements of its parameters."""
    small_frozen_elements: int
    """Elements of those below PERSISTENT_ELEMENTS."""
    frozen_head_bytes: int
    """Bytes of its output layer, if that is whole where the loss is computed: that of a teacher."""


@dataclass(frozen=True)
class OnDevice:
    """Memory of a step on one rank, by location."""

    peaks: Peaks
    """Memory on the device."""
    host: dict[Category, int]
    """Host memory that is held while the device trains."""


@dataclass(frozen=True)
class Simulation:
    """Result of running a step on fake tensors."""

    peaks: Peaks
    """Highest moment of each stretch of the step."""
    sizes: Sizes
    """Sizes of the whole model."""
    hosted_bytes: int = 0
    """Page-locked host memory for activations."""
    accumulates: bool = False
    """Whether there are gradients of micro-steps before it."""
    observing_passes: int = 0
    """Passes of the trained model that observe each micro-batch, all of them before the first
    micro-step."""
    passes_before: int = 0
    """Passes of the trained model without a backward pass, in each micro-step before the one that
    trains."""

    def without(self, kinds: Collection[Category]) -> OnDevice:
        """Move some categories to host memory."""
        host = {kind: max(peak.bytes[kind] for peak in self.peaks.values()) for kind in kinds}
        peaks = {
            name: Snapshot({k: 0 if k in kinds else v for k, v in peak.bytes.items()})
            for name, peak in self.peaks.items()
        }
        return OnDevice(peaks, host)
