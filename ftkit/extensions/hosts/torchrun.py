"""Supervisors under torchrun or SLURM, which start a process for each rank.

Each process supervises its rank as `ftkit` does without a launcher; that of rank 0 also prepares
the run and writes the report. They find each other through a store in the process of rank 0, and
notice by their heartbeats when one is lost with its machine.
"""

import dataclasses
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ftkit.errors import EXIT_BY_SIGNAL, EXIT_OUT_OF_MEMORY, Completed, UserError
from ftkit.extensions.hosts.connections import (
    Endpoint,
    address_towards,
    chosen_interface,
    is_loopback,
    listening,
    problem_reaching,
    reached_within,
)
from ftkit.extensions.hosts.heartbeats import (
    Heartbeats,
    SharedStore,
    beats_of,
    ended_key,
    silence_text,
)
from ftkit.extensions.hosts.multihost import (
    JOB_TEXT,
    JobAnnouncement,
    LeadRelay,
    announced_job,
    over_key,
)
from ftkit.launch.interfaces import GLOO, NCCL
from ftkit.launch.ranks import POLL_S, Ranks, StoppedEarly
from ftkit.recipe.recipe import Recipe
from ftkit.runs.directory import RankDirectory
from ftkit.runs.job import FOR_MEMORY, Job, RankError
from ftkit.runs.launchers import ExternalRanks
from ftkit.runs.report.report import ENDED_WELL, read_report
from ftkit.utils.process import die_with_parent, print_line
from ftkit.utils.progress import print_notice
from ftkit.utils.urls import url_of

PORT = "port"
"""Key in torchrun's store: the port of the store in the process of rank 0."""
JOB = "job"
"""Key: the path of the job's file; empty: the run cannot start."""
COMPLETE = "complete"
"""Value in its place: the run that was to be continued is complete."""
PROBLEM = "problem"
"""Key: why the machines do not reach each other; empty: they do."""
CONNECT_S = 300.0
"""Seconds that the processes wait for each other to start."""
PATIENCE_S = 10.0
"""Seconds that rank 0 waits for the others to end."""


def take_part(
    placed: ExternalRanks,
    recipe: Recipe,
    prepare: Callable[..., AbstractContextManager[Job]],
    conclude: Callable[[Job, Sequence[signal.Signals]], int],
) -> int:
    """Supervise this rank; on rank 0 also prepare the run and write the report.

    Arguments and errors are those of `Launcher.take_part`. Tokens of the hub are taken from the
    recipe of this process: they are in no file that it could have from rank 0.
    """
    # torchrun may be killed without a chance to end its processes.
    die_with_parent(os.getppid())
    store, watched = _meet(placed)
    # Ranks meet in this store: torchrun's keeps the addresses of an attempt before, and each host
    # counts restarts by itself.
    variables = {"MASTER_PORT": str(store.port), "TORCHELASTIC_RESTART_COUNT": "0"}
    if placed.num_nodes > 1:
        try:
            found = _connected(placed, store)
        except dist.DistError as error:
            raise UserError(
                f"rank {placed.rank} has lost the connection with rank 0, at {store.host}, before "
                f"the run began: {error}. Start it again, with --resume auto."
            ) from None
        if found is None:
            _wait_for_rank_0(store)
            return UserError.exit_code
        variables |= found
    if placed.rank > 0:
        with Heartbeats(store, placed.rank, watched, _leave):
            code = _follow(placed, store, recipe, variables)
        if code == UserError.exit_code:
            _wait_for_rank_0(store)
        return code
    with (
        Ranks(placed, variables) as ranks,
        Heartbeats(store, placed.rank, watched, ranks.end_without),
        ExitStack() as stack,
    ):
        relay = None
        if placed.num_nodes > 1:
            relay = LeadRelay(store, placed.world_size, placed.local_world_size)
            stack.enter_context(relay)
        try:
            job = stack.enter_context(prepare(received=ranks.received, others=relay))
        except BaseException as end:
            # However the preparation ends: the others wait for this key.
            store.set(JOB, COMPLETE if isinstance(end, Completed) else "")
            if not isinstance(end, StoppedEarly):  # the signal may have ended the others
                _wait_for_the_end(store, watched, ranks)
            raise
        if relay is not None and url_of(job.directory.path) is not None:
            start = None if job.start is None else Path(job.start)
            store.set(JOB_TEXT, JobAnnouncement.of(job.directory, start, job.base).to_text())
            relay.begin(job.directory)
        # Last: with this key the other ranks start, and a host without the file looks for JOB_TEXT.
        store.set(JOB, str(job.directory.job))
        ranks.run(job.directory, job.plan, recipe.data_token)
        # Before the wait: a supervisor whose count grows meanwhile is not gone.
        heard = {rank: beats_of(store, rank) for rank in watched}
        left = _wait_for_the_end(store, watched, ranks)
        if relay is not None:
            # What other hosts left last, before the report is combined.
            relay.collect()
        for rank in left:
            if beats_of(store, rank) == heard[rank]:  # else it is busy with its own end
                ranks.end_without(rank, silence_text(watched[rank], PATIENCE_S))
        return conclude(job, ranks.received)


