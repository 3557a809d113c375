"""State dictionaries of torch's optimizers, and their parameters by name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftkit.errors import UserError
from ftkit.exchange.foreign.names import TrainedParameter
from ftkit.exchange.foreign.state import ForeignTensors, ParameterGroup
from ftkit.exchange.foreign.unpickling import held, mapping_in
from ftkit.strategies.state import is_scalar_state
from ftkit.utils.damaged_files import reading

_EXPECTED = "the state of an optimizer of torch, by the numbers of its parameters"
_IN_8_BITS = ("qmap1", "absmax1", "__bnb_optimizer_quant_state__")


class NamedState:
    """State of an optimizer by the names of its parameters."""

    def __init__(self, content: Any, names: Sequence[Sequence[str]], file: Path) -> None:
        """Sort it by kinds.

        Args:
            content: as `state_dict` gave it, of parameters by their numbers.
            names: of the parameters of each group, in their order.
            file: that it was read from, for messages.

        Raises:
            UserError: it is not such a state, or keeps what checkpoints cannot hold.
        """
        self.scalars: dict[str, float] = {}
        self.groups: list[ParameterGroup] = []
        """All parameters."""
        with reading(file, _EXPECTED, advice="Copy the whole checkpoint again."):
            moments = self._sorted(content, names, file)
        self.moments: Mapping[str, ForeignTensors] = {
            kind: {name: held(tensor) for name, tensor in tensors.items()}
            for kind, tensors in moments.items()
        }
        """State tensors by kind and name."""

    def _sorted(
        self, content: Any, names: Sequence[Sequence[str]], file: Path
    ) -> dict[str, dict[str, Tensor]]:
        states = mapping_in(content, "state", file)
        moments: dict[str, dict[str, Tensor]] = {}
        for group, of_group in zip(groups_in(content, file), names, strict=True):
            self.groups.append(ParameterGroup(names=tuple(of_group), settings=group))
            for number, name in zip(group["params"], of_group, strict=True):
                for kind, value in states.get(number, {}).items():
                    if kind in _IN_8_BITS:
                        raise UserError(
                            f"{file} keeps its state in 8 bits ({kind}), which ftkit cannot take "
                            "over. Start a new run from the weights, with --checkpoint_dir or "
                            "--adapter."
                        )
                    if is_scalar_state(value):
                        self._note(kind, float(value), file)
                    elif isinstance(value, Tensor):
                        moments.setdefault(kind, {})[name] = value
                    elif value is not None:
                        raise TypeError(f"{kind} of {name} is a {type(value).__name__}")
        keys = {frozenset(state) for state in states.values() if state}
        if len(keys) > 1:
            different = sorted(map(str, frozenset.union(*keys) - frozenset.intersection(*keys)))
            raise UserError(
                f"{file} keeps {different[0]} of some parameters, and not of others. Copy the "
                "checkpoint again."
            )
        return moments

    def _note(self, kind: str, value: float, file: Path) -> None:
        if self.scalars.setdefault(kind, value) != value:
            raise UserError(
                f"{file} has another {kind} for each parameter ({self.scalars[kind]:g} and "
                f"{value:g}): some were not trained from the start. Start a new run from the "
                "weights, with --checkpoint_dir or --adapter."
            )


def groups_in(content: Any, file: Path) -> list[dict[str, Any]]:
    """The groups of a state dictionary, each with the numbers of its parameters.

    Raises:
        UserError: it is none.
    """
    groups = content.get("param_groups") if isinstance(content, dict) else None
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        raise UserError(
            f"{file} is not the state of a torch optimizer. Give a checkpoint as its program wrote "
            "it."
        )
    return groups


def names_by_shape(
    content: Any, orders: Sequence[Sequence[Sequence[TrainedParameter]]], file: Path
) -> list[list[str]]:
    """The names of the parameters of each group: those of the first order whose shapes agree.

    Args:
        content: a state dictionary.
        orders: for each way in which a program may group them the parameters of each group.
        file: that it was read from, for messages.

    Raises:
        UserError: none of them agrees.
    """
    # The optimizer has numbers in place of names, so the shapes have to tell; the first order that
    # fits is taken.
    groups, states = groups_in(content, file), mapping_in(content, "state", file)
    with reading(file, _EXPECTED, advice="Copy the whole checkpoint again."):
        for order in orders:
            if len(order) == len(groups) and all(
                _agrees(group["params"], of_group, states)
                for group, of_group in zip(groups, order, strict=True)
            ):
                return [[parameter.name for parameter in of_group] for of_group in order]
    sizes = " and ".join(str(len(group["params"])) for group in groups)
    expected = " or ".join(
        " and ".join(str(len(of_group)) for of_group in order) for order in orders
    )
    raise UserError(
        f"{file} has groups of {sizes} parameters, but the model has {expected}, or they have "
        "other shapes: it is not the optimizer of this model, or its parameters were grouped "
        "otherwise. Give the base model, and the adapter's settings, of this very run."
    )


def _agrees(
    numbers: Sequence[int], parameters: Sequence[TrainedParameter], states: Mapping[int, Any]
) -> bool:
    """Whether the counts agree and each state has the shape of its parameter."""
    if len(numbers) != len(parameters):
        return False
    return all(
        not isinstance(value, Tensor) or value.dim() == 0 or _is_of(value, parameter.shape)
        for number, parameter in zip(numbers, parameters, strict=True)
        for value in states.get(number, {}).values()
    )


def _is_of(value: Tensor, shape: torch.Size) -> bool:
    return value.shape == shape
