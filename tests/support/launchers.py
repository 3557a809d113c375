"""Other programs than ftkit that start the ranks of a run."""

import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from command import command_environment, command_line
from runs import Process, Run, start


def torchrun(words: list[str], program: Sequence[str | Path] = ("-m", "ftkit")) -> list[str]:
    """A command with two ranks under torchrun.

    Args:
        words: after `ftkit`.
        program: what torchrun is to start.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc_per_node", "2", *map(str, program), *words]


@contextmanager
def slurm(
    out_dir: Path,
    words: list[str],
    directory: Path,
    tasks: int = 2,
    before: str = "",
    of_task: Callable[[int], dict[str, str]] = lambda _: {},
    *,
    cold: bool = False,
) -> Iterator[list[Process]]:
    """Tasks with the variables that srun gives them.

    Args:
        out_dir: of the run.
        words: after `ftkit`.
        directory: where the tasks work.
        tasks: how many.
        before: statements to run first, in every task.
        of_task: further variables of a task.
        cold: whether they are interpreters of their own; see warm.py.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for task in range(tasks):
        variables = {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_NAME": "finetune",
            "SLURM_NTASKS": str(tasks),
            "SLURM_TASKS_PER_NODE": str(tasks),
            "SLURM_NNODES": "1",
            "SLURM_NODEID": "0",
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task),
            "SLURM_NODELIST": "localhost",
            "MASTER_PORT": str(port),
        }
        processes.append(
            start(
                command_line(*words, before=before),
                directory,
                command_environment() | variables | of_task(task),
                cold,
            )
        )
    run = Run(out_dir, processes[0])
    try:
        yield processes
    finally:
        run.kill()
        for process in processes:
            process.kill()
            process.communicate()
