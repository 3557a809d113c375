"""Training state: trained parameters and optimizer state, saved from and restored to any strategy.

Everything is named by parameter and kept in pieces (`checkpoint/shards.py`): under single, DDP,
FSDP and ZeRO alike, the part of a parameter on a rank is a range of its numbers. So saving needs no
communication between ranks, and loading reads the ranges that the current layout needs.
"""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch

from ftkit.checkpoint.metadata import CheckpointError
from ftkit.checkpoint.shards import Piece, blocks_of, share_of
from ftkit.errors import UserError
from ftkit.models.language_model import LanguageModel
from ftkit.models.load_weights import Sharding, kept_parameters
from ftkit.models.lora.targets import our_name
from ftkit.strategies.state import (
    AVERAGE,
    PARAMETER,
    OptimizerStateView,
    StatePart,
    codes_per_byte,
)

if TYPE_CHECKING:
    from ftkit.checkpoint.stored_state import StoredState, StoredTensor


def stored_name(kind: str, parameter: str) -> str:
    """Name of a tensor in a checkpoint: parameter/NAME, exp_avg/NAME, ..."""
    return f"{kind}/{parameter}"


def capture(
    model: LanguageModel, state: OptimizerStateView, rank: int, world_size: int
) -> Iterator[Piece]:
    """Pieces of the training state that this rank writes: views of live memory."""
    for name, parameter in kept_parameters(model).items():
        for part in state.parts(parameter):
            # What several ranks hold is written once: each writes an equal range of it.
            which = (rank, world_size) if part.replicated else part.copy
            first, last = share_of(*which, part.numel, part.block)
            # A small tensor may have fewer blocks than there are ranks.
            if first == last:
                continue
            scales, in_byte = part.scales, codes_per_byte(part.code)
            yield Piece(
                name=stored_name(part.kind, our_name(name)),
                shape=part.shape,
                start=part.start + first,
                values=part.values[first // in_byte : last // in_byte],
                scales=None if scales is None else scales[blocks_of(first, last, part.block)],
                code=part.code,
                block=part.block,
            )


def trained_parameter(stored: "StoredState", name: str) -> "StoredTensor":
    """A parameter in a checkpoint, by ftkit's name for it."""
    return stored[stored_name(PARAMETER, name)]


def result_parameter(stored: "StoredState", name: str) -> "StoredTensor":
    """A parameter of the result that a checkpoint gives: its average, if it has one."""
    average = stored_name(AVERAGE, name)
    return stored[average] if average in stored else trained_parameter(stored, name)


def has_average(stored: "StoredState") -> bool:
    """Return whether a checkpoint has averages of the trained parameters."""
    return any(name.startswith(f"{AVERAGE}/") for name in stored.names())


def replace_trained(model: LanguageModel, sharding: Sharding, stored: "StoredState") -> None:
    """Replace the trained parameters by those of a checkpoint's result; every rank calls this.

    The optimizer keeps its own copies unchanged, so nothing can be trained afterwards.

    Args:
        model: that was trained.
        sharding: which part of it this rank has.
        stored: from a checkpoint of the same run.
    """
    # An evaluation may have left parameters gathered, and only shards are replaced.
    sharding.reshard(model)
    with torch.no_grad():
        for name, parameter in kept_parameters(model).items():
            if parameter.requires_grad:
                sharding.replace(parameter, result_parameter(stored, our_name(name)))


def restore(
    model: LanguageModel,
    state: OptimizerStateView,
    stored: "StoredState",
    scalars: dict[str, float],
) -> None:
    """Restore the training state from a checkpoint that any layout has written.

    Args:
        model: whose parameters the optimizer updates.
        state: of an optimizer before its first step.
        stored: the checkpoint.
        scalars: from its metadata.
    """
    shapes: dict[str, dict[str, torch.Size]] = {}
    for name in stored.names():
        kind, _, parameter = name.partition("/")
        if kind != PARAMETER:
            shapes.setdefault(parameter, {})[kind] = stored[name].shape
    # An optimizer creates its state in its first step: here there must be state to copy into.
    state.allocate(shapes, scalars)
    with torch.no_grad():
        for own, trained in model.named_parameters():
            # Frozen parts of a checkpoint were read with the weights of the model.
            if trained.requires_grad:
                for part in state.parts(trained):
                    _read(part, stored, stored_name(part.kind, our_name(own)))


def _read(part: StatePart, stored: "StoredState", name: str) -> None:
    tensor = stored[name]
    if tensor.shape != part.shape:
        raise CheckpointError(f"{name} has shape {list(tensor.shape)}, not {list(part.shape)}")
    start, stop = part.start, part.start + part.numel
    if start == stop:
        return
    # float32 state takes any stored state: `read` converts codes.
    if part.scales is None or part.code is None or part.quantize is None:
        part.values.copy_(tensor.read(start, stop))
        return
    # Codes and scales are copied unchanged where the stored blocks are those of this layout.
    exact = tensor.read_quantized(start, stop, part.code, part.block)
    if exact is None:  # blocks begin elsewhere than in the layout that wrote them
        part.quantize(tensor.read(start, stop).to(part.values.device, torch.float32))
        return
    part.values.copy_(exact[0])
    part.scales.copy_(exact[1])


def check_kinds(kinds: Collection[str], stored: "StoredState", optimizer: str) -> None:
    """Refuse an optimizer whose kinds of state differ from those in a checkpoint.

    Args:
        kinds: of state that it keeps, from `state_kinds`.
        stored: the checkpoint.
        optimizer: its class path.

    Raises:
        UserError: it keeps other kinds of state.
    """
    # An average may come or go on resume: the optimizer does not need it.
    known = {name.partition("/")[0] for name in stored.names()} - {PARAMETER, AVERAGE}
    if known != set(kinds):
        raise UserError(
            f"optimizer {optimizer} with the arguments in the recipe keeps "
            f"{', '.join(sorted(kinds)) or 'no state'}, but the checkpoint has "
            f"{', '.join(sorted(known)) or 'none'}. Continue with the optimizer settings that the "
            "checkpoint was made with (ftkit checkpoints show)."
        )
