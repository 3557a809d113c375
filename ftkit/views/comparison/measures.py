"""Measures of a comparison: what came out of runs, as numbers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from ftkit.runs.report.answers import score_text
from ftkit.runs.report.metrics import loss_column
from ftkit.runs.report.report import Report
from ftkit.strategies.step_memory import Breakdown
from ftkit.utils.console.formatting import (
    bytes_text,
    duration_text,
    loss_text,
    number_text,
    percent_text,
)
from ftkit.utils.names import column_name
from ftkit.views.comparison.runs import ComparedRun

ROUGE_L = "rouge_l"
VALIDATION_LOSS = "validation_loss"
Better = Literal["lower", "higher"]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Something that came out of a run."""

    key: str
    """Its name in JSON and CSV, and for sorting."""
    head: str
    """Its name in tables."""
    value: Callable[[Report], float | None]
    """Of a run; None: not reached."""
    text: Callable[[Any], str]
    """As people read it."""
    better: Better | None = None
    """Which values are good."""


def _of(section: str, name: str) -> Callable[[Report], float | None]:
    """A number of a section of the report."""
    return lambda report: getattr(getattr(report, section), name, None)


def _of_scores(name: str, sha256: str | None) -> Callable[[Report], float | None]:
    """A score of answers after training."""

    def value(report: Report) -> float | None:
        found = (score.after for score in report.scores if score.identity == (name, sha256))
        return next(found, None)

    return value


def _of_step_memory(name: str) -> Callable[[Report], float | None]:
    """Bytes of a category at the peak of the measured steps, on the rank that needs most."""

    def value(report: Report) -> float | None:
        memory = report.step_memory
        return getattr(memory.fullest.peak_breakdown_bytes, name) if memory else None

    return value


def _of_prediction(name: str) -> Callable[[Report], float | None]:
    """What was expected of the measured step."""
    return lambda report: getattr(report.step_memory and report.step_memory.predicted, name, None)


MEASURES = (
    Measure(key="steps", head="steps", value=_of("progress", "steps"), text=number_text),
    Measure(
        key="restarts",
        head="restarts",
        value=lambda report: len(report.restarts),
        text=number_text,
    ),
    Measure(key="loss", head="loss", value=_of("loss", "last"), text=loss_text),
    Measure(
        key=VALIDATION_LOSS,
        head="val loss",
        value=lambda report: report.validation_loss,
        text=loss_text,
        better="lower",
    ),
    Measure(
        key="exact_match",
        head="exact match",
        value=_of("exact_match", "after"),
        text=percent_text,
        better="higher",
    ),
    Measure(
        key=ROUGE_L,
        head="ROUGE-L",
        value=_of_scores(ROUGE_L, None),
        text=number_text,
        better="higher",
    ),
    Measure(
        key="tokens_per_s",
        head="tokens/s",
        value=_of("throughput", "tokens_per_s"),
        text=number_text,
        better="higher",
    ),
    Measure(
        key="mfu", head="MFU", value=_of("throughput", "mfu"), text=percent_text, better="higher"
    ),
    Measure(
        key="expert_load_highest",
        head="most asked expert",
        value=_of("expert_load", "highest"),
        text=percent_text,
    ),
    Measure(
        key="time_s",
        head="time",
        value=_of("phases_s", "total"),
        text=duration_text,
        better="lower",
    ),
    Measure(
        key="training_s",
        head="training",
        value=_of("phases_s", "training"),
        text=duration_text,
        better="lower",
    ),
    Measure(
        key="allocated_bytes",
        head="peak memory",
        value=_of("peak_memory", "allocated_bytes"),
        text=bytes_text,
        better="lower",
    ),
    Measure(
        key="reserved_bytes",
        head="reserved",
        value=_of("peak_memory", "reserved_bytes"),
        text=bytes_text,
        better="lower",
    ),
    Measure(
        key="tensors_bytes",
        head="tensors",
        value=_of_step_memory("total"),
        text=bytes_text,
        better="lower",
    ),
    Measure(
        key="predicted_bytes",
        head="predicted",
        value=_of_prediction("peak_bytes"),
        text=bytes_text,
    ),
    Measure(
        key="prediction_error",
        head="off by",
        value=_of_prediction("error_fraction"),
        text=lambda fraction: f"{fraction * 100:+z.1f} %",
    ),
    *(
        Measure(
            key=f"{part.name}_bytes",
            head=part.name.replace("_", " "),
            value=_of_step_memory(part.name),
            text=bytes_text,
        )
        for part in fields(Breakdown)
    ),
    Measure(
        key="host_bytes",
        head="host memory",
        value=_of("peak_memory", "host_bytes"),
        text=bytes_text,
        better="lower",
    ),
)
"""All of them, in the order of the table."""
OWN = "metric."
"""What keys of metrics of one's own begin with."""
OF_SOURCES = loss_column("")
"""Before the names of sources and sets in keys."""
OF_TASKS = "tasks/"
"""Before the names of tasks in keys."""


