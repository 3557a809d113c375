"""Rules of micro-batches: how many sequences and tokens they have."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from ftkit.errors import UserError
from ftkit.recipe.facts import Facts
from ftkit.recipe.mesh import Mesh
from ftkit.recipe.recipe import MicroBatchKey, Train
from ftkit.utils.accelerators.kinds import DeviceKind

KNOWN_MICRO_BATCH: dict[MicroBatchKey, int] = {"micro_batch_size": 1, "micro_batch_tokens": 4096}
"""Values to try where nothing is known of the device."""


MicroBatchSource = Literal["usual", "memory", "checkpoint"]
"""Why ftkit chose a micro-batch: more tokens would bring no speed on such a device, they would not
fit its memory, or a resumed run keeps that of its checkpoint on the same layout."""
SOURCE_WORDS: dict[MicroBatchSource, str] = {
    "usual": "more would hardly be faster",
    "memory": "as many as fit",
    "checkpoint": "as in the checkpoint",
}
"""The same in words."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Limits of a micro-batch that ftkit chose, because the recipe leaves them open."""

    sequences: int
    """Most sequences."""
    tokens: int | None
    """Most tokens, but for a longer sequence, which runs alone; None: as many as they have."""
    source: MicroBatchSource
    """Why."""
    halved: int = 0
    """How often it was halved in this command because memory ran out."""

    @property
    def half(self) -> "MicroBatch | None":
        """Half of it; None: one sequence is not less."""
        # Whatever decided before, memory does now.
        less = dataclasses.replace(self, source="memory", halved=self.halved + 1)
        if self.tokens is not None:
            return dataclasses.replace(less, tokens=max(1, self.tokens // 2))
        if self.sequences == 1:
            return None
        return dataclasses.replace(less, sequences=self.sequences // 2)


def count_micro_steps(samples: int, micro_batch_size: int, data_ranks: int) -> int:
    """Forward and backward passes of each rank for this many samples over all ranks."""
    return math.ceil(samples / (micro_batch_size * data_ranks))


def usual_micro_batch(train: Train, kind: DeviceKind, mesh: Mesh) -> MicroBatch:
    """Return the micro-batch of a recipe that leaves it open, on devices with enough memory.

    Args:
        train: whose keys are open.
        kind: of the devices.
        mesh: of the ranks; those that share rows have the tokens of all of them together.
    """
    batch, tokens = train.global_batch_size, kind.enough_tokens
    if tokens is not None:
        tokens *= mesh.context
    if train.global_batch_tokens is not None:
        batch = train.global_batch_tokens  # a sample has one token at least
    elif train.optimizer_in_backward:  # which needs the step in one micro-batch
        batch, tokens = math.ceil(batch / mesh.data_ranks), None
    return MicroBatch(
        sequences=1 if tokens is None and not train.optimizer_in_backward else batch,
        tokens=tokens,
        source="usual",
    )


def micro_batch(facts: Facts, chosen: MicroBatch | None) -> tuple[int, int | None, list[str]]:
    """Return most sequences and most tokens of a micro-batch, and notices about them.

    Args:
        facts: of the run.
        chosen: the micro-batch where the recipe leaves it open; None: it does not.

    Raises:
        UserError: the recipe gives them in a way that does not work.
    """
    train = facts.recipe.train
    notices: list[str] = []
    if facts.trains:
        check_shapes(train, facts.kind)
    if (key := train.auto_key) is not None:
        raise UserError(
            f"train.{key} is auto, which depends on the free memory of a device. "
            f"Try --train.{key} {KNOWN_MICRO_BATCH[key]}, or ftkit plan with --gpu."
        )
    if chosen is not None:
        return chosen.sequences, chosen.tokens, notices
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
        most = batch
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
