"""Memory of DeepSpeed's ZeRO: what it shards, gathers and moves to the host, by arithmetic.

DeepSpeed's own code cannot run on fake tensors. What it takes is simple to say: buffers of fixed
size, equal shares, and parameters that it gathers ahead. Sources are `runtime/zero/stage3.py`,
`stage_1_and_2.py` and `partitioned_param_coordinator.py` of DeepSpeed 0.19.
"""

import math

from ftkit.recipe.strategies import DeepSpeedOptions
from ftkit.strategies.simulated_step import OnDevice, Simulation, Snapshot
from ftkit.strategies.step_memory import Category

REDUCE_BUCKET_ELEMENTS = 50_000_000
"""Gradients that ranks add up at once; DeepSpeed's own ten times as many take 2 GB in float32."""
PERSISTENT_ELEMENTS = 100_000
"""Smaller parameters stay gathered: DeepSpeed's stage3_param_persistence_threshold."""
_PREFETCH_ELEMENTS = 50_000_000
"""DeepSpeed's stage3_prefetch_bucket_size, which ftkit leaves as it is."""
_REUSE_ELEMENTS = 1_000_000_000
"""DeepSpeed's stage3_max_reuse_distance, likewise."""
_FP32_BYTES = 4


def with_zero(
    whole: Simulation,
    options: DeepSpeedOptions,
    *,
    world_size: int,
    working_bytes: int,
    states: int,
) -> OnDevice:
    """The stretches of a step on a rank, and what it holds in host memory.

    Args:
        whole: a step with all parameters, and without optimizer and gradients.
        options: what is sharded and offloaded.
        world_size: ranks.
        working_bytes: of a number of the parameters.
        states: kinds of state that the optimizer keeps for each number.
    """
    rank = _Rank(whole, options, world_size, working_bytes, states)
    names = [*whole.peaks, "optimizer"]
    return OnDevice({name: rank.during(name) for name in names}, rank.host())


class _Rank:
    """One rank's memory under ZeRO."""

    def __init__(
        self,
        whole: Simulation,
        options: DeepSpeedOptions,
        world_size: int,
        working_bytes: int,
        states: int,
    ) -> None:
        self._options, self._world_size = options, world_size
        self._peaks, self._sizes = whole.peaks, whole.sizes
        self._working_bytes, self._states = working_bytes, states
        self._bucket = min(self._sizes.trained, REDUCE_BUCKET_ELEMENTS)

    def host(self) -> dict[Category, int]:
        """Shares of what is updated there."""
        if not self._options.offload_optimizer:
            return {}
        share = math.ceil(self._sizes.trained / self._world_size)
        found: dict[Category, int] = {
            # Of the masters, and accumulated in the number format of the model.
            "gradients": share * (_FP32_BYTES + self._working_bytes),
            "optimizer_state": share * _FP32_BYTES * (1 + self._states),  # masters first
        }
        if self._options.offload_parameters and self._options.stage == 3:
            found["parameters"] = math.ceil(self._sizes.parameter_bytes / self._world_size)
        return found

    def during(self, name: str) -> Snapshot:
        """The highest moment of a stretch."""
        sizes, options = self._sizes, self._options
        found = dict(self._peaks.get(name, self._between_steps()).bytes)
        share = math.ceil(sizes.trained / self._world_size)
        # The bucket in which ranks add up is there for good.
        found["gradients"] += self._bucket * self._working_bytes
        if options.stage == 3:  # a share in place of the whole; what is gathered comes on top
            found["parameters"] -= sizes.parameter_bytes
            if not options.offload_parameters:
                found["parameters"] += math.ceil(sizes.parameter_bytes / self._world_size)
            average_bytes = sizes.parameter_bytes / sizes.elements
            # Small parameters are gathered once and stay.
            found["parameters"] += round(sizes.small_elements * average_bytes)
            found["temporaries"] += round(self._gathered(name) * average_bytes)
        elif options.stage == 1:  # gradients stay whole until the update
            found["gradients"] += sizes.trained_bytes
        if not options.offload_optimizer:  # a share of the moments, and of the gradients
            found["optimizer_state"] += share * _FP32_BYTES * self._states
            found["gradients"] += share * self._working_bytes
            if self._working_bytes != _FP32_BYTES:
                found["optimizer_state"] += share * _FP32_BYTES  # masters
            if name == "optimizer":
                found["temporaries"] += share * _FP32_BYTES  # gradients of the masters
        if name.endswith("backward") and (sizes.trained > self._bucket or name == _LAST):
            # A full bucket is arranged by ranks before it is sent.
            found["temporaries"] += min(self._bucket, sizes.trained) * self._working_bytes
        return Snapshot(found)

    def _between_steps(self) -> Snapshot:
        """The model alone."""
        first = next(iter(self._peaks.values())).bytes
        kept: dict[Category, int] = dict.fromkeys(first, 0)
        return Snapshot(kept | {"parameters": first["parameters"]})

    def _gathered(self, name: str) -> int:
        """Elements of large parameters that are whole for a while.

        They are gathered ahead, a bucket at a time, into one buffer that is copied parameter by
        parameter; those needed again soon enough (the distance counts both ways) are kept.
        """
        large = self._sizes.elements - self._sizes.small_elements
        ahead, kept = min(_PREFETCH_ELEMENTS, large), min(_REUSE_ELEMENTS // 2, large)
        if name == "optimizer":
            return 0
        if name == "loss, forward":  # the last parameters have been copied
            return kept
        if name == "loss, backward" or name.startswith("block -"):
            return kept if kept == large and "backward" in name else kept + ahead
        return 2 * ahead if kept < large else large + ahead * ("forward" in name)


_LAST = "block 0, backward"
