"""Numbers that are not finite: the tests before anything is kept, and the end of the run."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ftkit.checkpoint.shards import Piece
from ftkit.checkpoint.state import stored_name
from ftkit.models.lora.targets import our_name
from ftkit.strategies.distributed import broadcast_text, max_over_ranks, rank, world_size
from ftkit.strategies.state import PARAMETER
from ftkit.training.setup import Setup
from ftkit.utils.imports import dtensor

_USUAL_RATE = 1e-4
"""No higher learning rate is suggested: a tenth of an absurd one may be absurd."""


class NotFinite(Exception):
    """Training cannot continue: a number is not finite. All ranks raise it."""

    def __init__(self, message: str, *, remedy: str = "", computed_from: int | None = None) -> None:
        """Explain the end of the run.

        Args:
            message: the cause, and what may help.
            remedy: options with which the run is worth continuing; empty: none help.
            computed_from: step whose weights alone give that number, so that a run which continues
                from its checkpoint would end the same way; None: the update after it did.
        """
        super().__init__(message)
        self.remedy, self.computed_from = remedy, computed_from


def diverged(setup: Setup, fact: str, *, computed_from: int | None = None) -> NotFinite:
    """The end of a run in which a number is not finite.

    Args:
        setup: of the run.
        fact: what is not finite, and after how many steps.
        computed_from: see `NotFinite`.
    """
    train, precision = setup.recipe.train, setup.plan.precision
    if computed_from == 0:  # computed with the base model's own weights
        return NotFinite(
            f"{fact}, before anything was learned: the base model's weights contain values that "
            f"are not finite, or too large for {precision}. Try --precision 32-true, or fetch the "
            "base model again."
        )
    options = [f"--optimizer.lr {min(setup.learning_rate / 10, _USUAL_RATE):g}"]
    clips = train.max_norm is not None or train.optimizer_in_backward
    options += ["--train.max_norm 1.0"] * (not clips)
    others = [*options[1:], *(["--precision 32-true"] * (precision != "32-true"))]
    tail = f", with {' or '.join(others)}" if others else ""
    return NotFinite(
        f"{fact}. Try a lower learning rate ({options[0]}){tail}.",
        remedy=" ".join(options),
        computed_from=computed_from,
    )


def own_weights(setup: Setup) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of the trained parameters, as the model computes with them."""
    setup.strategy.sharding.reshard(setup.model)
    for name, parameter in setup.model.named_parameters():
        if parameter.requires_grad:
            for held in setup.strategy.parameter_memory(parameter):
                own = held.to_local() if isinstance(held, dtensor()) else held
                yield stored_name(PARAMETER, our_name(name)), own


def kept_numbers(setup: Setup, pieces: Iterable[Piece]) -> Iterator[tuple[str, Tensor]]:
    """What this rank adds to a checkpoint of trained parameters, their state and averages."""
    frozen = {
        stored_name(PARAMETER, our_name(name))
        for name, parameter in setup.model.named_parameters()
        if not parameter.requires_grad
    }
    for piece in pieces:
        if piece.name not in frozen:
            yield piece.name, piece.values
            if piece.scales is not None:
                yield piece.name, piece.scales
    if not setup.strategy.updates_parameters:  # they are rounded from what the checkpoint has
        yield from own_weights(setup)


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Find a tensor that holds a number which is not finite; every rank calls this.

    The host waits once for each kind of device that has tensors, and for the other ranks.

    Args:
        tensors: of this rank, with their names in a checkpoint.

    Returns:
        Its kind and name, equal on all ranks; None: all numbers of all ranks are finite.
    """
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            by_device.setdefault(tensor.device, []).append((name, _is_finite(tensor)))
    found = [
        name
        for flags in by_device.values()
        for (name, _), is_finite in zip(
            flags, torch.stack([flag for _, flag in flags]).tolist(), strict=True
        )
        if not is_finite
    ]
    # The largest also says whose name it is.
    (most,) = max_over_ranks(world_size() - rank() if found else 0)
    if not most:
        return None
    kind, _, name = broadcast_text(found[0] if found else "", source=world_size() - most).partition(
        "/"
    )
    return f"{kind} {name}"


def _is_finite(tensor: Tensor) -> Tensor:
    # One pass and no temporary of its size, unlike isfinite; NaN is the least and the largest.
    if tensor.itemsize == 1:  # of 8 bits, for which torch has no such pass
        tensor = tensor.float()
    return torch.stack(torch.aminmax(tensor.detach())).isfinite().all()
