"""Where the samples of a run are cut into steps that are not all of one size.

Cuts are a function of the order of the samples, their lengths and the position from which they go
on, never of ranks or micro-batches.
"""

from dataclasses import dataclass

import numpy as np

from ftkit.data.samples.layout import IntArray
from ftkit.data.samples.sampler import EpochOrder
from ftkit.recipe.recipe import Train


@dataclass(frozen=True, kw_only=True)
class StepCuts:
    """Cuts between steps; every epoch ends with one."""

    positions: IntArray
    """[steps + 1], samples of the whole run before each step, from the first one on."""
    steps_per_epoch: int
    """Steps of a whole epoch, the first one."""


def cut_steps(
    train: Train, epochs: EpochOrder, lengths: IntArray, *, start_step: int, start_samples: int
) -> StepCuts | None:
    """Cut the samples of a run from a position on; None: all steps have the same size.

    Args:
        train: section of the recipe.
        epochs: the order of the samples.
        lengths: [samples of the data set], tokens of each.
        start_step: optimizer steps done before the position.
        start_samples: the position, samples of the whole run.
    """
    if train.global_batch_tokens is None and not train.step_ends_with_epoch:
        return None
    steps_left = None if train.max_steps is None else max(0, train.max_steps - start_step)
    positions = [start_samples]
    epoch, place = divmod(start_samples, epochs.samples)
    while (train.epochs is None or epoch < train.epochs) and (
        steps_left is None or len(positions) <= steps_left
    ):
        ends = _ends(train, epochs, lengths, epoch, place)
        positions += (epoch * epochs.samples + ends).tolist()
        epoch, place = epoch + 1, 0
    if steps_left is not None:
        del positions[steps_left + 1 :]
    return StepCuts(
        positions=np.array(positions, dtype=np.int64),
        steps_per_epoch=len(_ends(train, epochs, lengths, 0, 0)),
    )


def _ends(train: Train, epochs: EpochOrder, lengths: IntArray, epoch: int, place: int) -> IntArray:
    """[steps], samples of the epoch up to the end of each step from a place in it on."""
    tokens = train.global_batch_tokens
    if tokens is None:
        ends = np.arange(place, epochs.samples, train.global_batch_size) + train.global_batch_size
        return np.minimum(ends, epochs.samples)
    before = np.concatenate(([0], np.cumsum(lengths[epochs.of(epoch)])))
    found = []
    while place < epochs.samples:
        # At least one sample: a longer one has a step of its own.
        fitting = int(np.searchsorted(before, before[place] + tokens, side="right")) - 1
        place = max(fitting, place + 1)
        found.append(place)
    return np.array(found, dtype=np.int64)
