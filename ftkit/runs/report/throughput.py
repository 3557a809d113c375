"""Throughput and MFU of a run over its measured steps."""

from collections.abc import Mapping
from dataclasses import dataclass

_Sums = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Mean seconds of one step, by part, over the steps of the throughput window on rank 0."""

    data: float | None = None
    """Waiting for the batch and moving it to the device."""
    forward: float | None = None
    """Forward passes of all micro-steps, loss included."""
    backward: float | None = None
    """Backward passes of all micro-steps, gradient exchange included."""
    optimizer: float | None = None
    """Clipping and update."""
    other: float | None = None
    """The rest of the step."""
    total: float | None = None
    """The whole step; the sum of the parts."""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Speed over the window: the steps that show how fast a run is; see `ThroughputMeter`."""

    tokens_per_s: float
    """Real tokens per second, over all ranks."""
    samples_per_s: float
    """Samples per second, over all ranks."""
    steps_per_s: float
    """Optimizer steps per second."""
    window_steps: int
    """Steps in the window."""
    window_s: float
    """Their time; validation and saving lie outside."""
    tokens_per_s_per_device: float
    """tokens_per_s / world_size."""
    micro_steps_per_step: float | None = None
    """Forward and backward passes of one rank per step, in the mean."""
    compiled_graphs: int | None = None
    """Graphs that torch.compile made in the training steps of rank 0; those steps lie outside the
    window. None: nothing is compiled."""
    rank_imbalance: float | None = None
    """Tokens of the fullest rank relative to the mean rank, averaged over the steps; 1 is perfect.
    None: there is one rank."""
    mfu: float | None = None
    """Model FLOPs of the real tokens as a fraction of what the devices can do; None: unknown."""
    device_utilization: float | None = None
    """Mean fraction of time the GPU of rank 0 was busy, as the driver says; None: unknown."""
    energy_wh: float | None = None
    """What the GPUs of rank 0's host have taken from the first step on, as the driver says, by
    samples of their power; None: unknown."""
    cpu_utilization: float | None = None
    """Mean fraction of all hardware threads that this run's processes kept busy."""


class ThroughputMeter:
    """Speed over the window: the training steps that show how fast a run is.

    The first steps also compile kernels, fill caches and allocate memory, so up to skip_steps of
    them are left out, but never more than a quarter of the steps: a run of 12 or more steps leaves
    out 3, one of 4 to 7 leaves out 1, and one of fewer than 4 steps counts them all.

    Steps in which memory is followed or something is compiled take longer for it and are left out
    too, unless no other would remain. ``Throughput.window_steps`` says how many were counted.
    """

    def __init__(self, skip_steps: int = 3) -> None:
        self.skip_steps = skip_steps
        self._steps = 0
        self._sums: _Sums = {}
        self._apart: dict[int, _Sums] = {}
        """Steps that may be left out, by their number from 0."""
        self._slowed: set[int] = set()
        self._graphs: int | None = None

    def add(
        self,
        *,
        duration_s: float,
        tokens: int,
        samples: int,
        micro_steps: int = 1,
        parts_s: Mapping[str, float] | None = None,
        follows_memory: bool = False,
        compiled_graphs: int | None = None,
    ) -> None:
        """Count one step.

        Args:
            duration_s: time of the step, without validation and saving.
            tokens: real tokens of the step, over all ranks.
            samples: samples of the step, over all ranks.
            micro_steps: forward and backward passes of one rank.
            parts_s: where the time went, by the fields of `StepTimes`.
            follows_memory: whether the memory of this step was followed.
            compiled_graphs: how many were compiled in it; None: nothing is compiled.
        """
        step = {
            "duration_s": duration_s,
            "tokens": tokens,
            "samples": samples,
            "micro_steps": micro_steps,
            **(parts_s or {}),
        }
        is_slowed = follows_memory or bool(compiled_graphs)
        if compiled_graphs is not None:
            self._graphs = (self._graphs or 0) + compiled_graphs
        if is_slowed:
            self._slowed.add(self._steps)
        if is_slowed or self._steps < self.skip_steps:
            self._apart[self._steps] = step
        self._steps += 1
        self._sums = {name: self._sums.get(name, 0) + value for name, value in step.items()}

    def result(self, world_size: int) -> Throughput | None:
        """The speed over the window, or None before the first step.

        Args:
            world_size: ranks that share the tokens.
        """
        window_steps, sums = self._window()
        window_s = sums.get("duration_s", 0)
        if window_steps == 0 or window_s <= 0:
            return None
        return Throughput(
            tokens_per_s=sums["tokens"] / window_s,
            samples_per_s=sums["samples"] / window_s,
            steps_per_s=window_steps / window_s,
            window_steps=window_steps,
            window_s=window_s,
            tokens_per_s_per_device=sums["tokens"] / window_s / world_size,
            micro_steps_per_step=sums["micro_steps"] / window_steps,
            compiled_graphs=self._graphs,
        )

    def step_times(self) -> StepTimes:
        """Mean time of a step of the window by its parts; comes after the first step."""
        steps, sums = self._window()
        known = ("duration_s", "tokens", "samples", "micro_steps")
        parts = {name: value / steps for name, value in sums.items() if name not in known}
        return StepTimes(**parts, total=sum(parts.values()))

    def _window(self) -> tuple[int, _Sums]:
        """How many steps are in the window, and their sums."""
        first = set(range(min(self.skip_steps, self._steps // 4)))
        left_out = first | self._slowed
        if len(left_out) == self._steps:
            left_out = first
        sums = dict(self._sums)
        for step in left_out:
            for name, value in self._apart[step].items():
                sums[name] -= value
        return self._steps - len(left_out), sums
