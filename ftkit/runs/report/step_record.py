"""The record of an optimizer step: what was measured of it."""

from dataclasses import dataclass
from typing import Literal

StepPart = Literal["data", "forward", "backward", "optimizer", "other"]
PARTS: tuple[StepPart, ...] = ("data", "forward", "backward", "optimizer", "other")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, as it was measured; numbers are over all ranks."""

    step: int
    """Optimizer steps done, this one included."""
    samples: int
    """Samples of this step."""
    tokens: int
    """Real input tokens of this step."""
    label_tokens: int
    """Tokens of this step that carry loss."""
    padded_tokens: int
    """Positions that were computed and were padding."""
    micro_steps: int
    """Forward and backward passes of one rank; all have equally many."""
    loss: float
    """Mean over the label tokens, in nats."""
    router_aux_loss: float | None = None
    """Of the routers, without its coefficient; None: there is none in training."""
    learning_rate: float
    """Of this step, first parameter group."""
    gradient_norm: float
    """Global norm before clipping."""
    duration_s: float
    """From its first batch to its end, without validation and saving."""
    parts_s: dict[StepPart, float]
    """Where duration_s went."""
    compiled_graphs: int | None = None
    """Graphs that torch.compile made in it, on this rank; None: nothing is compiled."""
