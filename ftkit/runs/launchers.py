"""Launchers that start ranks from outside: how a process finds out that one has started it."""

import importlib
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from ftkit.errors import UserError
from ftkit.recipe.devices import Devices
from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe import Recipe
from ftkit.runs.job import Job
from ftkit.utils.json_values import without_tokens
from ftkit.utils.registry import Registry


@dataclass(frozen=True, kw_only=True)
class ExternalRanks:
    """Ranks that a launcher has started; this process is one of them."""

    rank: int
    """Rank of this process."""
    world_size: int
    """Number of ranks."""
    local_world_size: int
    """Number of ranks on this machine."""

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self.world_size // self.local_world_size

    def notice(self, wanted: int | Literal["auto"]) -> str | None:
        """Notice for the user if the number of machines is not that of the recipe.

        A number of the recipe gives way to what is there: an elastic launcher starts a run again
        on fewer machines after it has lost one, and the losses are the same on any number.

        Args:
            wanted: key `num_nodes` of the recipe.
        """
        if wanted in ("auto", 1, self.num_nodes):  # 1 is what recipes say that name none
            return None
        return (
            f"num_nodes is {wanted}, but ranks were started on {self.num_nodes}: these are used. "
            "With num_nodes auto, ftkit uses all of them."
        )

    def devices_and_nodes(self, devices: Devices) -> tuple[int, int]:
        """Devices of a machine, and machines, as each rank counts them.

        Where every process sees a single GPU of its own, as with SLURM's --gpus-per-task=1, there
        is a machine for each rank: so torch, Lightning and DeepSpeed count GPUs.

        Raises:
            UserError: there are too few GPUs.
        """
        shown = devices.count
        if devices.accelerator == "cpu" or shown >= self.local_world_size:
            return self.local_world_size, self.num_nodes
        if shown > 1:
            raise UserError(
                f"{self.local_world_size} processes were started on this machine, and this one is "
                f"shown {shown} GPUs. Start {shown} of them, or show each a GPU of its own: "
                "srun --gpus-per-task=1."
            )
        return 1, self.world_size

    def placement(self, plan: Plan) -> dict[str, str]:
        """Variables of torchrun that differ for a rank that is shown a GPU of its own."""
        if plan.devices == self.local_world_size:
            return {}
        # torch, Lightning and DeepSpeed count GPUs by LOCAL_RANK.
        return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(self.rank)}


@dataclass(frozen=True)
class Launcher:
    """A launcher whose processes are ranks."""

    name: str
    """Its command."""
    variable: str
    """Of the environment of its processes."""
    module: str
    """Module with `ranks` and `ended`, which is imported where the variable is set."""
    supervisor: str
    """Module with `take_part`."""

    def ranks(self, command: Sequence[str]) -> ExternalRanks | None:
        """Return the ranks that it started, this process among them; None: it started none.

        Args:
            command: the command line, for messages.

        Raises:
            UserError: they were started in a way in which they cannot train together.
        """
        found: ExternalRanks | None = importlib.import_module(self.module).ranks(command)
        return found

    def take_part(
        self,
        placed: ExternalRanks,
        recipe: Recipe,
        prepare: Callable[..., AbstractContextManager[Job]],
        conclude: Callable[[Job, Sequence[signal.Signals]], int],
    ) -> int:
        """Supervise this rank; on rank 0 also prepare the run and write the report.

        Args:
            placed: this rank.
            recipe: of this process's own command line.
            prepare: checks the recipe and claims the run's directory; takes `received`, the signals
                so far, and `others`, the hosts that share no disk.
            conclude: writes the report and returns the exit code.

        Raises:
            UserError: the processes do not find each other, or one is lost before the run starts.
        """
        # It imports torch, which a supervisor on a single host does without.
        module = importlib.import_module(self.supervisor)
        code: int = module.take_part(placed, recipe, prepare, conclude)
        return code

    def ended(self, code: int, received: Sequence[signal.Signals]) -> None:
        """Do what follows the end of a run.

        Args:
            code: exit code of the run.
            received: signals that it received.
        """
        importlib.import_module(self.module).ended(code, received)


LAUNCHERS: Registry[Launcher] = Registry("launchers", (Launcher,), core=())


def launchers_here() -> Iterator[Launcher]:
    """Launchers one of which may have started this process."""
    for name in LAUNCHERS.names:
        launcher = LAUNCHERS.get(name)
        if launcher is not None and launcher.variable in os.environ:
            yield launcher


def launched(command: Sequence[str]) -> tuple[Launcher, ExternalRanks] | None:
    """Return what has started this process as a rank, and its ranks; None: nothing has.

    Args:
        command: the command line, for messages.

    Raises:
        UserError: several processes were started in a way in which they cannot train together.
    """
    for launcher in launchers_here():
        if (placed := launcher.ranks(command)) is not None:
            return launcher, placed
    require_known_launcher(0, command)
    return None


_OTHER_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "PALS_SIZE": "mpiexec",
    "JSM_NAMESPACE_SIZE": "jsrun",
    "FLUX_JOB_SIZE": "flux run",
    "WORLD_SIZE": "a launcher",  # such as deepspeed, accelerate or an operator of Kubernetes
}
"""Variables with the number of processes, by launchers that have no row."""


def require_known_launcher(tasks: int, command: Sequence[str]) -> None:
    """Refuse processes of other launchers: each would train alone, all in one directory.

    Args:
        tasks: of a step of srun, which may set the variables of MPI as well.
        command: the command line.
    """
    for variable, launcher in _OTHER_LAUNCHERS.items():
        count = number_in(variable)
        # A shell may have WORLD_SIZE alone, a process that is a rank has both.
        if count < 2 or count == tasks or (variable == "WORLD_SIZE" and "RANK" not in os.environ):
            continue
        words = shlex.join(without_tokens(command[1:]))
        names = LAUNCHERS.names
        if "torchrun" in names:
            remedy = f"Try torchrun --nproc_per_node {count} -m ftkit {words}, or start"
        else:
            remedy = "Start"
        raise UserError(
            f"{variable} is {count}: {launcher} started {count} processes, but ftkit takes part "
            f"in those of {' and '.join(names) or 'none'} only. {remedy} it once, with --devices "
            f"{count}. If it was started once, unset {variable}."
        )


def number_in(variable: str, *, missing: int = 0) -> int:
    """The whole number in a variable of the environment."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else missing
