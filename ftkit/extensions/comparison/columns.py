"""Columns of a comparison: settings that differ and numbers of reports, and which are best."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ftkit.errors import UserError
from ftkit.extensions.comparison.runs import CROSS_ENTROPIES, ComparedRun, differing_settings
from ftkit.recipe.recipe import METRICS
from ftkit.runs.report import numbers
from ftkit.runs.report.answers import score_text
from ftkit.runs.report.metrics import loss_column, term_column
from ftkit.runs.report.numbers import LAST, Better, ReportNumber, score_after
from ftkit.runs.report.report import ENDED_WELL, Report
from ftkit.runs.report.table import term_title
from ftkit.runs.state import AT_WORK
from ftkit.utils.console.formatting import loss_text, number_text, percent_text
from ftkit.utils.finite_numbers import finite
from ftkit.utils.names import column_name, nearest

_SETTINGS_FIRST = 3
"""Most settings that a page shows before the results."""
_FIRST_SETTINGS = 2
"""Settings that a narrow table keeps; others are left out first."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a comparison, with a value for each run."""

    key: str
    """Its name in JSON and CSV, and to sort by."""
    label: str
    """Its name in tables."""
    values: list[Any]
    """Value of each run; None: it has none."""
    texts: list[str]
    """Text of each value."""
    best: frozenset[int] = frozenset()
    """Indices of the runs with the best value."""
    better: Better | None = None
    """Direction of better values; None: neither is better."""
    priority: int = LAST
    """Tables that are too narrow keep the columns of the lowest priorities."""
    is_setting: bool = False
    """True for a key of the recipe, False for a result."""
    number: ReportNumber | None = None
    """Number of the report that it shows; None: it is a name or a setting."""

    @property
    def meaning(self) -> str:
        """Meaning of the values in a sentence; empty: it is a name or a setting."""
        return "" if self.number is None else self.number.meaning

    @cached_property
    def is_numeric(self) -> bool:
        """True if its values are aligned by their last digits."""
        return all(isinstance(v, int | float | None) for v in self.values) and not all(
            isinstance(v, bool | None) for v in self.values
        )


def all_columns(runs: list[ComparedRun]) -> list[Column]:
    """Return names, settings that differ, and all numbers, also those that no run has."""
    return [*name_columns(runs), *setting_columns(runs), *number_columns(runs)]


def shown_columns(runs: list[ComparedRun]) -> list[Column]:
    """Return the columns of a table to read: without numbers that no run has."""
    measured = [column for column in number_columns(runs) if _says_something(column)]
    return [*name_columns(runs), *setting_columns(runs), *measured]


def page_columns(runs: list[ComparedRun]) -> list[Column]:
    """Return the columns of a page, whose right end may be out of sight.

    Results come before many settings; among them, the numbers of single terms of an objective and
    of single sources come after time, speed and memory.
    """
    columns = shown_columns(runs)
    settings = [column for column in columns if column.is_setting]
    single = {number.key for number in (*_term_numbers(runs), *_source_numbers(runs))}
    last = [column for column in columns if column.key in single]
    if len(settings) > _SETTINGS_FIRST:
        last += settings
    return [column for column in columns if column not in last] + last


def name_columns(runs: list[ComparedRun]) -> list[Column]:
    """Return the name of each run, and how it ended."""
    names = [run.name for run in runs]
    states = [run.state for run in runs]
    return [
        # The name stays in the narrowest table.
        Column(key="run", label="run", values=names, texts=names, priority=0),
        Column(
            key="state",
            label="outcome",
            values=states,
            texts=[state.replace("_", " ") for state in states],
            # How runs ended matters only if it differs.
            priority=1 if len(set(states)) > 1 else LAST,
        ),
    ]


def setting_columns(runs: list[ComparedRun]) -> list[Column]:
    """Return the settings that differ."""
    keys = differing_settings(runs)
    taken = {number.label.replace(" ", "_") for number in numbers.NUMBERS if number.is_compared}
    short = distinct(keys, _short_key)
    # Two columns must not have the same label.
    labels = [key if label in taken else label for key, label in zip(keys, short, strict=True)]
    return [
        _setting(runs, key, label, priority=4 if place < _FIRST_SETTINGS else LAST)
        for place, (key, label) in enumerate(zip(keys, labels, strict=True))
    ]


