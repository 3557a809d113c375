"""Rules of micro-batches: how many sequences and tokens they have."""

import math

from ftkit.errors import UserError
from ftkit.recipe.facts import Facts
from ftkit.recipe.recipe import MicroBatchKey, Train
from ftkit.utils.accelerators.kinds import DeviceKind

KNOWN_MICRO_BATCH: dict[MicroBatchKey, int] = {"micro_batch_size": 1, "micro_batch_tokens": 4096}
"""Values to try where nothing is known of the device."""


def count_micro_steps(samples: int, micro_batch_size: int, data_ranks: int) -> int:
    """Forward and backward passes of each rank for this many samples over all ranks."""
    return math.ceil(samples / (micro_batch_size * data_ranks))


def micro_batch(facts: Facts) -> tuple[int, int | None, list[str]]:
    """Return most sequences and most tokens of a micro-batch, and notices about them.

    Raises:
        UserError: the recipe gives them in a way that does not work.
    """
    train, notices = facts.recipe.train, []
    if facts.trains:
        check_shapes(train, facts.kind)
    if (key := train.auto_key) is not None:
        raise UserError(
            f"train.{key} is auto, which depends on the free memory of a device. "
            f"Try --train.{key} {KNOWN_MICRO_BATCH[key]}, or ftkit plan with --gpu."
        )
    size, tokens, batch = train.micro_batch_size, train.micro_batch_tokens, train.global_batch_size
    if train.global_batch_tokens is not None:
        batch = train.global_batch_tokens  # a sample has one token at least
    assert tokens != "auto"
    if tokens is not None and train.padding_free is False:
        raise UserError(
            f"train.micro_batch_tokens is {tokens}, but train.padding_free is false: a number of "
            "tokens bounds rows without padding. Try --train.padding_free null, or "
            "--train.micro_batch_tokens null."
        )
    if size is None or size == "auto":
        most = 1 if tokens is None else batch
    else:
        most = min(size, batch)
        if size > batch:
            notices.append(
                f"train.micro_batch_size {size} is more than the global batch: {batch} is used."
            )
        if size == 1 and tokens is not None and batch > 1:
            notices.append(
                "train.micro_batch_size is 1: no micro-batch has more than one sequence, whatever "
                "train.micro_batch_tokens is. --train.micro_batch_size null lifts that bound."
            )
    if facts.kind.compiles_shapes and tokens is not None:  # of a result, trained elsewhere
        return most if isinstance(size, int) else 1, None, notices
    return most, tokens, notices


def check_shapes(train: Train, kind: DeviceKind) -> None:
    """Refuse rows without padding on devices that compile programs for each shape.

    Raises:
        UserError: the recipe asks for them.
    """
    if not kind.compiles_shapes:
        return
    for key, value, instead in (
        ("micro_batch_tokens", train.micro_batch_tokens, "null --train.micro_batch_size 4"),
        ("padding_free", train.padding_free or None, "null"),
    ):
        if value is not None:
            shown = str(value).lower()
            raise UserError(
                f"train.{key} is {shown}, but accelerator is {kind.name}, which compiles programs "
                "for every new shape: rows without padding have another one in each micro-batch. "
                f"Try --train.{key} {instead}, which pads them to a few lengths."
            )
