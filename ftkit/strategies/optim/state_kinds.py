"""Kinds of optimizer state: which tensors an optimizer keeps for a parameter, in how many bytes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ftkit.errors import UserError, is_out_of_memory
from ftkit.strategies.optim.muon import MuonWithAdamW

BLOCK = 256
"""Numbers of an 8-bit state that share a scale (bitsandbytes)."""

_ADAM_KINDS = {"state1": "exp_avg", "state2": "exp_avg_sq"}
"""What torch's Adam calls the states of bitsandbytes' Adam."""


def canonical_kind(optimizer: Optimizer, key: str) -> str:
    """The kind of state that a key of an optimizer holds, by torch's name for it."""
    names = {base.__name__ for base in type(optimizer).__mro__}
    is_adam = any(name.startswith(("Adam", "PagedAdam")) for name in names)
    return _ADAM_KINDS.get(key, key) if is_adam else key


def state_kinds(
    optimizer_class: type[Optimizer], arguments: dict[str, Any], device: torch.device
) -> dict[str, bool]:
    """The kinds of tensors that an optimizer keeps for parameters, found by a step with two.

    Returns:
        For each kind, whether it has the parameter's shape.

    Raises:
        UserError: it keeps something that is no tensor, or cannot step.
    """
    if optimizer_class.__module__.startswith("deepspeed."):  # made in a second, and known
        return {"exp_avg": True, "exp_avg_sq": True}
    parameters = [nn.Parameter(torch.zeros(shape, device=device)) for shape in ((2, 3), (3,))]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer = optimizer_class(parameters, **arguments)
        optimizer.step()
    except Exception as error:  # whatever an optimizer comes to with arguments of a recipe
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"optimizer {optimizer_class.__name__} cannot fine-tune: {error}. "
            "Try --optimizer AdamW."
        ) from None
    kinds: dict[str, bool] = {}
    for parameter in parameters:
        for key, value in optimizer.state[parameter].items():
            if is_tensor_state(key, value, parameter):
                kind = canonical_kind(optimizer, key)
                kinds[kind] = kinds.get(kind, True) and value.shape == parameter.shape
            elif not (is_scalar_state(value) or _is_constant(key) or value is None):
                raise UserError(
                    f"optimizer {optimizer_class.__name__} keeps a {key} that checkpoints cannot "
                    "hold. Try --optimizer AdamW, or --checkpoint.save false."
                )
    return kinds


def bytes_per_number(
    kinds: Mapping[str, bool],
    optimizer_class: type[Optimizer],
    arguments: Mapping[str, Any],
    dtype: torch.dtype,
    hidden_fraction: float,
) -> float:
    """What a checkpoint needs for each trained number: itself and the state of its optimizer.

    Args:
        kinds: from `state_kinds`.
        optimizer_class: whose state it is.
        arguments: of it.
        dtype: of what the optimizer updates.
        hidden_fraction: of these numbers, that in matrices of the blocks.
    """
    states: float = sum(kinds.values())
    if optimizer_class is MuonWithAdamW:
        states = 2 - hidden_fraction
    state_bytes: float = dtype.itemsize
    if optimizer_class.__name__.endswith("8bit") or arguments.get("optim_bits") == 8:
        state_bytes = 1 + 4 / BLOCK
    elif optimizer_class.__module__.startswith("bitsandbytes"):
        state_bytes = 4
    return dtype.itemsize + state_bytes * states


def _is_constant(key: str) -> bool:
    """Whether it is one of bitsandbytes' tables, which belong to a state or to a single step."""
    return key.startswith(("qmap", "absmax", "unorm"))


def is_scalar_state(value: object) -> bool:
    """Whether it is one number for a whole parameter, such as the count of steps."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def is_tensor_state(key: str, value: object, parameter: nn.Parameter) -> bool:
    """Whether it has a value for each number or block of the parameter, as moments have."""
    if not isinstance(value, Tensor) or _is_constant(key):
        return False
    return value.dim() > 0 or value.shape == parameter.shape
