"""Memory of a step under ZeRO, by arithmetic: DeepSpeed's code cannot run on fake tensors.

It allocates buffers of fixed size, equal shares, and parameters that it gathers ahead. Sources:
stage3.py, stage_1_and_2.py and partitioned_param_coordinator.py in runtime/zero of DeepSpeed 0.19.
"""

import math

from ftkit.recipe.strategies import DeepSpeedOptions
from ftkit.strategies.step_memory import ANOTHER_MODEL, Category, OnDevice, Simulation, Snapshot

REDUCE_BUCKET_ELEMENTS = 50_000_000
"""Gradients that ranks add up at once; DeepSpeed's default of ten times as many takes 2 GB."""
_PREFETCH_ELEMENTS = 50_000_000
"""DeepSpeed's default of stage3_prefetch_bucket_size."""
_REUSE_ELEMENTS = 1_000_000_000
"""DeepSpeed's default of stage3_max_reuse_distance."""
_FP32_BYTES = 4
_LAST = "block 0, backward"


def with_zero(
    whole: Simulation,
    options: DeepSpeedOptions,
    *,
    world_size: int,
    working_bytes: int,
    states: int,
) -> OnDevice:
    """Memory of a step on one rank under ZeRO.

    Args:
        whole: a simulated step with all parameters, without optimizer and gradients.
        options: what is sharded and offloaded.
        world_size: number of ranks.
        working_bytes: bytes per number of the parameters.
        states: kinds of state that the optimizer keeps for each number.
    """
    rank = _ZeroRank(whole, options, world_size, working_bytes, states)
    names = [*whole.peaks, "optimizer"]
    return OnDevice({name: rank.during(name) for name in names}, rank.host())


class _ZeroRank:
    """Memory of one rank under ZeRO."""

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
        """Bytes in host memory, by category."""
        if not self._options.offload_optimizer:
            return {}
        share = math.ceil(self._sizes.trained / self._world_size)
        found: dict[Category, int] = {
            # Gradients of the masters, and those accumulated in the dtype of the model.
            "gradients": share * (_FP32_BYTES + self._working_bytes),
            "optimizer_state": share * _FP32_BYTES * (1 + self._states),  # 1: the masters
        }
        if self._options.offload_parameters and self._options.stage == 3:
            whole_bytes = self._sizes.parameter_bytes + self._sizes.frozen_bytes
            found["parameters"] = math.ceil(whole_bytes / self._world_size)
        return found

    def during(self, name: str) -> Snapshot:
        """The highest moment of a stretch of the step."""
        sizes, options = self._sizes, self._options
        found = dict(self._peaks.get(name, self._between_steps()).bytes)
        share = math.ceil(sizes.trained / self._world_size)
        # The bucket in which ranks add up gradients is never freed.
        found["gradients"] += self._bucket * self._working_bytes
        if options.stage == 3:  # a share instead of the whole, and gathered parameters on top
            whole_bytes = sizes.parameter_bytes + sizes.frozen_bytes
            found["parameters"] -= whole_bytes
            if not options.offload_parameters:
                found["parameters"] += math.ceil(whole_bytes / self._world_size)
            average_bytes = sizes.parameter_bytes / sizes.elements
            # Small parameters stay gathered.
            found["parameters"] += round(sizes.small_elements * average_bytes)
            found["temporaries"] += round(self._gathered(name) * average_bytes)
            if sizes.frozen_bytes:
                average_bytes = sizes.frozen_bytes / sizes.frozen_elements
                found["parameters"] += round(sizes.small_frozen_elements * average_bytes)
                found["temporaries"] += round(self._gathered_frozen(name) * average_bytes)
            if name == "loss, forward":
                found["temporaries"] += sizes.frozen_head_bytes
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
            # A full bucket is copied into the order of ranks before it is sent.
            found["temporaries"] += min(self._bucket, sizes.trained) * self._working_bytes
        return Snapshot(found)

    def _between_steps(self) -> Snapshot:
        """Memory of the model alone."""
        first = next(iter(self._peaks.values())).bytes
        kept: dict[Category, int] = dict.fromkeys(first, 0)
        return Snapshot(kept | {"parameters": first["parameters"]})

    def _gathered(self, name: str) -> int:
        """Elements of large parameters that are gathered during a stretch."""
        # They are gathered ahead, a bucket at a time, into one buffer that is copied parameter by
        # parameter. Those needed again soon enough are kept; the distance counts both ways.
        large = self._sizes.elements - self._sizes.small_elements
        ahead, kept = min(_PREFETCH_ELEMENTS, large), min(_REUSE_ELEMENTS // 2, large)
        if name in ("optimizer", ANOTHER_MODEL):
            return 0
        if name == "loss, forward":  # the last buffer has been copied
            return kept
        if name == "loss, backward" or name.startswith("block -"):
            return kept if kept == large and "backward" in name else kept + ahead
        return 2 * ahead if kept < large else large + ahead * ("forward" in name)

    def _gathered_frozen(self, name: str) -> int:
        """Elements of large parameters of the other model that are gathered during a stretch."""
        if name != ANOTHER_MODEL:
            return 0
        # No backward pass needs them again: only a buffer that is being filled and one that is
        # used are there.
        large = self._sizes.frozen_elements - self._sizes.small_frozen_elements
        return 2 * min(_PREFETCH_ELEMENTS, large)
