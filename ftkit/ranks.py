"""The ranks of a run as child processes: started together, watched, and never left behind."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ftkit.job import Job
from ftkit.recipe import Recipe
from ftkit.report.report import FILE_NAME

STATE = ".run"
"""Directory inside out_dir with what the ranks and the supervisor tell each other."""

EXIT_BY_SIGNAL = {
    signal.SIGINT: (130, "Ctrl+C"),
    signal.SIGTERM: (143, "SIGTERM"),
    signal.SIGHUP: (129, "SIGHUP"),
}

GRACE_S = 5.0
"""How long the other ranks may go on once one has failed; without it they wait in a collective
for minutes."""
POLL_S = 0.05


def rank_directory(state: Path, rank: int) -> Path:
    """Where a rank leaves its report and its error."""
    return state / f"rank-{rank}"


@dataclass(frozen=True, kw_only=True)
class ExternalRanks:
    """Ranks that torchrun or SLURM has started; this process is one of them."""

    rank: int
    """This process among all."""
    world_size: int
    """Ranks in all."""
    local_world_size: int
    """Ranks on this machine."""

    def applied_to(self, recipe: Recipe) -> Recipe:
        """The recipe with the devices and machines that there are."""
        return dataclasses.replace(
            recipe,
            devices=self.local_world_size,
            num_nodes=self.world_size // self.local_world_size,
        )


def external_ranks() -> ExternalRanks | None:
    """Who started this process: torchrun or SLURM (several tasks), or None.

    SLURM's variables are translated into torchrun's, which everything else reads.
    """
    variables = os.environ
    if "TORCHELASTIC_RUN_ID" not in variables:
        if int(variables.get("SLURM_NTASKS", "1")) < 2 or "SLURM_PROCID" not in variables:
            return None
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

        slurm = SLURMEnvironment()
        nodes = int(variables.get("SLURM_NNODES", "1"))
        variables.update(
            RANK=str(slurm.global_rank()),
            LOCAL_RANK=str(slurm.local_rank()),
            WORLD_SIZE=str(slurm.world_size()),
            LOCAL_WORLD_SIZE=str(slurm.world_size() // nodes),
            GROUP_RANK=str(slurm.node_rank()),
            MASTER_ADDR=slurm.main_address,
            MASTER_PORT=str(slurm.main_port),
        )
    return ExternalRanks(
        rank=int(variables["RANK"]),
        world_size=int(variables["WORLD_SIZE"]),
        local_world_size=int(variables["LOCAL_WORLD_SIZE"]),
    )


class Ranks:
    """Runs the ranks, and passes signals on to them.

    The first signal asks them to end gracefully, the second one kills them. Each has a process
    group of its own, so that Ctrl+C and Ctrl+Z reach only this process. A signal that is ignored
    stays so, as `nohup` wants it.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.died: dict[int, int] = {}
        """Exit codes of the ranks that failed by themselves, in the order they were noticed."""
        self._killing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ready: list[Path] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Ranks":
        handlers = dict.fromkeys(EXIT_BY_SIGNAL, self._stop) | {signal.SIGTSTP: self._pause}
        for number, handler in handlers.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, job: Job, state: Path) -> None:
        """Run all ranks to their end, whatever happens here."""
        world_size = job.plan.world_size
        self._ready = [rank_directory(state, rank) / FILE_NAME for rank in range(world_size)]
        port = _free_port()
        try:
            for rank in range(world_size):
                self._processes.append(
                    subprocess.Popen(
                        # -P: modules in the current directory are the user's, not ours
                        [sys.executable, "-P", "-m", "ftkit.train", str(state / "job.json")],
                        env=_environment(job, rank, port),
                        stdin=subprocess.DEVNULL,
                        process_group=0,
                    )
                )
            if self.received:
                self._kill()
            self._watch()
        finally:
            self._kill()
            for process in self._processes:
                process.wait()

    def _watch(self) -> None:
        """Wait for all ranks; once one has failed, the others have little time left."""
        deadline_s = None
        while any(process.poll() is None for process in self._processes):
            self._note_deaths()
            if self.died and deadline_s is None:
                deadline_s = time.monotonic() + GRACE_S
            if deadline_s is not None and time.monotonic() > deadline_s:
                return
            time.sleep(POLL_S)
        self._note_deaths()

    def _note_deaths(self) -> None:
        for rank, process in enumerate(self._processes):
            if process.poll() and not self._killing:
                self.died.setdefault(rank, process.returncode)

    def _pause(self, _: int, __: FrameType | None) -> None:
        """Ctrl+Z: stand still with the ranks and their workers until `fg` or `bg`."""
        self._signal_groups(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_groups(signal.SIGCONT)

    def _signal_groups(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _stop(self, number: int, _: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if not any(process.poll() is None for process in self._processes):
            return
        if len(self.received) == 1 and all(path.exists() for path in self._ready):
            for process in self._processes:
                process.send_signal(signal.SIGINT)  # Lightning has ways of its own with SIGTERM
            text = "stopping after the current step (Ctrl+C again stops at once)"
        else:  # they have nothing to lose yet, or were asked before
            self._kill()
            text = "stopping"
        with suppress(OSError):  # the terminal may be gone
            print(f"\nftkit: {text}", file=sys.stderr, flush=True)

    def _kill(self) -> None:
        self._killing = True
        for process in self._processes:
            if process.poll() is None:
                process.kill()


def _environment(job: Job, rank: int, port: int) -> dict[str, str]:
    """Torchrun's variables, as Lightning and torch.distributed read them."""
    plan = job.plan
    environment = dict(os.environ)
    if job.recipe.access_token:
        environment["HF_TOKEN"] = job.recipe.access_token
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(plan.devices),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if plan.world_size > 1:
        cores = len(os.sched_getaffinity(0))
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // plan.devices)))
    if plan.strategy == "deepspeed" and plan.accelerator == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    return environment


def _free_port() -> int:
    """A port that nobody listens on; the system does not give it out again soon."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def describe_exit(code: int) -> str:
    """How a rank ended that could not say it itself."""
    if code >= 0:
        return f"the training process ended with exit code {code}; see run.log"
    name = signal.Signals(-code).name
    hint = "; the kernel does this when host memory runs out" if name == "SIGKILL" else ""
    return f"the training process was killed by {name}{hint}"


def first_killed(died: dict[int, int]) -> int | None:
    """The rank that was killed from outside: what the others say then is noise."""
    return next((rank for rank, code in died.items() if code < 0), None)
