"""Columns of a comparison: names, values, texts, and which of them are best."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from ftkit.comparison.runs import ComparedRun, differing_settings
from ftkit.console.formatting import bytes_text, duration_text, loss_text, number_text, percent_text
from ftkit.errors import UserError
from ftkit.report.answers import score_text
from ftkit.report.report import ENDED_WELL, Report
from ftkit.report.step_memory import Breakdown
from ftkit.runs.state import AT_WORK
from ftkit.utils.nearest import nearest

ROUGE_L = "rouge_l"
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
        key="validation_loss",
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
_TASKS = "tasks/"
"""Before the names of tasks in keys."""
_TIMES = ("time_s", "training_s")
_SETTING = "setting"
_WORTH = (
    "run",
    "state",
    "tokens_per_s",
    "allocated_bytes",
    _SETTING,
    _SETTING,
    "validation_loss",
    "tensors_bytes",
    "time_s",
    "loss",
    "host_bytes",
    "exact_match",
    OWN,
    ROUGE_L,
    "steps",
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

    @property
    def is_numeric(self) -> bool:
        """Whether its values stand below each other by their last digits."""
        return all(isinstance(v, int | float | None) for v in self.values) and not all(
            isinstance(v, bool | None) for v in self.values
        )


def setting_columns(runs: list[ComparedRun]) -> list[Column]:
    """The settings that differ."""
    keys = differing_settings(runs)
    measured = {measure.head.replace(" ", "_") for measure in MEASURES}
    short = distinct(keys, lambda key: key.rpartition(".")[2])
    heads = [key if head in measured else head for key, head in zip(keys, short, strict=True)]
    return [_setting(runs, key, head) for key, head in zip(keys, heads, strict=True)]


def measure_columns(runs: list[ComparedRun]) -> list[Column]:
    """All measures, also those that no run has, and those of one's own and of tasks."""
    place = 1 + next(i for i, measure in enumerate(MEASURES) if measure.key == ROUGE_L)
    measures = (*MEASURES[:place], *_own_metrics(runs), *_task_measures(runs), *MEASURES[place:])
    return [_measured(runs, measure) for measure in measures]


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
        key = f"{_TASKS}{score.task}/{score.name}"
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
            is_own = column.key.startswith((OWN, _TASKS))
            worth[column.key] = _WORTH.index(OWN if is_own else column.key)
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
