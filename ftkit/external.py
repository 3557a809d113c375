"""This process as one of those that torchrun or SLURM has started, one for each rank.

Each looks after its rank as `ftkit` does without them; the one of rank 0 also prepares the run and
writes the report. They find each other through the store that the ranks meet in, too.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist

from ftkit.errors import UserError
from ftkit.job import FOR_MEMORY, Job, RankError
from ftkit.process import die_with_parent
from ftkit.ranks import (
    ERROR,
    EXIT_BY_SIGNAL,
    EXIT_OUT_OF_MEMORY,
    POLL_S,
    STATE,
    ExternalRanks,
    Ranks,
    rank_directory,
)
from ftkit.report.report import ENDED_WELL, FILE_NAME, read_report
from ftkit.resume import Completed

Store: TypeAlias = Any
"""torch.distributed.Store, which torch does not export for type checkers."""
JOB = "job"
COMPLETE = "complete"
"""In its place: the run that was to go on is complete."""
CONNECT_S = 300.0
"""How long the processes wait for each other to start."""
PATIENCE_S = 10.0
"""How long rank 0 waits for the last words of the others."""


def take_part(
    placed: ExternalRanks,
    prepare: Callable[[Sequence[signal.Signals]], AbstractContextManager[Job]],
    conclude: Callable[[Job, Sequence[signal.Signals]], int],
) -> int:
    """Run this rank; on rank 0 also prepare the run and write the report.

    Args:
        placed: which rank this is.
        prepare: checks the recipe and claims the run's directory; given the signals received.
        conclude: writes the report and gives the exit code.
    """
    die_with_parent(os.getppid())
    store = _connect(placed)
    if placed.rank > 0:
        return _follow(placed, store)
    ended = [_ended(rank) for rank in range(1, placed.world_size)]
    with Ranks(placed) as ranks, ExitStack() as stack:
        try:
            job = stack.enter_context(prepare(ranks.received))
        except Completed:
            store.set(JOB, COMPLETE)
            _wait_for(store, ended, patience_s=PATIENCE_S)
            raise
        except BaseException:
            store.set(JOB, "")
            raise
        state = job.recipe.out_dir / STATE
        store.set(JOB, str(state / "job.json"))
        ranks.run(job, state)
        _wait_for(store, ended, patience_s=PATIENCE_S)
        return conclude(job, ranks.received)


def _connect(placed: ExternalRanks) -> Store:
    """The store under torchrun's address: torchrun's own, or else one in this process of rank 0.

    Raises:
        UserError: the other processes do not come.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            *address,
            world_size=None if agent else placed.world_size,
            is_master=placed.rank == 0 and not agent,
            timeout=timedelta(seconds=CONNECT_S),
        )
    except dist.DistError as error:
        raise UserError(
            f"The {placed.world_size} processes of this run do not find each other at "
            f"{address[0]}:{address[1]}: {error}. Start all of them with torchrun or srun; inside "
            "a SLURM job without srun, try SLURM_JOB_NAME=interactive ftkit ..."
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"ftkit-{attempt}", store)  # type: ignore[attr-defined]


def _follow(placed: ExternalRanks, store: Store) -> int:
    """Run a rank other than 0; errors are told by rank 0."""
    try:
        _wait_for(store, [JOB])
    except dist.DistError:  # rank 0 is gone
        return 1
    job_file = store.get(JOB).decode()
    if not job_file:
        return UserError.exit_code
    if job_file == COMPLETE:
        with suppress(dist.DistError):
            store.set(_ended(placed.rank), "")
        return 0
    with Ranks(placed) as ranks:
        state = Path(job_file).parent
        ranks.run(Job.read(Path(job_file)), state)
        code = _exit_code(rank_directory(state, placed.rank))
        with suppress(dist.DistError):
            store.set(_ended(placed.rank), "")
    return code


def _ended(rank: int) -> str:
    return f"ended-{rank}"


def _wait_for(store: Store, keys: list[str], *, patience_s: float = float("inf")) -> None:
    """Wait for keys; signals are answered meanwhile, which the store's own wait would not do."""
    deadline_s = time.monotonic() + patience_s
    while not all(store.check([key]) for key in keys) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def _exit_code(directory: Path) -> int:
    """As `ftkit` without torchrun ends if this rank is why the run ends."""
    error = RankError.read(directory / ERROR)
    if error is None:  # done, or killed before it could say anything
        report = directory / FILE_NAME
        return 0 if report.exists() and read_report(report).outcome in ENDED_WELL else 1
    by_signal = {number.name: code for number, (code, _) in EXIT_BY_SIGNAL.items()}
    codes = {"user": UserError.exit_code} | dict.fromkeys(FOR_MEMORY, EXIT_OUT_OF_MEMORY)
    codes |= by_signal
    return codes.get(error.message if error.kind == "interrupted" else error.kind, 1)
