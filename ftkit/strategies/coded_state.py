"""Optimizers whose state is codes of 4 or 8 bits with scales, as checkpoints hold it."""

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class Codes:
    """A quantised state as codes, which are views of it."""

    codes: Tensor
    """[numbers], or [numbers / 2] with two codes of 4 bits in a byte, flat in uint8."""
    scales: Tensor
    """[blocks]."""
    code: Tensor
    """Values of the codes: [256], or [16] for 4 bits."""
    block: int
    """Codes that share a scale."""


class CodedState(Optimizer):
    """An optimizer that knows of its own state what is codes."""

    @abstractmethod
    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """State before the first update; that of a sharded parameter is of this rank's rows."""

    @abstractmethod
    def codes_in(self, state: Tensor) -> Codes | None:
        """Codes and scales of a state; None: it is not quantised."""
