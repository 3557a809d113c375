"""Ranks that torchrun has started, by its variables."""

import os
import signal
from collections.abc import Sequence

from ftkit.runs.launchers import ExternalRanks


def ranks(command: Sequence[str]) -> ExternalRanks | None:
    """Return the ranks, this process among them."""
    variables = os.environ
    return ExternalRanks(
        rank=int(variables["RANK"]),
        world_size=int(variables["WORLD_SIZE"]),
        local_world_size=int(variables["LOCAL_WORLD_SIZE"]),
    )


def ended(code: int, received: Sequence[signal.Signals]) -> None:
    """Nothing: torchrun itself starts a run again."""
