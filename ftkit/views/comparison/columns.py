"""Columns of a comparison: names, values, texts, and which of them are best."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from ftkit.errors import UserError
from ftkit.runs.report.report import ENDED_WELL
from ftkit.runs.state import AT_WORK
from ftkit.strategies.step_memory import Breakdown
from ftkit.utils.names import nearest
from ftkit.views.comparison.measures import (
    MEASURES,
    OF_SOURCES,
    OF_TASKS,
    OWN,
    ROUGE_L,
    VALIDATION_LOSS,
    Better,
    Measure,
    measures_of,
)
from ftkit.views.comparison.runs import ComparedRun, differing_settings

_TIMES = ("time_s", "training_s")
_SETTING = "setting"
_WORTH = (
    "run",
    "state",
    "tokens_per_s",
    "allocated_bytes",
    _SETTING,
    _SETTING,
    VALIDATION_LOSS,
    OF_SOURCES,
    "tensors_bytes",
    "time_s",
    "loss",
    "host_bytes",
    "exact_match",
    OWN,
    ROUGE_L,
    "steps",
    "restarts",
    "reserved_bytes",
    "training_s",
    "mfu",
    "expert_load_highest",
    "predicted_bytes",
    "prediction_error",
    *(f"{part.name}_bytes" for part in fields(Breakdown)),
)
"""What a narrow table keeps first: among it the first two settings, further ones last."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One thing that is compared, with a value for each run."""

    key: str
    """Its name in JSON and CSV, and for sorting."""
    head: str
    """Its name in tables."""
    values: list[Any]
    """One of each run; None: there is none."""
    texts: list[str]
    """The same as people read them."""
    best: frozenset[int] = frozenset()
    """The runs that are best in it."""
    better: Better | None = None
    """Which values are good."""
    is_setting: bool = False
    """Whether it was asked for, not measured."""

    @cached_property
    def is_numeric(self) -> bool:
        """Whether its values stand below each other by their last digits."""
        return all(isinstance(v, int | float | None) for v in self.values) and not all(
            isinstance(v, bool | None) for v in self.values
        )


def setting_columns(runs: list[ComparedRun]) -> list[Column]:
    """The settings that differ."""
    keys = differing_settings(runs)
    measured = {measure.head.replace(" ", "_") for measure in MEASURES}
    short = distinct(keys, _short)
    heads = [key if head in measured else head for key, head in zip(keys, short, strict=True)]
    return [_setting(runs, key, head) for key, head in zip(keys, heads, strict=True)]


def _short(key: str) -> str:
    """A key without the groups it is in; sets to validate on have names that say nothing alone."""
    return key.removeprefix("eval.") if key.startswith("eval.sets.") else key.rpartition(".")[2]


def measure_columns(runs: list[ComparedRun]) -> list[Column]:
    """Of all measures, see `measures_of`."""
    return [_measured(runs, measure) for measure in measures_of(runs)]


def name_columns(runs: list[ComparedRun]) -> list[Column]:
    """Which run it is, and how it ended."""
    names = [run.name for run in runs]
    states = [run.state for run in runs]
    return [
        Column(key="run", head="run", values=names, texts=names),
        Column(
            key="state",
            head="outcome",
            values=states,
            texts=[state.replace("_", " ") for state in states],
        ),
    ]


def in_order(runs: list[ComparedRun], sort: str | None) -> list[ComparedRun]:
    """The runs sorted by a column, best or lowest first, those without a value last.

    Without one: those that ended well first, by their validation loss as it is shown, and runs
    that learned the same by speed.

    Raises:
        UserError: there is no such column.
    """
    if sort is None:
        return sorted(runs, key=_usual_order)
    known = {column.key: column for column in all_columns(runs)}
    settings = dict.fromkeys(key for run in runs for key in run.settings)
    column = known.get(sort) or (_setting(runs, sort, sort) if sort in settings else None)
    if column is None:
        close = nearest(sort, [*known, *settings])
        hint = f"Did you mean {close}? " if close else ""
        raise UserError(
            f"--sort is {sort!r}, but must be run, state, a setting such as "
            f"train.micro_batch_size, or one of {', '.join(m.key for m in MEASURES)}. "
            f"{hint}Try --sort {close or 'tokens_per_s'}."
        )
    present = [i for i, value in enumerate(column.values) if value is not None]
    numeric = column.is_numeric
    present.sort(
        key=lambda i: column.values[i] if numeric else str(column.values[i]),
        reverse=column.better == "higher",
    )
    missing = [i for i, value in enumerate(column.values) if value is None]
    return [runs[i] for i in present + missing]


