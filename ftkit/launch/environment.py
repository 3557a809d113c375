"""Ranks that torchrun or SLURM has started, as environment variables tell of them."""

import dataclasses
import os
from dataclasses import dataclass

from ftkit.errors import UserError
from ftkit.recipe.devices import Devices
from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class ExternalRanks:
    """Ranks that torchrun or SLURM has started; this process is one of them."""

    rank: int
    """This process among all."""
    world_size: int
    """Ranks in all."""
    local_world_size: int
    """Ranks on this machine."""

    @property
    def num_nodes(self) -> int:
        """Machines."""
        return self.world_size // self.local_world_size

    def applied_to(self, recipe: Recipe) -> Recipe:
        """The recipe with the devices and machines that there are."""
        return dataclasses.replace(recipe, devices=self.local_world_size, num_nodes=self.num_nodes)

    def notice(self, recipe: Recipe) -> str | None:
        """What a person should know if there are other machines than a recipe names.

        A number of the recipe gives way to what is there: an elastic launcher starts a run again
        on fewer machines after it has lost one, and the losses are the same on any number.
        """
        asked = recipe.num_nodes
        if asked in ("auto", 1, self.num_nodes):  # 1 is what recipes say that name none
            return None
        return (
            f"num_nodes is {asked}, but ranks were started on {self.num_nodes}: these are used. "
            "num_nodes auto takes what there is."
        )

    def on(self, recipe: Recipe, devices: Devices) -> Recipe:
        """The recipe as each rank sees the GPUs.

        Where every process is shown one GPU of its own, as SLURM's --gpus-per-task=1 does, this is
        a machine for each rank to all who count GPUs: torch, Lightning, DeepSpeed.

        Raises:
            UserError: there are too few GPUs.
        """
        shown = devices.count
        if devices.accelerator == "cpu" or shown >= self.local_world_size:
            return recipe
        if shown > 1:
            raise UserError(
                f"{self.local_world_size} processes were started on this machine, and this one is "
                f"shown {shown} GPUs. Start {shown} of them, or show each a GPU of its own: "
                "srun --gpus-per-task=1."
            )
        return dataclasses.replace(recipe, devices=1, num_nodes=self.world_size)

    def placement(self, plan: Plan) -> dict[str, str]:
        """What of torchrun's variables the rank is to see differently: see `on`."""
        if plan.devices == self.local_world_size:
            return {}
        return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(self.rank)}


def external_ranks() -> ExternalRanks | None:
    """Who started this process: torchrun or SLURM (several tasks), or None.

    SLURM's variables are translated into torchrun's, which everything else reads.
    """
    variables = os.environ
    if "TORCHELASTIC_RUN_ID" not in variables:
        if int(variables.get("SLURM_NTASKS", "1")) < 2 or "SLURM_PROCID" not in variables:
            return None
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

        if not SLURMEnvironment.detect():  # an interactive shell
            return None
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