def _meet(placed: ExternalRanks) -> tuple[SharedStore, dict[int, str]]:
    """Return the store of all supervisors, and the machines of those that this one watches.

    Machines are given by rank.
    """
    everyone = range(placed.world_size)
    # Rank 0 watches all others, and they watch rank 0.
    watched = everyone[1:] if placed.rank == 0 else everyone[:1]
    try:
        store = _connect(placed)
        store.set(_machine(placed.rank), socket.gethostname())
        missing: list[str] = []
        for patience_s in (PATIENCE_S, CONNECT_S):
            _wait_for(store, [_machine(rank) for rank in watched], patience_s=patience_s)
            missing = [str(rank) for rank in watched if not store.check([_machine(rank)])]
            if missing and patience_s == PATIENCE_S:
                print_notice(f"waiting for rank {', '.join(missing)} of {placed.world_size} ranks")
        if not missing:
            return store, {rank: store.get(_machine(rank)).decode() for rank in watched}
        reason = f"rank {', '.join(missing)} did not come in {CONNECT_S:g} s"
    except ConnectionError as error:
        reason = f"{socket.gethostname()} did not get through in {CONNECT_S:g} s ({error})"
    except dist.DistError as error:
        reason = str(error).partition("\n")[0].rstrip(".")  # a stack of C++ follows
    raise UserError(
        f"The {placed.world_size} processes of this run do not find each other at "
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {reason}. Every machine "
        "must reach this address: set MASTER_ADDR to one of rank 0's machine that they do, and "
        f"${GLOO} (and ${NCCL} with GPUs) to its network interface. Start all of them with "
        "torchrun or srun. If this is the only one, unset RANK, TORCHELASTIC_RUN_ID and "
        "SLURM_NTASKS."
    )


def _connect(placed: ExternalRanks) -> SharedStore:
    """Connect to the store in the process of rank 0."""
    # torchrun may have a store at this address. It only passes on the port of ours: torchrun's
    # answers nothing while Ctrl+Z has stopped torchrun, although the ranks continue.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = placed.rank == 0
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return _open_store(address, port, serves=serves)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # A prefix for each attempt: torchrun's store outlives it.
    agent = dist.PrefixStore(  # type: ignore[attr-defined]
        f"ftkit-{attempt}", _open_store(address, port, serves=False)
    )
    store = _open_store(address, 0 if serves else int(agent.get(PORT)), serves=serves)
    if serves:
        agent.set(PORT, str(store.port))
    return store


def _open_store(address: str, port: int, *, serves: bool) -> SharedStore:
    def tell(why: str) -> None:
        print_notice(f"waiting for rank 0 at {address}:{port} ({why})")

    if not serves and (why := reached_within(CONNECT_S, address, port, tell)) is not None:
        raise ConnectionError(why)
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=serves,
        timeout=timedelta(seconds=CONNECT_S),
        # `_meet` waits for the others by their keys, which lets signal handlers run.
        wait_for_workers=False,
    )


def _connected(placed: ExternalRanks, store: SharedStore) -> dict[str, str] | None:
    """Test the connections between machines; return variables with the interface to use.

    The first rank of each machine connects with rank 0's machine, and that with all others. None:
    a connection failed, and rank 0 reports it with a UserError.
    """
    of_machine = placed.local_world_size
    leaders = range(0, placed.world_size, of_machine)
    own = address_towards(store.host)
    if placed.rank in leaders:
        store.set(_address(placed.rank), own or "")
    # A route to itself leads over loopback: the address towards another machine counts.
    if own is not None and is_loopback(own):  # this is the machine of rank 0
        _wait_for(store, [_address(of_machine)], patience_s=PATIENCE_S)
        if store.check([_address(of_machine)]):
            own = address_towards(store.get(_address(of_machine)).decode())
    problem, interface = None, ""
    try:
        interface, address = chosen_interface(own)
        if placed.rank in leaders:
            with listening(interface, address) as endpoint:
                problem = _try(placed.rank, leaders, store, endpoint)
    except UserError as error:
        problem = str(error)
    problem = _agreed(placed, store, leaders, problem)
    if problem:
        if placed.rank == 0:
            raise UserError(problem)
        return None
    return {GLOO: interface} if interface and GLOO not in os.environ else {}


def _try(rank: int, leaders: range, store: SharedStore, endpoint: Endpoint) -> str | None:
    """Connect to rank 0, or as rank 0 to all others; return the problem, if any."""
    store.set(_endpoint(rank), json.dumps(dataclasses.asdict(endpoint)))
    others = leaders[1:] if rank == 0 else leaders[:1]
    problem = None
    for other in others:
        _wait_for(store, [_endpoint(other)], patience_s=PATIENCE_S)
        if problem is None and store.check([_endpoint(other)]):
            problem = problem_reaching(Endpoint(**json.loads(store.get(_endpoint(other)))))
    # The block that listens ends with this function: the others must have tried it by then.
    store.set(_tried(rank), "")
    _wait_for(store, [_tried(other) for other in others], patience_s=3 * PATIENCE_S)
    return problem


