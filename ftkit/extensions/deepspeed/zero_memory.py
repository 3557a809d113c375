"""Memory of a step under ZeRO, by arithmetic: DeepSpeed's code cannot run on fake tensors.

It allocates buffers of fixed size, equal shares, and parameters that it gathers ahead. Sources:
stage3.py, stage_1_and_2.py and partitioned_param_coordinator.py in runtime/zero of DeepSpeed 0.19.
"""

import math

from ftkit.extensions.deepspeed.strategies import DeepSpeedOptions
from ftkit.strategies.step_memory import (
    ANOTHER_MODEL,
    FIRST_GRADIENT,
    OBSERVED,
    Category,
    OnDevice,
    Simulation,
    Snapshot,
)

REDUCE_BUCKET_ELEMENTS = 50_000_000
"""Gradients that ranks add up at once; DeepSpeed's default of ten times as many takes 2 GB."""
_PREFETCH_ELEMENTS = 50_000_000
"""DeepSpeed's default of stage3_prefetch_bucket_size."""
_REUSE_ELEMENTS = 1_000_000_000
"""DeepSpeed's default of stage3_max_reuse_distance."""
_FP32_BYTES = 4
_REDUCTION = "gradients added up"
"""Stretch after the backward pass, in which ranks add up what is left in the bucket."""


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
    names = [*whole.peaks, _REDUCTION, "optimizer"]
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
        self._whole, self._peaks, self._sizes = whole, whole.peaks, whole.sizes
        self._working_bytes, self._states = working_bytes, states
        self._bucket = min(self._sizes.trained, REDUCE_BUCKET_ELEMENTS)
        self._share = math.ceil(self._sizes.trained / world_size)
        # Usually that of the first block; below everything that is trained there is none.
        self._last = [name for name in self._peaks if name.endswith("backward")][-1]

    def host(self) -> dict[Category, int]:
        """Bytes in host memory, by category."""
        options, sizes, share = self._options, self._sizes, self._share
        if not options.offload_optimizer:
            return {}
        found: dict[Category, int] = {
            "gradients": share * _FP32_BYTES,  # of the masters
            "optimizer_state": share * _FP32_BYTES * (1 + self._states),  # 1: the masters
        }
        if options.stage == 3 or self._whole.accumulates:  # added up in the dtype of the model
            found["gradients"] += share * self._working_bytes
        if options.stage < 3:  # on their way to and from the device
            found["gradients"] += sizes.largest_trained * self._working_bytes
            found["parameters"] = share * self._working_bytes
        elif options.offload_parameters:
            whole_bytes = sizes.parameter_bytes + sizes.frozen_bytes
            found["parameters"] = math.ceil(whole_bytes / self._world_size)
        return found

    def during(self, name: str) -> Snapshot:
        """The highest moment of a stretch of the step."""
        options, share = self._options, self._share
        found = dict(self._peaks.get(name, self._between_steps()).bytes)
        if options.stage == 3:
            self._add_gathered(name, found)
        found["gradients"] += self._gradients(name) * self._working_bytes
        if not options.offload_optimizer:  # a share of the moments
            found["optimizer_state"] += share * _FP32_BYTES * self._states
            if options.stage < 3 or self._working_bytes != _FP32_BYTES:
                found["optimizer_state"] += share * _FP32_BYTES  # masters
            if name == "optimizer":
                found["temporaries"] += share * _FP32_BYTES  # gradients of the masters
        if self._reduces_in(name) and options.stage > 1:
            # A full bucket is copied into the order of ranks before it is sent.
            found["temporaries"] += self._bucket * self._working_bytes
        return Snapshot(found)

    def _reduces_in(self, name: str) -> bool:
        """Whether ranks add up gradients during a stretch: when the bucket is full, and last."""
        last = self._last if self._options.stage == 3 else _REDUCTION
        return name == last or (name.endswith("backward") and self._sizes.trained > self._bucket)

    def _gradients(self, name: str) -> int:
        """Numbers in gradients and buckets on the device, beside those that are simulated."""
        options, whole, share = self._options, self._whole, self._share
        if options.stage == 3:  # the bucket and the shares are never freed
            return self._bucket + (0 if options.offload_optimizer else share)
        # The first gradient makes the bucket, after the loss has taken the most for its own.
        has_bucket = name.endswith("backward") and name != "loss, backward"
        found = self._bucket if has_bucket or name == _REDUCTION else 0
        accumulates = whole.accumulates and name != OBSERVED
        if options.stage == 1 and accumulates:  # whole until the update
            found += self._sizes.trained
        if options.offload_optimizer:  # on its way to the host
            return found + self._sizes.largest_trained
        if options.stage == 2 and accumulates:
            found += share
        # What was added up just now, and is copied to that of micro-steps before.
        return found + (share if self._reduces_in(name) or name == "optimizer" else 0)

    def _add_gathered(self, name: str, found: dict[Category, int]) -> None:
        """A share of the parameters instead of the whole, and gathered ones on top."""
        sizes, options = self._sizes, self._options
        whole_bytes = sizes.parameter_bytes + sizes.frozen_bytes
        found["parameters"] -= whole_bytes
        if not options.offload_parameters:
            found["parameters"] += math.ceil(whole_bytes / self._world_size)
        average_bytes = sizes.parameter_bytes / max(sizes.elements, 1)
        # Small parameters stay gathered.
        found["parameters"] += round(sizes.small_elements * average_bytes)
        found["temporaries"] += round(self._gathered(name) * average_bytes)
        if sizes.frozen_bytes:
            average_bytes = sizes.frozen_bytes / sizes.frozen_elements
            found["parameters"] += round(sizes.small_frozen_elements * average_bytes)
            found["temporaries"] += round(self._gathered_frozen(name) * average_bytes)
        if name == "loss, forward":
            found["temporaries"] += sizes.frozen_head_bytes

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
        # No backward pass needs those below everything that is trained.
        needed_again = large - self._sizes.forward_only_elements
        ahead, kept = min(_PREFETCH_ELEMENTS, large), min(_REUSE_ELEMENTS // 2, needed_again)
        if name in ("optimizer", _REDUCTION):
            return 0
        if any(self._passes_before()):
            return self._gathered_after_passes(name, large)
        if name == ANOTHER_MODEL:
            return 0
        if name == "loss, forward":  # the last buffer has been copied
            return kept
        if name in ("loss, backward", FIRST_GRADIENT) or name.startswith("block -"):
            if kept == needed_again and "backward" in name:
                return kept
            has_backward = "backward" in name or name.replace("forward", "backward") in self._peaks
            return kept + ahead + (0 if has_backward else self._sizes.block_elements)
        if large > _REUSE_ELEMENTS // 2:
            return 2 * ahead
        return large + ahead * ("forward" in name)

    def _passes_before(self) -> set[int]:
        """Passes of the trained model since a backward pass, before each of those that train."""
        whole = self._whole
        if not whole.accumulates:
            return {whole.observing_passes + whole.passes_before}
        # There are two micro-batches or more.
        return {2 * whole.observing_passes + whole.passes_before, whole.passes_before}

    def _gathered_after_passes(self, name: str, large: int) -> int:
        """As `_gathered`, where the model has computed before without a backward pass."""
        # DeepSpeed expects of each forward pass, and what follows it, what the one before it did.
        # So one after a pass alone gathers ahead, but frees what it has used; its backward pass,
        # which is not expected, gathers each parameter when it is needed.
        sizes, whole = self._sizes, self._whole
        if name == ANOTHER_MODEL and sizes.frozen_bytes:
            return 0
        if name in (ANOTHER_MODEL, OBSERVED):
            one_by_one = whole.observing_passes == 0
            if name == OBSERVED:
                one_by_one = whole.observing_passes == 1 and not whole.accumulates
            if not one_by_one:
                return 2 * min(_PREFETCH_ELEMENTS, large)
            return max(sizes.embedding_elements, sizes.head_elements, sizes.largest_in_block)
        if name.startswith("loss"):
            return sizes.head_elements
        if name.endswith("backward"):
            return sizes.largest_in_block
        # The first pass after an unexpected one frees small parameters too.
        buffered = large
        if 1 in self._passes_before():
            buffered += sizes.small_elements
        if buffered > _PREFETCH_ELEMENTS:
            return 2 * _PREFETCH_ELEMENTS
        return buffered + self._unused(name, large)

    def _unused(self, name: str, large: int) -> int:
        """Elements of large parameters that a forward pass still needs at its peak in a stretch."""
        sizes = self._sizes
        if not name.startswith("block"):
            return large
        # Blocks are counted from both ends; the last matrix of each is used after its peak.
        number = int(name.partition(",")[0].removeprefix("block "))
        if number >= 0:
            used = sizes.embedding_elements + (number + 1) * sizes.block_elements
            return large - used + sizes.largest_in_block
        after = (-number - 1) * sizes.block_elements + sizes.head_elements
        return after + sizes.largest_in_block

    def _gathered_frozen(self, name: str) -> int:
        """Elements of large parameters of the other model that are gathered during a stretch."""
        if name != ANOTHER_MODEL:
            return 0
        # No backward pass needs them again: only a buffer that is being filled and one that is
        # used are there.
        large = self._sizes.frozen_elements - self._sizes.small_frozen_elements
        return 2 * min(_PREFETCH_ELEMENTS, large)