def by_worth(columns: list[Column]) -> list[Column]:
    """The columns in the order in which a narrow table keeps them."""
    free = [i for i, key in enumerate(_WORTH) if key == _SETTING]
    worth = {}
    for column in columns:
        if column.is_setting:
            worth[column.key] = free.pop(0) if free else len(_WORTH)
        else:
            is_own = column.key.startswith((OWN, OF_TASKS))
            of_source = OF_SOURCES if column.key.startswith(OF_SOURCES) else column.key
            worth[column.key] = _WORTH.index(OWN if is_own else of_source)
        if column.key == "state" and len(set(column.values)) == 1:
            worth[column.key] = len(_WORTH)
    return sorted(columns, key=lambda column: worth[column.key])


def all_columns(runs: list[ComparedRun]) -> list[Column]:
    """Names, settings that differ, measures."""
    return [*name_columns(runs), *setting_columns(runs), *measure_columns(runs)]


def distinct(texts: list[str], shorter: Callable[[str], str]) -> list[str]:
    """The texts made shorter where they still differ from all the others."""
    short = [shorter(text) for text in texts]
    origins: dict[str, set[str]] = {}
    for text, brief in zip(texts, short, strict=True):
        origins.setdefault(brief, set()).add(text)
    return [
        brief if len(origins[brief]) == 1 else text
        for text, brief in zip(texts, short, strict=True)
    ]


def setting_text(value: Any) -> str:
    """A setting as a recipe has it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(setting_text, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _setting(runs: list[ComparedRun], key: str, head: str) -> Column:
    values = [run.settings.get(key) for run in runs]
    texts = [setting_text(value) for value in values]
    if key in ("optimizer", "data", "strategy"):
        texts = distinct(texts, lambda text: text.rpartition(".")[2])
    return Column(key=key, head=head, values=values, texts=texts, is_setting=True)


def _measured(runs: list[ComparedRun], measure: Measure) -> Column:
    values = [measure.value(run.report) for run in runs]
    texts = ["" if value is None else measure.text(value) for value in values]
    if measure.key == "steps":
        texts = [_steps_text(run, text) for run, text in zip(runs, texts, strict=True)]
    return Column(
        key=measure.key,
        head=measure.head,
        values=values,
        texts=texts,
        better=measure.better,
        best=_best(runs, measure, values, texts),
    )


def _best(
    runs: list[ComparedRun], measure: Measure, values: list[float | None], texts: list[str]
) -> frozenset[int]:
    """The runs with the best value among those that ended well; none if all are as good.

    Times count only where the same samples were trained on, in one session.
    """
    rivals = [
        i
        for i, run in enumerate(runs)
        if run.state in ENDED_WELL and values[i] is not None and texts[i]
    ]
    if measure.better is None or len(rivals) < 2:
        return frozenset()
    if measure.key in _TIMES:
        work = {
            run.report.progress and run.report.progress.samples for run in _runs_at(runs, rivals)
        }
        if len(work) > 1 or any(run.report.resumed for run in _runs_at(runs, rivals)):
            return frozenset()
    pick = min if measure.better == "lower" else max
    winner = pick(rivals, key=lambda i: values[i] or 0.0)
    best = frozenset(i for i in rivals if texts[i] == texts[winner])
    return frozenset() if len(best) == len(rivals) else best


def _runs_at(runs: list[ComparedRun], indices: list[int]) -> list[ComparedRun]:
    """Some of the runs."""
    return [runs[i] for i in indices]


def _steps_text(run: ComparedRun, text: str) -> str:
    """160; 63/160 of a run that is not through."""
    total = run.resolved.total_steps
    done = run.report.progress.steps if run.report.progress else 0
    return f"{text}/{total:,}" if total is not None and done < total else text


def _usual_order(run: ComparedRun) -> tuple[int, float, float, str]:
    loss = run.report.validation_loss
    speed = run.report.throughput.tokens_per_s if run.report.throughput else 0.0
    group = 0 if run.state in ENDED_WELL else 1 if run.state in AT_WORK else 2
    return group, math.inf if loss is None else round(loss, 4), -speed, run.name
