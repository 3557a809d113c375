"""Rank processes: started together, watched, signalled, and never left behind."""

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
from ftkit.launch.environment import ExternalRanks
from ftkit.runs.directory import RankDirectory
from ftkit.runs.job import ErrorKind, Job, RankError
from ftkit.runs.report.report import ENDED_WELL, read_report
from ftkit.utils.console.terminal import fitted
from ftkit.utils.hardware import processes_killed_for_memory
from ftkit.utils.process import handling, print_line

KILLED_FOR_MEMORY = "the kernel killed the training process, because host memory ran out"

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
MATMUL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""How many products of 16-bit matrices torch and oneDNN keep ready on a CPU, each for one shape."""
KEPT_MATMULS = 64
"""More than a micro-batch has shapes. Of the 1,024 that are kept otherwise, each micro-batch of
another number of tokens adds some: a model of 34 million parameters held 2.1 GiB after 40 steps,
and 0.7 GiB so, at no loss of time."""
"""Where torch's allocator finds its settings. Sequences of ever other lengths fragment its memory,
unless segments can grow; blocks are then also split to 512 B, as predictions count them."""

GRACE_S = 5.0
"""How long the other ranks may go on once one has failed; without it they wait in a collective
for minutes."""

COMPLETING_S = 60.0
"""How much longer rank 0 may take for that: it predicts the memory of what it has run."""
POLL_S = 0.05


class StoppedEarly(UserError):
    """A signal came while the run was prepared; everything is as it was."""

    def __init__(self, number: signal.Signals) -> None:
        self.exit_code, name = EXIT_BY_SIGNAL[number]
        super().__init__(f"stopped by {name} before the run began; nothing has changed")


class GoneEarly(UserError):
    """Another machine was gone while the run was prepared; everything is as it was."""

    exit_code = 1


class Ranks:
    """Runs the ranks, and passes signals on to them.

    The first signal asks them to end gracefully, the second one kills them. Before they are started
    it raises `StoppedEarly`. Each has a process
    group of its own, so that Ctrl+C and Ctrl+Z reach only this process. A signal that is ignored
    stays so, as `nohup` wants it.

    Under torchrun or SLURM every process of theirs runs one rank in this way. They send a signal
    more than once and kill by themselves what takes too long, so there the second does nothing.
    """

    def __init__(
        self, placed: ExternalRanks | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Prepare.

        Args:
            placed: this process, if torchrun or SLURM has started it.
            variables: of the environment of its rank, besides theirs.
        """
        self.received: list[signal.Signals] = []
        self._placed, self._variables = placed, dict(variables or {})
        self._started = False
        self._killing = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.gone: tuple[int, str] | None = None
        """A rank whose supervisor elsewhere is gone, and what to say of it."""
        self._killed_before: int | None = None
        self._directories: list[RankDirectory] = []
        """Of every rank, also of those that run elsewhere."""
        self._handlers = ExitStack()

    def __enter__(self) -> "Ranks":
        handlers = dict.fromkeys(EXIT_BY_SIGNAL, self._stop) | {signal.SIGTSTP: self._pause}
        self._handlers.enter_context(handling(handlers))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    def run(self, job: Job) -> None:
        """Run all ranks to their end, whatever happens here.

        How a rank failed is in its `error` afterwards, also if it could not say it itself.
        """
        self._killed_before = processes_killed_for_memory()
        world_size = job.plan.world_size
        self._directories = [job.directory.rank(rank) for rank in range(world_size)]
        self._started = True
        self._note_gone()
        with ExitStack() as stack:
            if self._placed is None:
                port = stack.enter_context(_free_port())
                placements = {rank: _placement(job, rank, port) for rank in range(world_size)}
            else:  # torchrun's variables are there, and the supervisors' store
                placement = {"TORCHELASTIC_USE_AGENT_STORE": "True"} | self._variables
                placements = {self._placed.rank: placement | self._placed.placement(job.plan)}
            stack.callback(self._end)
            for rank, placement in placements.items():
                self._processes[rank] = _start(job, rank, placement)
            if self.received:
                self._kill()
            self._watch()

    def end_without(self, rank: int, reason: str) -> None:
        """End the run because the supervisor of another rank is gone; called in any thread.

        Args:
            rank: the other rank.
            reason: what the report says of it; before the ranks are started `GoneEarly` says it.
        """
        self.gone = rank, reason
        if self._started:
            self._note_gone()
        else:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGTERM)

    def _watch(self) -> None:
        """Wait for all ranks; once one has failed, the others have little time left."""
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
        for rank, process in self._processes.items():
            if process.poll() and not self._killing and not self._has_spoken(rank):
                if process.returncode == -signal.SIGKILL and self._memory_ran_out():
                    self._note(rank, "died_for_memory", KILLED_FOR_MEMORY)
                    continue
                how = describe_exit(process.returncode, self._directories[rank].output)
                self._note(rank, "died_for_memory" if device_line(how) else "died", how)

    def _note_gone(self) -> None:
        if self.gone is not None:
            rank, reason = self.gone
            with suppress(OSError):
                self._directories[rank].path.mkdir(exist_ok=True)  # it may not have come that far
            if not self._has_spoken(rank):
                self._note(rank, "died", reason)

    def _memory_ran_out(self) -> bool:
        """Whether the kernel has killed a process for memory since the ranks were started."""
        now = processes_killed_for_memory()
        return now is not None and now > (self._killed_before or 0)

    def _has_spoken(self, rank: int) -> bool:
        """Whether it has said how it ended; what goes wrong after that is noise."""
        directory = self._directories[rank]
        report = directory.report
        completed = report.exists() and read_report(report).outcome in ENDED_WELL
        return completed or directory.error.exists()

    def _note(self, rank: int, kind: ErrorKind, message: str) -> None:
        error = RankError(kind=kind, message=message, happened_at_s=time.time())
        with suppress(OSError):  # then the report says that it ended without a word
            error.write(self._directories[rank])

    def _pause(self, _: int, __: FrameType | None) -> None:
        """Ctrl+Z: stand still with the ranks and their workers until `fg` or `bg`."""
        self._signal_groups(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_groups(signal.SIGCONT)

    def _signal_groups(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _stop(self, number: int, _: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if not self._started:
            if len(self.received) > 1:
                return  # it is being put back
            if self.gone is not None:
                rank, reason = self.gone
                raise GoneEarly(f"rank {rank}: {reason}; nothing has changed")
            raise StoppedEarly(self.received[0])
        if not any(process.poll() is None for process in self._processes.values()):
            return
        first = len(self.received) == 1
        if first and all(self._directories[r].report.exists() for r in self._processes):
            for process in self._processes.values():
                process.send_signal(signal.SIGINT)  # Lightning has ways of its own with SIGTERM
            text = "stopping after the current step"
            if self._placed is None:
                text += " (Ctrl+C again stops at once)"
        elif first or self._placed is None:  # nothing to lose yet, or asked before
            self._kill()
            text = "stopping"
        else:
            return
        if self._placed is None or self._placed.rank == 0:
            with suppress(OSError):  # the terminal may be gone
                print_line(fitted(f"\nftkit: {text}", sys.stderr))

    def _kill(self) -> None:
        self._killing = True
        for rank, process in self._processes.items():
            if process.poll() is None:
                if self.received and not self._has_spoken(rank):  # what others say now is noise
                    self._note(rank, "interrupted", self.received[0].name)
                process.kill()

    def _kill_but_completing(self) -> None:
        """Kill the ranks that have nothing to add."""
        self._killing = True
        for rank, process in self._processes.items():
            if process.poll() is None and not self._directories[rank].completing.exists():
                process.kill()

    def _end(self) -> None:
        self._kill()
        for process in self._processes.values():
            process.wait()


def rank_environment(job: Job, placement: dict[str, str]) -> dict[str, str]:
    """The environment variables of a rank: this process's, and what the job needs besides."""
    plan = job.plan
    environment = os.environ | placement | plan.rules.environment(plan.accelerator)
    if job.recipe.access_token:
        environment["HF_TOKEN"] = job.recipe.access_token
    if plan.kind.grows_segments and not environment.keys() & ALLOCATOR_SETTINGS:
        environment[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
    if plan.accelerator == "cpu":
        for name in MATMUL_CACHES:
            environment.setdefault(name, str(KEPT_MATMULS))
    return environment


def _start(job: Job, rank: int, placement: dict[str, str]) -> subprocess.Popen[bytes]:
    """A rank as a process, with its output in its log, also what compiled code prints."""
    directory = job.directory.rank(rank)
    directory.path.mkdir(exist_ok=True)
    environment = rank_environment(job, placement)
    terminal = os.dup(1)
    # -P: modules in the current directory are the user's, not ours
    command = [sys.executable, "-P", "-m", "ftkit.training.rank"]
    command += [str(job.directory.job), str(os.getpid()), str(terminal)]
    try:
        with directory.output.open("ab") as log:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[terminal],
                process_group=0,
            )
    finally:
        os.close(terminal)


def _placement(job: Job, rank: int, port: int) -> dict[str, str]:
    """Torchrun's variables, as Lightning and torch.distributed read them."""
    plan = job.plan
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
        placement["OMP_NUM_THREADS"] = str(max(1, cores // plan.devices))
    return placement


@contextmanager
def _free_port() -> Iterator[int]:
    """A port for rank 0 to listen on, which the system gives to nobody else meanwhile.

    Two sockets that both allow it share a port until one of them listens.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def describe_exit(code: int, log: Path) -> str:
    """How a rank ended that could not say it itself, but perhaps in the log of its output."""
    if code >= 0:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        return f"the training process ended with exit code {code}; its last line: {last}"
    name = signal.Signals(-code).name
    hint = "; the kernel does this when host memory runs out" if name == "SIGKILL" else ""
    return f"the training process was killed by {name}{hint}"
