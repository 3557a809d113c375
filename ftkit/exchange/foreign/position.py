"""The position in the data at which a foreign run goes on, as far as its checkpoint says."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ftkit.exchange.foreign.recipe import ImportRecipe
from ftkit.exchange.foreign.state import ForeignState

_OWN_ORDER = (
    "not taken over: the order of the samples. ftkit goes on at that place of its own order: until "
    "the epoch ends, some samples come again and others not at all"
)
_UNUSUAL = 0.05
"""Relative difference of batch sizes that is worth a word."""
_WHOLE = 1e-3
"""How far a count computed from an epoch may lie from a whole number: epochs are floats."""


@dataclass(frozen=True)
class PositionInData:
    """Where in the data a run goes on."""

    samples: int
    """Consumed so far."""
    lines: Sequence[str]
    """What the user should know of it."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a recipe that follow from it."""


def position_in_data(state: ForeignState, asked: ImportRecipe, of_epoch: int) -> PositionInData:
    """Samples consumed so far, and what differs between the checkpoint and the recipe.

    transformers' Trainer keeps the epoch, the steps and the batch of one forward pass, but neither
    the size of its data nor how many batches are accumulated for a step. An epoch means samples
    only where the recipe has the same data, which shows in whole numbers: of forward passes, and of
    those in a step.

    Args:
        state: of the foreign run.
        asked: the recipe.
        of_epoch: samples of an epoch of the recipe's data.
    """
    batch = asked.read().train.global_batch_size
    is_given = asked.gives("global_batch_size", "micro_batch_size")
    lines: list[str] = []
    of_step: int | None = None
    if state.samples is not None:
        samples, how = state.samples, "as the checkpoint says"
    elif state.epochs is None:
        samples, how = state.step * batch, f"{state.step:,} steps of train.global_batch_size"
    elif state.micro_batch is None:
        samples, how = round(state.epochs * of_epoch), f"after {state.epochs:.4g} epochs"
    elif (accumulated := _accumulated(state.step, state.epochs, state.micro_batch, of_epoch)) and (
        not is_given or abs(accumulated * state.micro_batch - batch) <= _UNUSUAL * batch
    ):
        of_step = accumulated * state.micro_batch
        samples, how = round(state.epochs * of_epoch), f"after {state.epochs:.4g} epochs"
    else:
        of_step = state.micro_batch
        samples = state.step * of_step
        how = f"{state.step:,} steps of {of_step:,}, its train_batch_size"
        steps = state.step / state.epochs if state.epochs else 0.0
        lines.append(
            f"differs: an epoch of the checkpoint has {steps:,.4g} steps, but {of_epoch:,} samples "
            f"in steps of {batch if is_given else of_step:,} are "
            f"{math.ceil(of_epoch / (batch if is_given else of_step)):,}. Its data was another "
            "than the recipe's, or several batches were accumulated for a step, which it does not "
            "say"
        )
    keys = {} if is_given or of_step is None else {"train": {"global_batch_size": of_step}}
    if not keys and abs(samples - state.step * batch) > _UNUSUAL * max(1, state.step) * batch:
        lines.append(
            f"train.global_batch_size is {batch}, but a step has taken "
            f"{samples / max(1, state.step):.4g} samples so far"
        )
    place = f"position in the data: sample {samples:,} ({how}; an epoch has {of_epoch:,})"
    return PositionInData(samples, [place, *lines, _OWN_ORDER], keys)


def _accumulated(step: int, epochs: float, micro_batch: int, of_epoch: int) -> int | None:
    """Forward passes in a step, if the run had data of this size; None: it had not.

    Args:
        step: steps done.
        epochs: passes over the data.
        micro_batch: samples of one forward pass on all processes.
        of_epoch: samples of an epoch.
    """
    in_epoch = math.ceil(of_epoch / micro_batch)
    whole_epochs = math.floor(epochs + _WHOLE / in_epoch)
    further = (epochs - whole_epochs) * in_epoch
    if not step or abs(further - round(further)) > _WHOLE:
        return None
    done = whole_epochs * in_epoch + round(further)
    accumulated = -(-done // step)
    # An epoch's last step may have fewer of them, or they are left out.
    counts = (
        whole_epochs * divide(in_epoch) + round(further) // accumulated
        for divide in (lambda n: -(-n // accumulated), lambda n: n // accumulated)
    )
    return accumulated if accumulated and step in counts else None
