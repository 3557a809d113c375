"""The strategy deepspeed, with its options and what it cannot run."""

import importlib.util
from dataclasses import dataclass
from typing import Literal

from ftkit.errors import UserError
from ftkit.recipe.facts import StrategyRules

INSTALL = (
    "Install g++ and try DS_BUILD_OPS=0 pip install --no-build-isolation ninja deepspeed, or in a "
    "clone of ftkit scripts/setup_env --deepspeed"
)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedOptions:
    """Options of `strategy: deepspeed`."""

    stage: Literal[1, 2, 3] = 3
    """ZeRO stage. 1 shards the optimizer state, 2 also gradients, 3 also parameters."""
    offload_optimizer: bool = True
    """Keep the optimizer state in host memory and update on the CPU."""
    offload_parameters: bool = False
    """Keep the parameters in host memory (stage 3)."""


class DeepSpeedRules(StrategyRules):
    """Rules of DeepSpeed: every rank has equal parts of what the ZeRO stage shards."""

    name = "deepspeed"
    class_path = "ftkit.extensions.deepspeed.deepspeed.DeepSpeed"
    options = DeepSpeedOptions
    keeps_masters = True
    shards_base = True
    uncompiled = (
        "gathers the parameters of each layer in the middle of a block. Try --strategy fsdp"
    )
    rounds = False
    waits_for_every_gradient = True
    updates_slices = "DeepSpeed keeps its own optimizer state, for slices of parameters"
    # As with fsdp, everything is shared out among the GPUs, and nothing goes to the host.
    for_float16 = DeepSpeedOptions(offload_optimizer=False)
    shares = "DeepSpeed updates slices of them, which have no shape"

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec("deepspeed") is not None

    def sharding(self, options: DeepSpeedOptions) -> str:
        parts = ("optimizer state", "gradients", "parameters")[: options.stage]
        hosted = [
            name
            for name, offloaded in (
                ("optimizer state", options.offload_optimizer),
                ("parameters", options.offload_parameters and options.stage == 3),
            )
            if offloaded
        ]
        where = f"; in host memory: {', '.join(hosted)}" if hosted else ""
        return f"ZeRO-{options.stage}: {', '.join(parts)}{where}"

    def offloads(self, options: DeepSpeedOptions) -> bool:
        return options.offload_optimizer

    def shards(self, options: DeepSpeedOptions, devices: int, num_nodes: int) -> int:
        return devices * num_nodes if options.stage == 3 else 1

    def needs_all_gradients(self, options: DeepSpeedOptions) -> str:
        return "updates slices of all parameters at once. Try --strategy fsdp"

    def check_installed(self) -> None:
        if not self.is_installed:
            raise UserError(
                f"strategy is deepspeed, but DeepSpeed is not installed. {INSTALL}, or "
                "--strategy fsdp."
            )

    def environment(self, accelerator: str) -> dict[str, str]:
        # DeepSpeed chooses the device itself when it is imported, unless this is set.
        return {"DS_ACCELERATOR": "cpu"} if accelerator == "cpu" else {}


ROWS = (DeepSpeedRules(),)
