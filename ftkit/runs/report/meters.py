"""Meters of a session: what a rank adds up step by step, for the sections of its report."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from ftkit.runs.report.report import Source, StepTimes, Throughput
from ftkit.utils.finite_numbers import lowest
from ftkit.utils.json_values import from_json

_Sums = dict[str, float]
StepPart = Literal["data", "forward", "backward", "recorded", "optimizer", "other"]
PARTS: tuple[StepPart, ...] = ("data", "forward", "backward", "optimizer", "other")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Measurements of one optimizer step, over all ranks."""

    step: int
    """Optimizer steps done, this one included."""
    samples: int
    """Samples of this step."""
    tokens: int
    """Real input tokens of this step."""
    label_tokens: int
    """Tokens of this step that carry loss."""
    padded_tokens: int
    """Positions that were computed and were padding."""
    micro_steps: int
    """Forward and backward passes of one rank; all have equally many."""
    loss: float
    """Loss of the step: of supervised fine-tuning, the mean over its label tokens in nats."""
    terms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What else the objective reports, by name."""
    router_aux_loss: float | None = None
    """Auxiliary loss of the routers, without its coefficient; None: not trained with."""
    learning_rate: float
    """Learning rate of this step, first parameter group."""
    gradient_norm: float
    """Total gradient norm before clipping."""
    duration_s: float
    """From its first batch to its end, without validation and saving."""
    parts_s: dict[StepPart, float]
    """Parts of duration_s; {}: not known."""
    compiled_graphs: int | None = None
    """Graphs that torch.compile or the device compiled in it, or that were recorded, on this rank;
    None: nothing is compiled or recorded."""


class ThroughputMeter:
    """Measures speed over a window: training steps that run at full speed.

    The first steps also compile kernels, fill caches and allocate memory, so up to skip_steps of
    them are left out, but never more than a quarter of the steps: a run of 12 or more steps leaves
    out 3, one of 4 to 7 leaves out 1, and one of fewer than 4 steps counts them all.

    Steps in which memory is measured or something is compiled take longer and are left out too,
    unless no other step remains. `Throughput.window_steps` says how many were counted.
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
        # Only these steps may be taken out later; all others are kept as sums.
        if is_slowed or self._steps < self.skip_steps:
            self._apart[self._steps] = step
        self._steps += 1
        # A part may be missing in some steps: what is recorded later has no time yet.
        self._sums |= {name: self._sums.get(name, 0) + value for name, value in step.items()}

    @property
    def at_full_speed(self) -> bool:
        """Whether the steps that a long run leaves out at its beginning are done."""
        return self._steps >= self.skip_steps

    def result(self, world_size: int) -> Throughput | None:
        """Return the speed over the window; None before the first step."""
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
        """Return the mean time of a step of the window by its parts; needs at least one step."""
        steps, sums = self._window()
        known = ("duration_s", "tokens", "samples", "micro_steps")
        # What remains are the parts that `add` was given.
        parts = {name: value / steps for name, value in sums.items() if name not in known}
        return StepTimes(**parts, total=sum(parts.values()) or sums["duration_s"] / steps)

    def _window(self) -> tuple[int, _Sums]:
        """Number of steps in the window, and their sums."""
        first = set(range(min(self.skip_steps, self._steps // 4)))
        left_out = first | self._slowed
        # No other step is left: a speed with slowed steps is better than none.
        if len(left_out) == self._steps:
            left_out = first
        sums = dict(self._sums)
        for step in left_out:
            for name, value in self._apart[step].items():
                sums[name] -= value
        return self._steps - len(left_out), sums


class SourceMeter:
    """Counts samples and keeps validation losses by source, or by validation set."""

    def __init__(
        self, names: Sequence[str], before: Mapping[str, Source], *, least: int = 2
    ) -> None:
        """Start from what earlier sessions counted.

        Args:
            names: of the sources.
            before: sources of an earlier session, by name.
            least: with fewer sources none is kept, since one source is all of the data.
        """
        kept = names if len(names) >= least else ()
        self.sources = {name: before.get(name, Source()) for name in kept}
        """Sources by name."""

    @classmethod
    def from_carried(cls, names: Sequence[str], carried: Any, *, least: int = 2) -> Self:
        """Return a meter that continues from what a checkpoint carries, if anything."""
        return cls(names, from_json(dict[str, Source], carried or {}), least=least)

    @property
    def carried(self) -> dict[str, Any]:
        """Values that a checkpoint carries, for `from_carried`."""
        return {name: dataclasses.asdict(source) for name, source in self.sources.items()}

    def prepare(self, counts: Mapping[str, Source]) -> None:
        """Add the counts of the data, and how many samples an epoch takes of each source."""
        for name, source in self.sources.items():
            now = counts[name]
            # Other validation records than in the session before: its losses do not count.
            if source.data and source.data.get("val") != now.data.get("val"):
                source = Source(samples=source.samples)
            self.sources[name] = dataclasses.replace(
                source, data=now.data, samples_per_epoch=now.samples_per_epoch
            )

    def add(self, samples: Sequence[int]) -> None:
        """Count the samples of a step, by source."""
        # A copy of the items: they are replaced in the loop.
        for (name, source), count in zip(list(self.sources.items()), samples, strict=True):
            self.sources[name] = dataclasses.replace(source, samples=source.samples + count)

    def validate(self, losses: Mapping[str, float | None], *, is_first: bool) -> None:
        """Add the losses of a validation, by name; sources without samples have none."""
        for name, source in list(self.sources.items()):
            if (loss := losses.get(name)) is None:
                continue
            best = source.validation_best
            self.sources[name] = dataclasses.replace(
                source,
                validation_first=loss if is_first else source.validation_first,
                validation_last=loss,
                validation_best=lowest(best, loss),
            )

    @property
    def samples(self) -> list[int]:
        """Samples trained on so far, by source."""
        return [source.samples for source in self.sources.values()]
