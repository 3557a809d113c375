"""Sharding of parameters, as a model is filled and read through it; and whole ones."""

from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor


class Rows(Protocol):
    """A tensor in memory, or in a file, of which some rows are asked for."""

    def __getitem__(self, rows: slice, /) -> Tensor:
        """The rows."""


class Sharding(Protocol):
    """How a model gets its memory on this rank."""

    def allocate(self, model: Any, device: torch.device) -> None:
        """Give every parameter of the model its memory on this rank; the values are undefined."""

    def put(self, model: nn.Module, name: str, value: Rows) -> None:
        """Set a parameter; only what belongs to this rank is read from the value.

        Every rank puts the same parameters in the same order.
        """

    def replace(self, parameter: nn.Parameter, value: Rows) -> None:
        """Set a parameter of a model that has trained; every rank does so, in the same order."""

    def reshard(self, model: nn.Module) -> None:
        """Free what was gathered for a forward pass that no backward pass has followed."""

    def whole(self, parameter: Tensor) -> Tensor:
        """The full parameter, gathered from all ranks, which all call this."""


class Whole:
    """Every rank has every parameter."""

    def allocate(self, model: Any, device: torch.device) -> None:
        model.to_empty(device=device)
        model.tie()

    def put(self, model: nn.Module, name: str, value: Rows) -> None:
        self.replace(model.get_parameter(name), value)

    def replace(self, parameter: nn.Parameter, value: Rows) -> None:
        parameter.data.copy_(value[:])

    def reshard(self, model: nn.Module) -> None:
        pass

    def whole(self, parameter: Tensor) -> Tensor:
        return parameter.detach()
