"""Training state: trained parameters and optimizer state, out of and into any strategy.

Everything is named by parameter and kept in pieces (`checkpoint/shards.py`): what a rank holds of a
parameter under single, DDP, FSDP or ZeRO is a range of its numbers. So saving takes no word between
ranks, and loading asks for the ranges of whatever layout there is now.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ftkit.checkpoint.metadata import CheckpointError
from ftkit.checkpoint.shards import Piece, StoredState, StoredTensor, share_of
from ftkit.errors import UserError
from ftkit.models.load_weights import Sharding, kept_parameters
from ftkit.models.lora.targets import our_name
from ftkit.strategies.optim.average import AVERAGE
from ftkit.strategies.optim.state_kinds import BLOCK
from ftkit.strategies.state import PARAMETER, Holder, StatePart


def stored_name(kind: str, parameter: str) -> str:
    """The name of a tensor in a checkpoint: parameter/NAME, exp_avg/NAME, ..."""
    return f"{kind}/{parameter}"


def capture(model: nn.Module, holder: Holder, rank: int, world_size: int) -> Iterator[Piece]:
    """What this rank writes of the state of training; views of live memory.

    What every rank holds is shared out in equal ranges.
    """
    for name, parameter in kept_parameters(model).items():
        for part in holder.parts(parameter):
            first, last = 0, part.values.numel()
            which = (rank, world_size) if part.replicated else part.copy
            first, last = share_of(*which, last)
            if first == last:
                continue
            scales = part.scales
            yield Piece(
                name=stored_name(part.kind, our_name(name)),
                shape=part.shape,
                start=part.start + first,
                values=part.values[first:last],
                scales=None if scales is None else scales[first // BLOCK : -(-last // BLOCK)],
                code=part.code,
            )


def trained_parameter(stored: StoredState, name: str) -> StoredTensor:
    """A parameter in a checkpoint, by our name."""
    return stored[stored_name(PARAMETER, name)]


def result_parameter(stored: StoredState, name: str) -> StoredTensor:
    """The same of the result that the checkpoint stands for: its average, if it has one."""
    average = stored_name(AVERAGE, name)
    return stored[average] if average in stored else trained_parameter(stored, name)


def has_average(stored: StoredState) -> bool:
    """Whether a checkpoint has the average of what is trained."""
    return any(name.startswith(f"{AVERAGE}/") for name in stored.names())


def replace_trained(model: nn.Module, sharding: Sharding, stored: StoredState) -> None:
    """Give what a model trains the numbers of a checkpoint's result; every rank does so.

    Those that an optimizer keeps beside it stay: nothing can be trained after.

    Args:
        model: that has trained.
        sharding: which part of it this rank has.
        stored: from a checkpoint of the same run.
    """
    sharding.reshard(model)
    with torch.no_grad():
        for name, parameter in kept_parameters(model).items():
            if parameter.requires_grad:
                sharding.replace(parameter, result_parameter(stored, our_name(name)))


def restore(
    model: nn.Module, holder: Holder, stored: StoredState, scalars: dict[str, float]
) -> None:
    """Put the state of training back, on whatever layout there is now.

    Args:
        model: whose parameters the optimizer updates.
        holder: of an optimizer that has not stepped yet.
        stored: from a checkpoint.
        scalars: from its metadata.
    """
    shapes: dict[str, dict[str, torch.Size]] = {}
    for name in stored.names():
        kind, _, parameter = name.partition("/")
        if kind != PARAMETER:
            shapes.setdefault(parameter, {})[kind] = stored[name].shape
    holder.allocate(shapes, scalars)
    with torch.no_grad():
        for own, trained in model.named_parameters():
            if trained.requires_grad:
                for part in holder.parts(trained):
                    _read(part, stored, stored_name(part.kind, our_name(own)))


def _read(part: StatePart, stored: StoredState, name: str) -> None:
    tensor = stored[name]
    if tensor.shape != part.shape:
        raise CheckpointError(f"{name} has shape {list(tensor.shape)}, not {list(part.shape)}")
    start, stop = part.start, part.start + part.values.numel()
    if start == stop:
        return
    if part.scales is None or part.code is None:
        part.values.copy_(tensor.read(start, stop))
        return
    exact = tensor.read_quantized(start, stop)
    if exact is None:
        from bitsandbytes.functional import quantize_blockwise

        numbers = tensor.read(start, stop).float().to(part.values.device)
        codes, quantized = quantize_blockwise(numbers, part.code, blocksize=BLOCK)
        exact = codes, quantized.absmax
    part.values.copy_(exact[0])
    part.scales.copy_(exact[1])


def check_kinds(kinds: Mapping[str, bool], stored: StoredState, optimizer: str) -> None:
    """Refuse an optimizer whose state the checkpoint has not, or only a part of.

    Args:
        kinds: what it keeps, from `state_kinds`.
        stored: from the checkpoint.
        optimizer: its class path.

    Raises:
        UserError: it keeps other kinds of state.
    """
    known = {name.partition("/")[0] for name in stored.names()} - {PARAMETER, AVERAGE}
    if known != kinds.keys():
        raise UserError(
            f"optimizer {optimizer} with the arguments in the recipe keeps "
            f"{', '.join(sorted(kinds)) or 'no state'}, but the checkpoint has "
            f"{', '.join(sorted(known)) or 'none'}. Continue with the optimizer settings that the "
            "checkpoint was made with (ftkit checkpoints show)."
        )
