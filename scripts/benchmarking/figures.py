"""Figures of a training run, counted in the same way for every program.

The window is every step but the first WARM_UP_STEPS: from the end of the last of those to the end
of the last step, by the clock of the benchmark, including the time between steps. Tokens are those
of samples, end-of-text included; padding is not counted.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

WARM_UP_STEPS = 2
"""First steps that are not counted, in every program: they allocate, compile and fill caches."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step."""

    ended_s: float
    """Seconds after the start of the command."""
    loss: float
    """Loss that the program reports."""
    tokens: int
    """Real tokens."""
    cpu_s: float | None = None
    """Time that processors had spent on the command by then."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of a run; sizes in bytes, times in seconds."""

    steps: list[Step] = field(default_factory=list)
    """Steps of the whole run."""
    first_step_s: float | None = None
    """From the command to the end of the very first step."""
    reference_s: float = 0.0
    """Time of what a reference model computed before the first step, for all steps."""
    padding_fraction: float | None = None
    """Share of computed positions that are padding, over the whole run."""
    host_bytes: int | None = None
    """Highest memory of the largest process that no file backs."""
    imports_bytes: int | None = None
    """Such memory of a process that has only imported what the program needs."""
    allocated_bytes: int | None = None
    """Highest memory in tensors on the GPU; None on CPU."""
    reserved_bytes: int | None = None
    """Highest memory that torch took from the GPU; None on CPU."""
    failure: str | None = None
    """Reason of missing measurements; None: the run ended well."""

    @property
    def window(self) -> list[Step]:
        """Steps that are counted."""
        return self.steps[WARM_UP_STEPS:]

    @property
    def window_s(self) -> float:
        """Time of the window, with its share of what was computed before the first step."""
        before_s = self.reference_s * len(self.window) / len(self.steps)
        return self.steps[-1].ended_s - self.steps[WARM_UP_STEPS - 1].ended_s + before_s

    @property
    def tokens_per_s(self) -> float:
        """Real tokens per second over the window."""
        return sum(step.tokens for step in self.window) / self.window_s

    @property
    def step_s(self) -> float:
        """Mean time of a step of the window."""
        return self.window_s / len(self.window)

    @property
    def step_cpu_s(self) -> float | None:
        """Mean time of processors for a step of the window, over all of them; None: unknown."""
        first, last = self.steps[WARM_UP_STEPS - 1].cpu_s, self.steps[-1].cpu_s
        return None if first is None or last is None else (last - first) / len(self.window)

    @property
    def peak_bytes(self) -> int | None:
        """Memory that training takes: on the GPU, or of the host beyond what imports hold."""
        if self.allocated_bytes is not None:
            return self.allocated_bytes
        if self.host_bytes is None:
            return None
        return self.host_bytes - (self.imports_bytes or 0)

    @property
    def is_whole(self) -> bool:
        """True if the run ended well and has a window."""
        return self.failure is None and len(self.steps) > WARM_UP_STEPS


def steps_of(events: Sequence[tuple[float, dict[str, Any]]], skip: int = 0) -> list[Step]:
    """Steps from the events that a program reported after each.

    Args:
        events: seconds after the start, and ``step``, ``loss`` and ``total_tokens``.
        skip: first steps that are not part of the training compared.
    """
    steps, before = [], 0
    for ended_s, event in events:
        if "step" not in event:
            continue
        tokens = event["total_tokens"] - before
        steps.append(
            Step(ended_s=ended_s, loss=event["loss"], tokens=tokens, cpu_s=event.get("cpu_s"))
        )
        before = event["total_tokens"]
    return steps[skip:]


def padding_of(events: Sequence[tuple[float, dict[str, Any]]]) -> float | None:
    """Padding as a share of computed positions, from the totals after the last step."""
    totals = [event for _, event in events if "total_positions" in event]
    if not totals:
        return None
    return 1 - totals[-1]["total_tokens"] / totals[-1]["total_positions"]


def largest_difference(ours: Sequence[Step], theirs: Sequence[Step]) -> float:
    """Largest relative difference of losses, step by step."""
    pairs = zip(ours, theirs, strict=False)
    return max(abs(one.loss / other.loss - 1) for one, other in pairs)


def median_of(runs: Sequence[Measured], name: str) -> float | None:
    """Median of a property over runs that ended well; None: unknown."""
    values = [getattr(run, name) for run in runs if run.is_whole]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def paired_ratio(runs: Sequence[Measured], others: Sequence[Measured], name: str) -> float | None:
    """Median over the rounds of the ratio of a property to another program's in the same round."""
    ratios = [
        getattr(run, name) / getattr(other, name)
        for run, other in zip(runs, others, strict=False)
        if run.is_whole and other.is_whole and getattr(other, name)
        if getattr(run, name) is not None
    ]
    return statistics.median(ratios) if ratios else None
