"""Runs of the command as processes, watched from outside."""

import csv
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import warm
from command import DEFAULT_SIGNALS, NOHUP, command_environment, command_line  # noqa: F401 - for tests

from ftkit.recipe.plugin import using
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import Job, RankError
from ftkit.runs.report.report import read_report

TIMEOUT_S = 120
"""A process that has not ended by then never would: collectives wait for half an hour."""
FILES = [
    "checkpoints",
    "final",
    "metrics.csv",
    "recipe.yaml",
    "report.json",
    "run.log",
    "system.csv",
    "validation.csv",
]
"""What a run that completes leaves in its directory."""

Process = subprocess.Popen[str] | warm.Process


class Run:
    """A run of `ftkit finetune`, under way."""

    def __init__(self, out_dir: Path, process: Process) -> None:
        self.out_dir, self.process = out_dir, process
        self.state = RunDirectory(out_dir).state
        self.report = RunDirectory(out_dir).rank(0).report

    def end(self) -> tuple[int, str, str]:
        """Wait for the end: exit code, stdout, stderr; nothing may be running then."""
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        wait_for(lambda: not self.processes())
        return self.process.returncode, out, err  # type: ignore[return-value]

    def processes(self) -> list[psutil.Process]:
        """Every process of this run: they all have its directory on their command line."""
        found = []
        for process in psutil.process_iter():
            try:
                known = str(self.out_dir) in process.cmdline()
                known = known or str(self.state / "job.json") in process.cmdline()
                if known and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def rank(self) -> psutil.Process:
        """The training process."""
        (rank,) = self.ranks()
        return rank

    def ranks(self) -> list[psutil.Process]:
        """The training processes by their rank."""
        ranks = psutil.Process(self.process.pid).children()
        return sorted(ranks, key=lambda rank: int(rank.environ()["RANK"]))

    def knows_ranks(self) -> bool:
        """Return whether each training process says which rank it is: not before its exec."""
        children = psutil.Process(self.process.pid).children()
        return all("RANK" in child.environ() for child in children)

    def wait_for_rank(self) -> psutil.Process:
        def started() -> bool:
            return self.state.exists() and len(self.processes()) == 2 and self.knows_ranks()

        self.wait_for(started)
        return self.rank()

    def wait_for_steps(self, count: int) -> None:
        self.wait_for(lambda: len(rows(self.out_dir)) >= count)

    def wait_for_training(self) -> None:
        """Until the first step has begun."""
        report = self.report
        self.wait_for(lambda: report.exists() and read_report(report).phase == "training")

    def wait_for(self, condition: Callable[[], bool]) -> None:
        def met() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return condition()

        wait_for(met)

    def kill(self) -> None:
        for process in self.processes():
            process.kill()
        self.process.kill()
        self.process.communicate()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def rows(out_dir: Path) -> list[dict[str, str]]:
    try:
        text = (out_dir / "metrics.csv").read_text()
    except FileNotFoundError:
        return []
    return list(csv.DictReader(text.splitlines()))


def losses(out_dir: Path) -> list[float]:
    """Loss of each step, from metrics.csv."""
    return [float(row["loss"]) for row in rows(out_dir)]


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*") if f.is_file()
    }


def options(**keys: object) -> list[str]:
    return [word for k, v in keys.items() for word in (f"--{k.replace('__', '.')}", str(v))]


def command_of(
    out_dir: Path, common: Sequence[str], /, *switches: str, **keys: object
) -> list[str]:
    """Words after `ftkit` that start a run."""
    command = str(keys.pop("command", "finetune"))
    return [command, *common, "--out_dir", str(out_dir), *options(**keys), *switches]


def start(
    command: Sequence[str], cwd: Path, environment: dict[str, str], cold: bool = False
) -> Process:
    """Start a command of Python in a process group of its own.

    Args:
        command: `sys.executable` and what follows.
        cwd: where it works.
        environment: all of it.
        cold: whether it is an interpreter of its own; see warm.py.
    """
    if not cold:
        return warm.SERVER.start(command, environment, cwd=cwd)
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment,
        process_group=0,
    )


@contextmanager
def watched(
    out_dir: Path,
    command: Sequence[str],
    cwd: Path,
    environment: dict[str, str],
    *,
    cold: bool = False,
) -> Iterator[Run]:
    """Start a command in a process group of its own; it does not outlive the block.

    Args:
        out_dir: of its run.
        command: one of Python.
        cwd: where it works.
        environment: all of it.
        cold: whether it is an interpreter of its own; see warm.py.
    """
    process = start(command, cwd, environment, cold)
    run = Run(out_dir, process)
    try:
        yield run
    finally:
        run.kill()


FOREVER: dict[str, Any] = {
    "train__epochs": "null",
    "train__max_steps": 1_000_000,
    "eval__interval": 0,
    "data__num_workers": 1,
}
ENDLESS_STEP = FOREVER | {"train__max_steps": 2, "train__global_batch_size": 200_000}


def losses_of_one(directory: Path, common: list[str], **keys: object) -> list[float]:
    """The losses of a run on one device with some keys, in a directory for it."""
    out_dir = directory / "out"
    line = command_line(*command_of(out_dir, common, **keys))
    with watched(out_dir, line, directory, command_environment()) as run:
        code, out, err = run.end()
    assert code == 0, out + err
    return losses(out_dir)


def run_ranks(world_size: int, jobs: list[Path], script: str = "rank_cases.py") -> None:
    """Run the jobs in that many processes; the test fails with the first error of a rank.

    The processes are spread over as many nodes, in name only, as the first job says.
    """
    first = Job.read(jobs[0])
    with using(first.plugin):
        of_node = first.plan.devices
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    logs = [jobs[0].with_name(f"rank-{rank}.log") for rank in range(world_size)]
    for rank in range(world_size):
        environment = command_environment() | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % of_node),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(of_node),
            "GROUP_RANK": str(rank // of_node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }
        command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, jobs)]
        with logs[rank].open("w") as log:
            processes.append(warm.SERVER.start(command, environment, log=log))
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                time.sleep(2)
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, process in enumerate(processes):
        for job in jobs:
            # Without reading its recipe, which takes longer than all the rest here.
            error = RankError.read(RunDirectory(job.parent.parent).rank(rank))
            assert error is None, f"rank {rank} of {job}: {error}"
        assert process.returncode == 0, logs[rank].read_text()


WITHOUT_EVALUATION = {
    "eval__interval": 0,
    "eval__initial_validation": False,
    "eval__final_validation": False,
    "eval__max_new_tokens": 0,
    "eval__exact_match": 0,
}
