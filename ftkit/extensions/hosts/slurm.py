"""Ranks that srun has started, and requeueing of SLURM jobs out of time."""

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from ftkit.errors import EXIT_BY_SIGNAL, UserError
from ftkit.extensions.hosts import elastic
from ftkit.runs.launchers import ExternalRanks, number_in, require_known_launcher
from ftkit.utils.json_values import without_tokens
from ftkit.utils.process import print_line
from ftkit.utils.progress import print_notice

NEAR_THE_LIMIT = signal.SIGUSR1
"""Sent by `sbatch --signal=USR1@180`, so many seconds before the end of the job's time."""
# Seconds; a busy SLURM controller takes a while to answer.
_PATIENCE_S = 60.0


def ranks(command: Sequence[str]) -> ExternalRanks | None:
    """Return the ranks that srun started, this process among them; None: it started none.

    SLURM's variables are translated into torchrun's, which everything else reads.

    Raises:
        UserError: several tasks were started in a way in which they cannot train together.
    """
    step = _SlurmStep.of_this_process()
    if step is None:
        return None
    require_known_launcher(step.tasks, command)
    os.environ.update(step.ranks_variables(command))
    return elastic.ranks(command)


# Ids of steps that srun has not started, of batch scripts and interactive shells, are above it:
# see slurm.h.
_MOST_STEPS = 0xFFFFFF00
_FIRST_PORT, _PORTS = 15_000, 10_000


@dataclass(frozen=True, kw_only=True)
class _SlurmStep:
    """A step of several tasks; this process is one of them."""

    tasks: int
    rank: int

    @classmethod
    def of_this_process(cls) -> "_SlurmStep | None":
        """The step; None: this process is not one of several tasks."""
        variables = os.environ
        tasks = number_in("SLURM_STEP_NUM_TASKS") or number_in("SLURM_NTASKS")
        # A step of one task is a run like any other on this machine, and so is one from a shell
        # of salloc, which is not a task.
        if tasks < 2 or "SLURM_PROCID" not in variables:
            return None
        rank = number_in("SLURM_PROCID")
        if rank == 0 and number_in("SLURM_TASK_PID") != os.getpid() and _is_in_shell():
            return None
        return cls(tasks=tasks, rank=rank)

    def ranks_variables(self, command: Sequence[str]) -> dict[str, str]:
        """Torchrun's variables for this task.

        Raises:
            UserError: there is only this process, or the tasks lie otherwise than ranks do.
        """
        line = shlex.join(without_tokens(command))
        if self.rank == 0 and not _is_in_step():
            raise UserError(
                f"SLURM_NTASKS is {self.tasks}, but the batch script starts ftkit once, without "
                f"srun. Try srun {line}. To train with one process of SLURM, request it: "
                "#SBATCH --ntasks=1, or SLURM_NTASKS=1 before the command."
            )
        local_tasks = self._local_tasks(line)
        node, local_rank = number_in("SLURM_NODEID"), number_in("SLURM_LOCALID")
        here = [int(task) for task in os.environ.get("SLURM_GTIDS", "").split(",") if task]
        # Ranks of a node follow each other.
        if self.rank != node * local_tasks + local_rank or (
            here and max(here) - min(here) >= local_tasks
        ):
            raise UserError(
                f"SLURM has placed task {self.rank} as task {local_rank} of node {node}, but "
                f"tasks of a node must follow each other. Try srun --distribution=block {line}."
            )
        step = number_in("SLURM_STEP_ID")
        # Steps of a job may share a node, so each has a port of its own.
        port = _FIRST_PORT + (number_in("SLURM_JOB_ID") + 101 * step) % _PORTS
        # The name of a node need not be known to itself.
        alone = local_tasks == self.tasks
        address = "127.0.0.1" if alone else _first_host(_text("NODELIST", "JOB_NODELIST"))
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.tasks),
            "LOCAL_WORLD_SIZE": str(local_tasks),
            "GROUP_RANK": str(node),
            "MASTER_ADDR": os.environ.get("MASTER_ADDR") or address,
            "MASTER_PORT": os.environ.get("MASTER_PORT") or str(port),
        }

    def _local_tasks(self, line: str) -> int:
        """Number of tasks on each node."""
        # SLURM_NTASKS_PER_NODE is set only if it was requested; this one has what was started,
        # such as 2(x3),1.
        text = _text("TASKS_PER_NODE")
        counts: list[int] = []
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
            counts += [int(count)] * int(times or 1)
        if sum(counts) != self.tasks:  # missing, or of the job and not of this step
            nodes = int(_text("NUM_NODES", "NNODES") or 1)
            if self.tasks % nodes == 0:
                return self.tasks // nodes
            text = f"{self.tasks} tasks on {nodes} nodes"
        elif len(set(counts)) == 1:
            return counts[0]
        nodes = len(counts) or nodes
        raise UserError(
            f"SLURM has spread the tasks unevenly over the nodes ({text}), but each needs the same "
            f"number. Try srun --nodes={nodes} --ntasks={max(self.tasks // nodes, 1) * nodes} "
            f"--ntasks-per-node={max(self.tasks // nodes, 1)} {line}."
        )


def _is_in_step() -> bool:
    """Return whether srun has started this process, or the script in which it is."""
    return number_in("SLURM_STEP_ID", missing=_MOST_STEPS) < _MOST_STEPS


def _is_in_shell() -> bool:
    """Return whether this is a command in a shell that SLURM has started for a person."""
    name = os.environ.get("SLURM_JOB_NAME")
    # srun in a shell of salloc inherits its name, so that says nothing inside a step.
    return (
        "SLURM_PTY_PORT" in os.environ
        or name == "bash"
        or (name == "interactive" and not _is_in_step())
    )


def _text(*names: str) -> str:
    """The first variable of these that is set, of the step rather than of its job."""
    found = (os.environ.get(f"SLURM_{of}{name}") for name in names for of in ("STEP_", ""))
    return next(filter(None, found), "")


def _first_host(hosts: str) -> str:
    """The first of a list of SLURM: rack[0-1]n[05-07,9],login is rack0n05."""
    first = re.match(r"(?:[^\[,\s]|\[[^\]]*\])*", hosts)
    assert first is not None  # it matches nothing, too
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def ended(code: int, received: Sequence[signal.Signals]) -> None:
    """Requeue the SLURM job if its time was up before the run was complete.

    Args:
        code: exit code of the run.
        received: signals that it received.
    """
    job = _job_id()
    out_of_time = EXIT_BY_SIGNAL[NEAR_THE_LIMIT][0]
    if job is None or code != out_of_time or NEAR_THE_LIMIT not in received:
        return
    command = ["scontrol", "requeue", job]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        print_line(f"ftkit: job {job} was not requeued ({' '.join(command)}: {str(said).strip()})")
    else:
        print_notice(f"job {job} was requeued")


def _job_id() -> str | None:
    """Id of the SLURM job of this process, as scontrol takes it."""
    variables = os.environ
    # SLURM_JOB_ID of one task of an array is the id of the whole array: all tasks would be
    # requeued.
    if "SLURM_ARRAY_JOB_ID" in variables and "SLURM_ARRAY_TASK_ID" in variables:
        return f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
    return variables.get("SLURM_JOB_ID")
