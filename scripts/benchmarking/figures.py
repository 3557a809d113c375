"""Figures of a training run, counted in the same way for every program.

The window is every step but the first WARM_UP_STEPS and those that ftkit slows down by measuring
them, which are left out in every program that is compared. A step lasts as long as its program
says, or else from the end of the step before, by the clock of the benchmark. Tokens are those of
samples, end-of-text included; padding is not counted.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ftkit.utils.json_values import from_json

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
    duration_s: float | None = None
    """Time that the program itself measured; None: it tells none."""


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
    slowed: list[int] = field(default_factory=list)
    """Numbers of steps, from 1, that are not counted: ftkit followed their memory, or compiled."""
    failure: str | None = None
    """Reason of missing measurements; None: the run ended well."""

    @property
    def _counted(self) -> list[int]:
        """Places in `steps` of those in the window."""
        places = range(WARM_UP_STEPS, len(self.steps))
        # A short run may have no other steps: a speed with slowed ones is better than none.
        return [place for place in places if place + 1 not in self.slowed] or list(places)

    @property
    def window(self) -> list[Step]:
        """Steps that are counted."""
        return [self.steps[place] for place in self._counted]

    @property
    def window_s(self) -> float:
        """Time of the window, with its share of what was computed before the first step."""
        before_s = self.reference_s * len(self.window) / len(self.steps)
        return sum(map(self._duration_s, self._counted)) + before_s

    def _duration_s(self, place: int) -> float:
        """Time of a step; between the ends of two where the program tells none."""
        step, before = self.steps[place], self.steps[place - 1]
        return step.ended_s - before.ended_s if step.duration_s is None else step.duration_s

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
        total_s = 0.0
        for place in self._counted:
            before_s, after_s = self.steps[place - 1].cpu_s, self.steps[place].cpu_s
            if before_s is None or after_s is None:
                return None
            total_s += after_s - before_s
        return total_s / len(self._counted)

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
        events: seconds after the start, and ``step``, ``loss``, ``total_tokens`` and, where the
            program tells it, ``duration_s``.
        skip: first steps that are not part of the training compared.
    """
    steps, before = [], 0
    for ended_s, event in events:
        if "step" not in event:
            continue
        tokens = event["total_tokens"] - before
        steps.append(
            Step(
                ended_s=ended_s,
                loss=event["loss"],
                tokens=tokens,
                cpu_s=event.get("cpu_s"),
                duration_s=event.get("duration_s"),
            )
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


def compared(runs: Sequence[Measured]) -> list[Measured]:
    """Runs that are compared: the steps that count in one count in all."""
    slowed = sorted({number for run in runs for number in run.slowed})
    return [replace(run, slowed=slowed) for run in runs]


def by_program(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Measured]]:
    """Runs by program, round by round; those of a round are compared."""
    rounds: dict[int, dict[str, Measured]] = {}
    for row in sorted(rows, key=lambda row: int(row["round"])):
        of_round = rounds.setdefault(row["round"], {})
        of_round[row["program"]] = from_json(Measured, row["measured"])
    found: dict[str, list[Measured]] = {}
    for of_round in rounds.values():
        for program, run in zip(of_round, compared(list(of_round.values())), strict=True):
            found.setdefault(program, []).append(run)
    return found


def in_pairs(
    rows: Sequence[Mapping[str, Any]], names: tuple[str, str]
) -> tuple[list[Measured], list[Measured]]:
    """Runs with the first and with the second name, which are compared pair by pair."""
    pairs = [compared([from_json(Measured, row[name]) for name in names]) for row in rows]
    return [first for first, _ in pairs], [second for _, second in pairs]


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
