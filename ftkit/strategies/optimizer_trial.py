"""Trial of an optimizer that ftkit has no row for: do parts of a parameter learn as the whole does?

It updates a small matrix, alone, before anything is loaded.
"""

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ftkit.errors import UserError, is_out_of_memory
from ftkit.recipe.optimizers import refused
from ftkit.recipe.plan import Plan
from ftkit.strategies.optimizers import OptimizerInBackward
from ftkit.strategies.state import state_kinds

SHAPE = (4, 6)
STEPS = 3
RATE = 0.1
"""Learning rate of a trial; with that of a recipe, rounding might be all that could be seen."""
EQUAL_WITHIN = 1e-4
"""Largest difference that is rounding, as a share of what an update moves.

Over three steps at this rate, that of AdamW is 0, that of LAMB 0.06."""

Make = Callable[[list[nn.Parameter]], Optimizer]


def try_optimizer(
    optimizer_class: type[Optimizer], arguments: dict[str, Any], plan: Plan, device: torch.device
) -> None:
    """Refuse an optimizer with which a run would learn something else than on one device at once.

    Args:
        optimizer_class: of the recipe.
        arguments: of the optimizer.
        plan: of the run.
        device: of the numbers.

    Raises:
        UserError: names what works.
    """
    name = plan.recipe.optimizer["class_path"]
    # Rank and seed must not matter to a trial, nor a trial to what the run draws at random.
    with torch.random.fork_rng([device] if device.type != "cpu" else []):
        try:
            _try(optimizer_class, arguments, plan, device)
        except Exception as error:  # optimizers fail in any way
            if isinstance(error, UserError) or is_out_of_memory(error):
                raise
            raise UserError(
                f"optimizer is {name}, which cannot update a small matrix: "
                f"{type(error).__name__}: {error}. Try --optimizer AdamW."
            ) from None


def _try(
    optimizer_class: type[Optimizer], arguments: dict[str, Any], plan: Plan, device: torch.device
) -> None:
    recipe, shares = plan.recipe, plan.rules.shares
    name = recipe.optimizer["class_path"]
    rate = {"lr": RATE} if "lr" in inspect.signature(optimizer_class).parameters else {}
    make = partial(optimizer_class, **(arguments | rate))
    if recipe.checkpoint.save:
        kinds = state_kinds(optimizer_class, arguments, device, [SHAPE])
        others = [kind for kind, count in kinds.items() if count != 1]
        if shares and others:
            why = f"which keeps a {others[0]} of another shape than its parameter, but {shares}"
            raise refused(name, plan.strategy, why, ("ddp",))
        if not continues(make, device):
            raise UserError(
                f"optimizer is {name}, which keeps more than the state of each parameter, which is "
                "what checkpoints hold: it could not continue as it began. Try --optimizer AdamW, "
                "or --checkpoint.save false."
            )
    if shares and not learns_in_parts(make, device):
        why = f"whose updates need whole parameters, but {shares}"
        raise refused(name, plan.strategy, why, ("ddp",))
    if recipe.train.optimizer_in_backward and not learns_in_backward(make, device):
        raise UserError(
            f"train.optimizer_in_backward is true, but optimizer is {name}, whose update of a "
            "parameter depends on others. Try --train.optimizer_in_backward false."
        )


def learns_in_parts(make: Make, device: torch.device) -> bool:
    """Return whether two halves of a matrix, flat and apart, are updated as the whole matrix is."""
    start, gradients = _numbers(device)
    (whole,) = _updated(make, [start], [[g] for g in gradients])
    try:
        halves = [
            _updated(make, [start.view(-1)[part]], [[g.view(-1)[part]] for g in gradients])[0]
            for part in (slice(start.numel() // 2), slice(start.numel() // 2, None))
        ]
    except Exception as error:  # such as one that only takes matrices
        if is_out_of_memory(error):
            raise
        return False
    return _equal(torch.cat(halves).view(SHAPE), whole, start)


def continues(make: Make, device: torch.device) -> bool:
    """Return whether a new optimizer goes on with the state of another as that would have."""
    start, gradients = _numbers(device)
    (whole,) = _updated(make, [start], [[g] for g in gradients])
    (second,) = _updated(make, [start], [[g] for g in gradients], renewed=True)
    return _equal(second, whole, start)


def learns_in_backward(make: Make, device: torch.device) -> bool:
    """Return whether two parameters are updated one after the other as they are together."""
    start, gradients = _numbers(device)
    both, of_both = list(start.split(2)), [list(g.split(2)) for g in gradients]
    together = _updated(make, both, of_both)
    apart = _updated(make, both, of_both, in_backward=True)
    return _equal(torch.cat(apart), torch.cat(together), start)


def _numbers(device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """A matrix and the gradients of its updates."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(SHAPE, generator=generator) for _ in range(1 + STEPS))
    return start.to(device), [gradient.to(device) for gradient in gradients]


def _equal(found: Tensor, expected: Tensor, start: Tensor) -> bool:
    moved = (expected - start).abs().max()
    return bool((found - expected).abs().max() <= EQUAL_WITHIN * moved)


def _updated(
    make: Make,
    starts: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    *,
    in_backward: bool = False,
    renewed: bool = False,
) -> list[Tensor]:
    """Parameters after updates by one optimizer.

    Args:
        make: creates it.
        starts: the parameters before.
        gradients: for each step, of each parameter.
        in_backward: update each in the backward pass.
        renewed: before the last step, create another optimizer and give it the state.
    """
    parameters = [nn.Parameter(start.clone()) for start in starts]
    optimizer = make(parameters)
    updates = OptimizerInBackward(optimizer) if in_backward else None
    for step, of_step in enumerate(gradients):
        torch.manual_seed(step)
        if renewed and step == len(gradients) - 1:
            state = deepcopy([dict(optimizer.state[p]) for p in parameters])
            optimizer = make(parameters)
            for parameter, kept in zip(parameters, state, strict=True):
                optimizer.state[parameter] = kept
        pairs = zip(parameters, of_step, strict=True)
        if updates is not None:
            torch.stack([(p * g).sum() for p, g in pairs]).sum().backward()
            continue
        for parameter, gradient in pairs:
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