def _agreed(
    placed: ExternalRanks, store: SharedStore, leaders: range, problem: str | None
) -> str | None:
    """The first problem of any machine, on all ranks."""
    if placed.rank in leaders:
        store.set(_problem(placed.rank), problem or "")
    if placed.rank == 0:
        keys = [_problem(leader) for leader in leaders]
        _wait_for(store, keys, patience_s=6 * PATIENCE_S)
        found = [store.get(key).decode() for key in keys if store.check([key])]
        store.set(PROBLEM, next(filter(None, found), ""))
    _wait_for(store, [PROBLEM])
    found_by_all = store.get(PROBLEM).decode()
    store.set(_knows(placed.rank), "")
    if placed.rank == 0 and found_by_all:  # the store ends with this process
        everyone = [_knows(rank) for rank in range(placed.world_size)]
        _wait_for(store, everyone, patience_s=PATIENCE_S)
    return found_by_all or None


def _leave(rank: int, reason: str) -> None:
    """End this process and its rank at once: rank 0, which they wait for, is gone."""
    print_line(f"ftkit: rank {rank}: {reason}")
    # Without clean-up: threads of torch may wait for rank 0 for ever.
    os._exit(1)


def _follow(
    placed: ExternalRanks, store: SharedStore, recipe: Recipe, variables: Mapping[str, str]
) -> int:
    """Supervise a rank other than 0; rank 0 reports its errors."""
    try:
        # As long as rank 0 prepares the run, which may take minutes with a download.
        _wait_for(store, [JOB])
        job_file = store.get(JOB).decode()
    except dist.DistError:
        print_line("ftkit: rank 0 ended without an error message")
        return 1
    if not job_file:
        return UserError.exit_code
    if job_file == COMPLETE:
        return 0
    with Ranks(placed, variables) as ranks:
        try:
            with announced_job(
                placed, store, Path(job_file), ranks.received, token=recipe.access_token
            ) as job:
                ranks.run(job.directory, job.plan, recipe.data_token)
                code = _exit_code(job.directory.rank(placed.rank))
                # For the first rank of a host its relay does this, after the last upload.
                if placed.rank % placed.local_world_size:
                    store.set(over_key(placed.rank), "")
        except UserError:
            return UserError.exit_code
    if code and not _answers(store):
        print_line(
            f"ftkit: rank 0 at {store.host} was lost before the run was done. If torchrun does not "
            "start it again (its rendezvous store may have been there, too), start it with "
            "--resume auto."
        )
    return code


def _answers(store: SharedStore) -> bool:
    """Return whether the process of rank 0 is still there."""
    try:
        store.check([JOB])
    except dist.DistError:
        return False
    return True


def _wait_for_rank_0(store: SharedStore) -> None:
    """Wait until rank 0 has shown its error: torchrun kills it with the first failed process."""
    address = store.host, store.port  # which ends with it; torch would write a trace of that
    with suppress(OSError), socket.create_connection(address, timeout=PATIENCE_S) as line:
        line.recv(1)


def _machine(rank: int) -> str:
    return f"machine-{rank}"


def _address(rank: int) -> str:
    return f"address-{rank}"


def _endpoint(rank: int) -> str:
    return f"endpoint-{rank}"


def _tried(rank: int) -> str:
    return f"tried-{rank}"


def _problem(rank: int) -> str:
    return f"problem-{rank}"


def _knows(rank: int) -> str:
    return f"knows-{rank}"


def _wait_for_the_end(store: SharedStore, watched: Collection[int], ranks: Ranks) -> set[int]:
    """Wait until the others have ended, before the store does; return those that did not."""
    gone = ranks.gone[0] if ranks.gone is not None else None
    deadline_s = time.monotonic() + PATIENCE_S
    left = set(watched) - {gone}
    while left and time.monotonic() < deadline_s:
        left = {r for r in left if not (store.check([ended_key(r)]) or store.check([over_key(r)]))}
        time.sleep(POLL_S)
    return left


def _wait_for(store: SharedStore, keys: list[str], *, patience_s: float = float("inf")) -> None:
    """Wait for keys. Unlike the store's own wait, this lets signal handlers run."""
    deadline_s = time.monotonic() + patience_s
    while not all(store.check([key]) for key in keys) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def _exit_code(directory: RankDirectory) -> int:
    """The exit code that `ftkit` without a launcher has if this rank ended the run."""
    error = RankError.read(directory)
    if error is None:  # done, or killed before it could say anything
        report = directory.report
        return 0 if report.exists() and read_report(report).outcome in ENDED_WELL else 1
    by_signal = {number.name: code for number, (code, _) in EXIT_BY_SIGNAL.items()}
    codes = dict.fromkeys(("user", "damaged"), UserError.exit_code) | dict.fromkeys(
        FOR_MEMORY, EXIT_OUT_OF_MEMORY
    )
    codes |= by_signal
    return codes.get(error.message if error.kind == "interrupted" else error.kind, 1)
