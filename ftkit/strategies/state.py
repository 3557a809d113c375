"""What a rank holds of the state of training, as live views: every strategy finds it.

A checkpoint is written from these views and read into them (`checkpoint/state.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

PARAMETER = "parameter"
"""Kind of a parameter's own numbers, beside the kinds of its optimizer state."""


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """What this rank holds of a parameter or of one kind of its optimizer state, as live views."""

    kind: str
    shape: torch.Size
    """Of the whole tensor."""
    start: int
    """First number of the range, in row-major order."""
    values: Tensor
    """[numbers of the range], flat."""
    scales: Tensor | None = None
    """[blocks of 256]: the values are 8-bit codes."""
    code: Tensor | None = None
    """[256], what the codes stand for."""
    replicated: bool = False
    """Whether every rank holds all of it."""
    copy: tuple[int, int] = (0, 1)
    """Which of how many equal ranges this is, if not every rank holds it."""


class Holder(Protocol):
    """Finds the numbers that an optimizer updates, and its state."""

    def parts(self, parameter: nn.Parameter) -> Iterator[StatePart]:
        """The parameter's own numbers, then each kind of state that there is."""

    def scalars(self) -> dict[str, float]:
        """State that is one number for all parameters, such as Adam's step."""

    def allocate(
        self, kinds: Mapping[str, Mapping[str, torch.Size]], scalars: dict[str, float]
    ) -> None:
        """Make the state of an optimizer that has not stepped yet; its values are undefined.

        Args:
            kinds: for each parameter (our name) the kinds of state and their shapes.
            scalars: as `scalars` returned them.
        """