def measures_of(runs: list[ComparedRun]) -> tuple[Measure, ...]:
    """All measures, also those that no run has, and those of sources, of one's own and of tasks."""
    of_sources = 1 + next(i for i, measure in enumerate(MEASURES) if measure.key == VALIDATION_LOSS)
    place = 1 + next(i for i, measure in enumerate(MEASURES) if measure.key == ROUGE_L)
    return (
        *MEASURES[:of_sources],
        *_source_measures(runs),
        *MEASURES[of_sources:place],
        *_own_metrics(runs),
        *_task_measures(runs),
        *MEASURES[place:],
    )


def _source_measures(runs: list[ComparedRun]) -> list[Measure]:
    """Losses on each source of the data, where there are several, and each set of eval.sets."""
    names = dict.fromkeys(name for run in runs for name in _losses(run.report))
    return [
        Measure(
            key=loss_column(name),
            head=f"loss on {name}",
            value=_of_source(name),
            text=loss_text,
            better="lower",
        )
        for name in names
    ]


def _losses(report: Report) -> dict[str, float | None]:
    """Of the result, by names of sources and sets."""
    parts, chosen = report.sources | report.sets, report.result
    if chosen is not None:
        return {name: chosen.losses.get(column_name(name)) for name in parts}
    if report.loss is not None and report.loss.is_of_start:
        return {}
    return {name: part.validation_last for name, part in parts.items()}


def _of_source(name: str) -> Callable[[Report], float | None]:
    return lambda report: _losses(report).get(name)


def _own_metrics(runs: list[ComparedRun]) -> Iterator[Measure]:
    """A measure for each function; only its author knows whether much is good."""
    scores = [score for run in runs for score in run.report.scores if score.sha256 is not None]
    files: dict[str, set[str | None]] = {}
    for score in scores:
        files.setdefault(score.name, set()).add(score.sha256)
    for name, sha256 in dict.fromkeys(score.identity for score in scores):
        # Functions of one name are told apart by what their files hold.
        head = name if len(files[name]) == 1 else f"{name} ({str(sha256)[:8]})"
        yield Measure(
            key=f"{OWN}{head}", head=head, value=_of_scores(name, sha256), text=number_text
        )


def _task_measures(runs: list[ComparedRun]) -> list[Measure]:
    """Numbers of tasks after training."""
    found: dict[str, Measure] = {}
    for score in (score for run in runs for score in run.report.tasks):
        key = f"{OF_TASKS}{score.task}/{score.name}"
        better: Better = "higher" if score.higher_is_better else "lower"
        found[key] = Measure(
            key=key,
            head=f"{score.task} {score.name}",
            value=_of_task(score.task, score.name),
            text=score_text,
            better=None if score.higher_is_better is None else better,
        )
    return list(found.values())


def _of_task(task: str, name: str) -> Callable[[Report], float | None]:
    """A number of a task after training."""

    def value(report: Report) -> float | None:
        found = (s.after for s in report.tasks if (s.task, s.name) == (task, name))
        return next(found, None)

    return value
