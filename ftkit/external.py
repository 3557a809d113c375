"""This process as one of the ranks that torchrun or SLURM has started."""

import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ftkit.errors import UserError
from ftkit.job import Job, RankError
from ftkit.ranks import EXIT_BY_SIGNAL, STATE, ExternalRanks, rank_directory
from ftkit.train import main

ENDED = "ended"
PATIENCE_S = 10.0
"""How long rank 0 waits for the last words of the others."""


def take_part(
    placed: ExternalRanks,
    prepare: Callable[[], AbstractContextManager[Job]],
    conclude: Callable[[Job, list[signal.Signals], dict[int, int]], int],
) -> int:
    """Run this rank; rank 0 also prepares the run and writes the report.

    Args:
        placed: which rank this is.
        prepare: checks the recipe and claims the run's directory.
        conclude: writes the report and gives the exit code.
    """
    if placed.rank > 0:
        job_file = _share(None)
        code = main(["ftkit.train", str(job_file)])
        (rank_directory(job_file.parent, placed.rank) / ENDED).touch()
        return code
    with ExitStack() as stack:
        try:
            job = stack.enter_context(prepare())
        except UserError as error:
            _share(error)
            raise
        state = job.recipe.out_dir / STATE
        main(["ftkit.train", str(_share(state / "job.json"))])
        _wait_for_others(state, placed.world_size)
        return conclude(job, _signals(state), {})


def _share(found: Path | UserError | None) -> Path:
    """What rank 0 found, on every rank: the job's file, or why there is none."""
    dist.init_process_group("gloo")
    message: list[Any] = [str(found), isinstance(found, UserError)]
    dist.broadcast_object_list(message)
    dist.destroy_process_group()
    text, failed = message
    if failed:
        raise UserError(text)
    return Path(text)


def _wait_for_others(state: Path, world_size: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    files = [rank_directory(state, rank) / ENDED for rank in range(1, world_size)]
    while not all(file.exists() for file in files) and time.monotonic() < deadline_s:
        time.sleep(0.05)


def _signals(state: Path) -> list[signal.Signals]:
    """The signal that ended this rank, if one did."""
    error = RankError.read(rank_directory(state, 0) / "error.json")
    if error is None or error.kind != "interrupted":
        return []
    return [number for number in EXIT_BY_SIGNAL if number.name == error.message]
