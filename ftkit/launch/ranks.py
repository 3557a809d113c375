"""Rank processes: started together, supervised, signalled, and never left behind."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from ftkit.errors import EXIT_BY_SIGNAL, UserError, device_line
from ftkit.recipe.plan import Plan
from ftkit.runs.directory import RankDirectory, RunDirectory
from ftkit.runs.job import ErrorKind, RankError
from ftkit.runs.launchers import ExternalRanks
from ftkit.runs.report.report import ENDED_WELL, read_report
from ftkit.utils.accelerators.backends import backend_environment
from ftkit.utils.console.terminal import fitted
from ftkit.utils.hardware import processes_killed_for_memory
from ftkit.utils.process import handling, kill_group, own_program, print_line

KILLED_FOR_MEMORY = "the kernel killed the training process, because host memory ran out"

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the settings of torch's allocator."""
MATMUL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""Sizes of the caches of torch and oneDNN for 16-bit matrix products on a CPU, one per shape."""
# More than the shapes of a micro-batch. With the default of 1,024, each micro-batch of another
# length adds some: a model of 34 million parameters held 2.1 GiB after 40 steps, and 0.7 GiB with
# 64, in the same time.
KEPT_MATMULS = 64

GRACE_S = 5.0
"""Seconds that the other ranks may continue once one has failed; they would wait in a collective
for minutes."""

COMPLETING_S = 60.0
"""Further seconds that rank 0 may take to complete its report, for which it predicts memory."""
POLL_S = 0.05


class StoppedEarly(UserError):
    """A signal came during the preparation of the run; everything is as it was."""

    def __init__(self, number: signal.Signals) -> None:
        self.exit_code, name = EXIT_BY_SIGNAL[number]
        super().__init__(f"stopped by {name} before the run began; nothing has changed")


class GoneEarly(UserError):
    """Another machine was lost during the preparation of the run; everything is as it was."""

    exit_code = 1


class Ranks:
    """Runs the ranks, and passes signals on to them.

    The first signal makes them stop after the current step, the second one kills them. Before they
    are started it raises `StoppedEarly`. A signal that is ignored stays so, for `nohup`.

    Each rank has a process group of its own, so that Ctrl+C and Ctrl+Z reach only this process.
    Under torchrun or SLURM each process runs one rank. They send a signal more than once, and kill
    what takes too long themselves; so there the second signal does nothing.
    """

    def __init__(
        self, placed: ExternalRanks | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Start nothing yet; see `run`.

        Args:
            placed: this process, if torchrun or SLURM has started it.
            variables: of the environment of its rank, besides theirs.
        """
        self.received: list[signal.Signals] = []
        self._arrivals = itertools.count(1)
        self._placed, self._variables = placed, dict(variables or {})
        self._started = False
        self._killing = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.gone: tuple[int, str] | None = None
        """A rank on another machine whose supervisor is gone, and a message about it."""
        self._killed_before: int | None = None
        self._directories: list[RankDirectory] = []
        """Directories of all ranks, also of those on other machines."""
        self._handlers = ExitStack()

    def __enter__(self) -> "Ranks":
        handlers = dict.fromkeys(EXIT_BY_SIGNAL, self._stop) | {signal.SIGTSTP: self._pause}
        self._handlers.enter_context(handling(handlers))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    def run(self, run: RunDirectory, plan: Plan, token: str | None) -> None:
        """Run all ranks to their end, whatever happens here.

        How a rank failed is in its `error` afterwards, also if the rank could not write it.

        Args:
            run: its directory, with the job file.
            plan: of the job.
            token: of the hub, with which data are read; it is in no file.
        """
        # The kernel counts all such kills since it started: those before this run are not its own.
        self._killed_before = processes_killed_for_memory()
        self._directories = [run.rank(rank) for rank in range(plan.world_size)]
        self._started = True
        # A machine may have been lost after the preparation ended, and before this flag was set.
        self._note_gone()
        with ExitStack() as stack:
            if self._placed is None:
                port = stack.enter_context(_free_port())
                placements = {rank: _placement(plan, rank, port) for rank in range(plan.world_size)}
            else:  # torchrun's variables are there, and the supervisors' store
                placement = {"TORCHELASTIC_USE_AGENT_STORE": "True"} | self._variables
                placements = {self._placed.rank: placement | self._placed.placement(plan)}
            # Before the first start: if a later one fails, the ranks that run are killed.
            stack.callback(self._end)
            for rank, placement in placements.items():
                environment = rank_environment(plan, token, placement)
                self._processes[rank] = _start(run, rank, environment)
            # A signal may have come before there was a rank to pass it on to.
            if self.received:
                self._kill()
            self._watch()

    def end_without(self, rank: int, reason: str) -> None:
        """End the run because the supervisor of another rank is gone; called in any thread.

        Args:
            rank: the other rank.
            reason: message for the report, or for `GoneEarly` before the ranks are started.
        """
        self.gone = rank, reason
        if self._started:
            self._note_gone()
        else:
            main = threading.main_thread().ident
            assert main is not None
            # The main thread may be waiting in a system call: a signal wakes it, and its handler
            # raises.
            signal.pthread_kill(main, signal.SIGTERM)

    def _watch(self) -> None:
        """Wait for all ranks; after a failure the others have little time left."""
        deadline_s = None
        while any(process.poll() is None for process in self._processes.values()):
            self._note_deaths()
            # A rank with an error may never end: it waits for the others, and they for it.
            if deadline_s is None and any(d.error.exists() for d in self._directories):
                deadline_s = time.monotonic() + GRACE_S
            if deadline_s is not None and time.monotonic() > deadline_s:
                self._kill_but_completing()
                if time.monotonic() > deadline_s + COMPLETING_S:
                    return
            time.sleep(POLL_S)
        self._note_deaths()

    def _note_deaths(self) -> None:
        # A process that this supervisor killed is not the cause of the end.
        for rank, process in self._processes.items():
            if process.poll() and not self._killing and not self._has_reported(rank):
                # The signal alone does not say who sent it: the kernel's count of such kills does.
                if process.returncode == -signal.SIGKILL and self._memory_ran_out():
                    self._note(rank, "died_for_memory", KILLED_FOR_MEMORY)
                    continue
                how = describe_exit(process.returncode, self._directories[rank].output)
                self._note(rank, "died_for_memory" if device_line(how) else "died", how)

    def _note_gone(self) -> None:
        if self.gone is not None:
            rank, reason = self.gone
            with suppress(OSError):
                self._directories[rank].path.mkdir(exist_ok=True)  # not there yet, perhaps
            if not self._has_reported(rank):
                self._note(rank, "died", reason)

    def _memory_ran_out(self) -> bool:
        """Return whether the kernel has killed a process for memory since the start."""
        now = processes_killed_for_memory()
        return now is not None and now > (self._killed_before or 0)

    def _has_reported(self, rank: int) -> bool:
        """Return whether a rank has reported how it ended; later errors are consequences."""
        directory = self._directories[rank]
        report = directory.report
        completed = report.exists() and read_report(report).outcome in ENDED_WELL
        return completed or directory.error.exists()

    def _note(self, rank: int, kind: ErrorKind, message: str) -> None:
        error = RankError(kind=kind, message=message, happened_at_s=time.time())
        with suppress(OSError):  # then the report has no cause
            error.write(self._directories[rank])

    def _pause(self, _: int, __: FrameType | None) -> None:
        """Ctrl+Z: suspend the ranks and their workers, too, until `fg` or `bg`."""
        # SIGSTOP, which no library can handle; ranks have groups of their own, which the terminal
        # does not stop.
        self._signal_groups(signal.SIGSTOP)
        # This call returns when the shell continues this process.
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_groups(signal.SIGCONT)

    def _signal_groups(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _stop(self, number: int, _: FrameType | None) -> None:
        # A second signal may interrupt this handler anywhere, but not inside this call: exactly one
        # of the two is the first.
        arrival = next(self._arrivals)
        self.received.append(signal.Signals(number))
        if not self._started:
            if arrival > 1:
                return  # the first one is already putting everything back
            if self.gone is not None:
                rank, reason = self.gone
                raise GoneEarly(f"rank {rank}: {reason}; nothing has changed")
            raise StoppedEarly(self.received[0])
        if not any(process.poll() is None for process in self._processes.values()):
            return
        first = arrival == 1
        # A rank installs its signal handlers before it writes its first report: it can stop and
        # save.
        if first and all(self._directories[r].report.exists() for r in self._processes):
            for process in self._processes.values():
                process.send_signal(signal.SIGINT)  # Lightning handles SIGTERM itself
            text = "stopping after the current step"
            if self._placed is None:
                text += " (Ctrl+C again stops at once)"
        elif first or self._placed is None:  # nothing to lose yet, or the second signal
            self._kill()
            text = "stopping"
        else:
            return
        if self._placed is None or self._placed.rank == 0:
            print_line(fitted(f"\nftkit: {text}", sys.stderr))

    def _kill(self) -> None:
        self._killing = True
        for rank, process in self._processes.items():
            if process.poll() is None:
                if self.received and not self._has_reported(rank):  # later errors are consequences
                    self._note(rank, "interrupted", self.received[0].name)
                kill_group(process)  # with its workers and compilers

    def _kill_but_completing(self) -> None:
        """Kill the ranks except one that is completing its report."""
        self._killing = True
        for rank, process in self._processes.items():
            if process.poll() is None and not self._directories[rank].completing.exists():
                kill_group(process)

    def _end(self) -> None:
        self._kill()
        for process in self._processes.values():
            process.wait()


def rank_environment(plan: Plan, token: str | None, placement: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a rank: those of this process, and what the plan needs."""
    environment = os.environ | placement | plan.rules.environment(plan.accelerator)
    environment |= backend_environment(plan.kind)
    if token:
        # Not in the job file, which stays on the disk if the run is killed.
        environment["HF_TOKEN"] = token
    # Sequences of ever new lengths fragment memory, unless segments can grow. Blocks are then also
    # split to 512 B, as predictions count them.
    if plan.kind.grows_segments and not environment.keys() & ALLOCATOR_SETTINGS:
        environment[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
    if plan.accelerator == "cpu":
        for name in MATMUL_CACHES:
            environment.setdefault(name, str(KEPT_MATMULS))
    return environment


def _start(run: RunDirectory, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a rank as a process; its output, also of compiled code, goes to its log."""
    directory = run.rank(rank)
    directory.path.mkdir(exist_ok=True)
    # Rank 0 draws on the terminal itself; its standard output is a log.
    terminal = os.dup(1)
    command = [*own_program("ftkit.training.rank"), str(run.job), str(terminal)]
    try:
        with directory.output.open("ab") as log:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[terminal],
                # Ctrl+C and Ctrl+Z of the terminal reach only the supervisor, which passes them on.
                process_group=0,
            )
    finally:
        os.close(terminal)


def _placement(plan: Plan, rank: int, port: int) -> dict[str, str]:
    """Torchrun's variables, as Lightning and torch.distributed read them."""
    placement = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(plan.devices),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if plan.world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        # Otherwise every rank starts a thread for each core.
        placement["OMP_NUM_THREADS"] = str(max(1, cores // plan.devices))
    return placement


@contextmanager
def _free_port() -> Iterator[int]:
    """A port for rank 0 to listen on, which no other process gets inside the block."""
    # Two sockets with SO_REUSEADDR share a port until one of them listens.
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Held until rank 0 listens: another process could take a port that was only looked up.
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def describe_exit(code: int, log: Path) -> str:
    """Describe the end of a rank that left no error, by its exit code and its output."""
    if code >= 0:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        return f"the training process ended with exit code {code}; its last line: {last}"
    name = signal.Signals(-code).name
    hint = "; the kernel does this when host memory runs out" if name == "SIGKILL" else ""
    return f"the training process was killed by {name}{hint}"