def number_columns(runs: list[ComparedRun]) -> list[Column]:
    """Return the numbers of the reports, also those that no run has."""
    return [
        Column(
            key=number.key,
            label=number.label,
            values=[number.of(run.report) for run in runs],
            texts=[number.text_in(run.report) for run in runs],
            better=number.better,
            best=_best(runs, number),
            priority=number.priority,
            number=number,
        )
        for number in _compared_numbers(runs)
    ]


def _compared_numbers(runs: list[ComparedRun]) -> Iterator[ReportNumber]:
    """Declared numbers, and those of the runs' sources, metrics and tasks."""
    for number in numbers.NUMBERS:
        if number.is_compared:
            yield number
        # Numbers of single sources, metrics and tasks stand beside those that they belong to.
        if number.key == "validation_loss":
            yield from _term_numbers(runs)
            yield from _source_numbers(runs)
        elif number.key == [*METRICS][-1]:
            yield from _own_metrics(runs)
            yield from _task_numbers(runs)


def in_order(runs: list[ComparedRun], sort: str | None) -> list[ComparedRun]:
    """Return the runs sorted by a column, best or lowest first, those without a value last.

    By default, runs that ended well come first, sorted by their validation loss as shown, and runs
    of equal loss by speed.

    Raises:
        UserError: there is no such column.
    """
    if sort is None:
        return sorted(runs, key=_default_order)
    known = {column.key: column for column in all_columns(runs)}
    # Also settings that are the same in all runs, which have no column.
    settings = dict.fromkeys(key for run in runs for key in run.settings)
    # Numbers and settings that differ have a column; any other setting gets one to sort by.
    column = known.get(sort) or (_setting(runs, sort, sort) if sort in settings else None)
    if column is None:
        close = nearest(sort, [*known, *settings])
        hint = f"Did you mean {close}? " if close else ""
        keys = ", ".join(number.key for number in numbers.NUMBERS if number.is_compared)
        raise UserError(
            f"--sort is {sort!r}, but must be run, state, a setting such as "
            f"train.micro_batch_size, or one of {keys}. "
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


def distinct(texts: list[str], shorter: Callable[[str], str]) -> list[str]:
    """Shorten texts, except for different ones whose short forms would be equal."""
    short = [shorter(text) for text in texts]
    origins: dict[str, set[str]] = {}
    for text, brief in zip(texts, short, strict=True):
        origins.setdefault(brief, set()).add(text)
    return [
        brief if len(origins[brief]) == 1 else text
        for text, brief in zip(texts, short, strict=True)
    ]


def _says_something(column: Column) -> bool:
    hides_zero = column.number is not None and column.number.hides_zero
    return any(value is not None and not (hides_zero and value == 0) for value in column.values)


def _setting_text(value: Any) -> str:
    """A setting as a recipe writes it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_setting_text, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _short_key(key: str) -> str:
    """A key without its groups, except eval.sets, whose names mean nothing alone."""
    return key.removeprefix("eval.") if key.startswith("eval.sets.") else key.rpartition(".")[2]


def _setting(runs: list[ComparedRun], key: str, label: str, *, priority: int = LAST) -> Column:
    values = [run.settings.get(key) for run in runs]
    texts = [_setting_text(value) for value in values]
    if key in ("optimizer", "data", "strategy"):
        # Class paths are shown by the name of the class.
        texts = distinct(texts, lambda text: text.rpartition(".")[2])
    return Column(
        key=key, label=label, values=values, texts=texts, priority=priority, is_setting=True
    )


def _best(runs: list[ComparedRun], number: ReportNumber) -> frozenset[int]:
    """Runs with the best value among those that ended well; none if all are equal as shown."""
    values = {i: number.of(run.report) for i, run in enumerate(runs) if run.state in ENDED_WELL}
    rivals = {i: value for i, value in values.items() if value is not None}
    # One run alone is not the best of anything.
    if number.better is None or len(rivals) < 2:
        return frozenset()
    if number.needs_equal_work:
        reports = [runs[i].report for i in rivals]
        # A run that did less is faster for that reason; a resumed one has times of one session.
        work = {report.progress and report.progress.samples for report in reports}
        if len(work) > 1 or any(report.resumed for report in reports):
            return frozenset()
    if number.is_of_objective and len({_validated(runs[i].report) for i in rivals}) > 1:
        return frozenset()
    pick = min if number.better == "lower" else max
    winner = pick(rivals, key=lambda i: rivals[i])
    texts = {i: number.text_in(runs[i].report) for i in rivals}
    # As shown: two losses that read the same are equally good.
    best = frozenset(i for i in rivals if texts[i] == texts[winner])
    return frozenset() if len(best) == len(rivals) else best


def _validated(report: Report) -> str:
    """Objective that the validation of a run measures, with its options."""
    objective = report.recipe.get("objective") or {"class_path": "sft"}
    if objective["class_path"] in CROSS_ENTROPIES:
        return "cross-entropy"
    return json.dumps(objective, sort_keys=True)


def _default_order(run: ComparedRun) -> tuple[int, float, float, str]:
    loss = finite(run.report.validation_loss)
    speed = run.report.throughput.tokens_per_s if run.report.throughput else 0.0
    group = 0 if run.state in ENDED_WELL else 1 if run.state in AT_WORK else 2
    # Losses are shown with four digits.
    return group, math.inf if loss is None else round(loss, 4), -speed, run.name


def _source_numbers(runs: list[ComparedRun]) -> list[ReportNumber]:
    """Losses on each source of the data, if there are several, and each set of eval.sets."""
    return [
        ReportNumber(
            key=loss_column(name),
            label=f"loss on {name}",
            definition=f"Validation loss on {name}, in nats per label token.",
            value=_loss_on(name),
            text=loss_text,
            better="lower",
            is_of_objective=True,
            priority=6,
        )
        for name in dict.fromkeys(name for run in runs for name in _losses(run.report))
    ]


def _term_numbers(runs: list[ComparedRun]) -> list[ReportNumber]:
    """Numbers that objectives report beside the loss, on the validation data after training."""
    terms = {name: term for run in runs for name, term in run.report.terms.items()}
    return [
        ReportNumber(
            key=term_column(name),
            label=f"val {term_title(name)}",
            definition=f"{term_title(name).capitalize()} of the objective on validation samples.",
            value=_term_after(name),
            text=percent_text if term.is_share else loss_text,
            better="higher" if term.is_share else None,
            priority=6,
        )
        for name, term in terms.items()
    ]


def _term_after(name: str) -> Callable[[Report], float | None]:
    def value(report: Report) -> float | None:
        term = report.terms.get(name)
        return None if term is None else term.validation_last

    return value


def _loss_on(name: str) -> Callable[[Report], float | None]:
    return lambda report: _losses(report).get(name)


def _losses(report: Report) -> dict[str, float | None]:
    """Losses of the result by name of its source or set."""
    parts, chosen = report.sources | report.sets, report.result
    if chosen is not None:
        return {name: chosen.losses.get(column_name(name)) for name in parts}
    # No validation came after a step: the losses are those of the base model.
    if report.loss is not None and report.loss.is_of_start:
        return {}
    return {name: part.validation_last for name, part in parts.items()}


def _own_metrics(runs: list[ComparedRun]) -> Iterator[ReportNumber]:
    """Scores of the user's functions; only their author knows whether high values are good."""
    scores = [score for run in runs for score in run.report.scores if score.sha256 is not None]
    files: dict[str, set[str | None]] = {}
    for score in scores:
        files.setdefault(score.name, set()).add(score.sha256)
    for name, sha256 in dict.fromkeys(score.identity for score in scores):
        # Functions of the same name are distinguished by the checksums of their files.
        label = name if len(files[name]) == 1 else f"{name} ({str(sha256)[:8]})"
        yield ReportNumber(
            key=f"metric.{label}",
            label=label,
            definition=f"Mean of {name} over answers to validation records, after training.",
            value=score_after(name, sha256),
            text=number_text,
            priority=12,
        )


def _task_numbers(runs: list[ComparedRun]) -> Iterator[ReportNumber]:
    """Metrics of lm-evaluation-harness tasks after training."""
    directions = {
        (score.task, score.name): score.higher_is_better
        for run in runs
        for score in run.report.tasks
    }
    for (task, name), higher_is_better in directions.items():
        better: Better = "higher" if higher_is_better else "lower"
        yield ReportNumber(
            key=f"tasks/{task}/{name}",
            label=f"{task} {name}",
            definition=f"{name} of the task {task}, after training.",
            value=_task_after(task, name),
            text=score_text,
            better=None if higher_is_better is None else better,
            priority=12,
        )


def _task_after(task: str, name: str) -> Callable[[Report], float | None]:
    def value(report: Report) -> float | None:
        scores = (s.after for s in report.tasks if (s.task, s.name) == (task, name))
        return next(scores, None)

    return value
