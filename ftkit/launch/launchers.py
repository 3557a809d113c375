"""Launchers: ranks that torchrun or SLURM started, and requeueing of SLURM jobs out of time."""

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ftkit.errors import EXIT_BY_SIGNAL, UserError
from ftkit.recipe.devices import Devices
from ftkit.recipe.plan import Plan
from ftkit.utils.process import print_line
from ftkit.utils.progress import print_notice

NEAR_THE_LIMIT = signal.SIGUSR1
"""Sent by `sbatch --signal=USR1@180`, so many seconds before the end of the job's time."""
# Seconds; a busy SLURM controller takes a while to answer.
_PATIENCE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ExternalRanks:
    """Ranks that torchrun or SLURM has started; this process is one of them."""

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


def external_ranks() -> ExternalRanks | None:
    """Return the ranks that torchrun or SLURM started, this process among them; None: none.

    SLURM's variables are translated into torchrun's, which everything else reads.
    """
    variables = os.environ
    if "TORCHELASTIC_RUN_ID" not in variables:
        # A job step of one task is a run like any other on this machine.
        if int(variables.get("SLURM_NTASKS", "1")) < 2 or "SLURM_PROCID" not in variables:
            return None
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

        if not SLURMEnvironment.detect():  # an interactive shell
            return None
        slurm = SLURMEnvironment()
        # SLURM_NTASKS_PER_NODE is set only if it was requested, so tasks are taken to be spread
        # evenly over the machines.
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


def requeue_if_out_of_time(code: int, received: Sequence[signal.Signals]) -> None:
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
