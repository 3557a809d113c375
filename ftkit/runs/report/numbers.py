"""Numbers of the report, each declared once: where its value is from, its name, unit and meaning.

The table of a report, report.json, comparisons and their pages, `ftkit watch` and the views of
notebooks read `NUMBERS`. A new number is one more declaration in it, for example::

    ReportNumber(
        key="tokens_per_wh",
        label="tokens/Wh",
        text=number_text,
        definition="Tokens trained on for each watt-hour that the GPUs took.",
        better="higher",
        measure=lambda report: ...,
    )
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

import docstring_parser

from ftkit.runs.report.report import Report
from ftkit.strategies.step_memory import Breakdown
from ftkit.utils.console.formatting import (
    bytes_text,
    count_text,
    duration_text,
    loss_text,
    number_text,
    percent_text,
)
from ftkit.utils.finite_numbers import finite

Better = Literal["lower", "higher"]
LAST = 99
"""Priority of numbers that a narrow table leaves out first."""


@dataclass(frozen=True, kw_only=True)
class ReportNumber:
    """A number of the report.

    Its value is one of three: what `measure` returns, what lies at `path`, or what `value` computes
    from the rest of the report.
    """

    key: str
    """Its name in the JSON and CSV of comparisons, and to sort them by."""
    label: str
    """Its name in tables."""
    text: Callable[[Any], str]
    """Formats a value with its unit."""
    definition: str = ""
    """Its meaning in a sentence; empty: the text below the field at `path`."""
    better: Better | None = None
    """Which values are better, lower or higher; None: neither."""
    measure: Callable[[Report], float | None] | None = None
    """Measures it on rank 0, called every few seconds of training and at the end with the report so
    far; report.json has the last value as numbers.KEY. None: it is elsewhere in the report."""
    path: str = ""
    """Where it is in the report, with dots: throughput.mfu."""
    value: Callable[[Report], float | None] | None = None
    """Computes it from the report."""
    up_to: Callable[[Report], float | None] | None = None
    """Total that it counts up to; shown after a slash until it is reached."""
    row: str = ""
    """Label of the row of the report's table that it is part of; empty: it has a row of its own."""
    phrase: str = "{}"
    """Format of its text in that row."""
    is_compared: bool = True
    """True if comparisons have a column of it."""
    needs_equal_work: bool = False
    """True if only runs that trained on equally many samples in one session can be compared."""
    is_of_objective: bool = False
    """True if only runs whose validation measures the same objective can be compared."""
    hides_zero: bool = False
    """True if tables to read leave it out where it is zero in every run."""
    priority: int = LAST
    """Tables that are too narrow keep the columns of the lowest priorities."""

    def of(self, report: Report) -> float | None:
        """Value in a report; None: it was not reached, or is not finite."""
        if self.value is not None:
            return finite(self.value(report))
        if not self.path:
            return finite(report.numbers.get(self.key))
        found: Any = report
        for name in self.path.split("."):
            # A section that was not reached is None, which has no such field.
            found = getattr(found, name, None)
        return finite(found)

    def text_in(self, report: Report) -> str:
        """Text of its value in a report; empty: it was not reached."""
        value = self.of(report)
        if value is None:
            return ""
        total = None if self.up_to is None else self.up_to(report)
        unreached = total is not None and value < total
        return f"{self.text(value)}/{self.text(total)}" if unreached else self.text(value)

    def phrase_in(self, report: Report) -> str:
        """Text of its value in a row with others; empty: it was not reached."""
        text = self.text_in(report)
        return text and self.phrase.format(text)

    @functools.cached_property
    def meaning(self) -> str:
        """Its meaning: `definition`, or the text below its field."""
        return self.definition or _text_below(self.path)


def _text_below(path: str) -> str:
    """Text below a field of the report, or docstring of a property of it."""
    kind, text = Report, ""
    for name in path.split("."):
        defined = getattr(kind, name, None)
        if isinstance(defined, property):
            text = (defined.fget.__doc__ or "") if defined.fget else ""
            hint = get_type_hints(defined.fget)["return"]
        else:
            text = _field_texts(kind)[name]
            hint = get_type_hints(kind)[name]
        # The class in "X | None".
        kind = next((part for part in get_args(hint) if part is not NoneType), hint)
    return " ".join(text.split())


@functools.cache
def _field_texts(section: type) -> dict[str, str]:
    params = docstring_parser.parse_from_object(section).params
    return {param.arg_name: param.description or "" for param in params}


def measured(report: Report, on_failure: Callable[[str], None]) -> dict[str, float | None]:
    """Measure the numbers that have a `measure`; return their values by key.

    Args:
        report: so far.
        on_failure: called with a warning for each number that fails, which is left out.
    """
    found: dict[str, float | None] = {}
    for number in NUMBERS:
        if number.measure is None:
            continue
        try:
            found[number.key] = number.measure(report)
        except Exception as error:  # a number must not end the run that it is of
            on_failure(
                f"the report lacks {number.label}, which cannot be measured: "
                f"{type(error).__name__}: {error}"
            )
    return found


def phrases(report: Report, row: str) -> list[str]:
    """Return phrases of the numbers in a row of the report's table; empty: not reached."""
    return [number.phrase_in(report) for number in NUMBERS if number.row == row]


def phrases_of(report: Report, *keys: str) -> list[str]:
    """Return phrases of some numbers, without those that are zero or were not reached."""
    by_key = {number.key: number for number in NUMBERS}
    return [by_key[key].phrase_in(report) for key in keys if by_key[key].of(report)]


def rows_of_their_own(report: Report) -> Iterator[tuple[str, str]]:
    """Return label and text of each number that is not part of another row."""
    return ((n.label, n.text_in(report)) for n in NUMBERS if not n.row)


def score_after(name: str, sha256: str | None) -> Callable[[Report], float | None]:
    """Return what reads a score of answers after training.

    Args:
        name: of the score.
        sha256: of the file that computes it; None: it is built in.
    """

    def value(report: Report) -> float | None:
        scores = (score.after for score in report.scores if score.identity == (name, sha256))
        return next(scores, None)

    return value


NUMBERS: tuple[ReportNumber, ...] = (
    ReportNumber(
        key="steps",
        label="steps",
        path="progress.steps",
        text=number_text,
        up_to=lambda report: report.resolved.total_steps if report.resolved else None,
        row="trained",
        priority=14,
    ),
    ReportNumber(
        key="restarts",
        label="restarts",
        definition="Sessions that continued the run after one that was lost or interrupted.",
        value=lambda report: len(report.restarts),
        text=number_text,
        row="restarted",
        hides_zero=True,
        priority=15,
    ),
    ReportNumber(
        key="loss",
        label="loss",
        path="loss.last",
        text=loss_text,
        row="loss",
        priority=9,
    ),
    ReportNumber(
        key="validation_loss",
        label="val loss",
        path="validation_loss",
        text=loss_text,
        better="lower",
        is_of_objective=True,
        row="validation",
        priority=5,
    ),
    ReportNumber(
        key="exact_match",
        label="exact match",
        path="exact_match.after",
        text=percent_text,
        better="higher",
        row="exact match",
        priority=11,
    ),
    ReportNumber(
        key="rouge_l",
        label="ROUGE-L",
        definition="Mean ROUGE-L of greedy answers to validation records, after the last step.",
        value=score_after("rouge_l", None),
        text=number_text,
        better="higher",
        row="ROUGE-L",
        priority=13,
    ),
    ReportNumber(
        key="tokens_per_s",
        label="tokens/s",
        path="throughput.tokens_per_s",
        text=number_text,
        better="higher",
        row="throughput",
        phrase="{} tokens/s",
        priority=2,
    ),
    ReportNumber(
        key="samples_per_s",
        label="samples/s",
        path="throughput.samples_per_s",
        text=number_text,
        row="throughput",
        phrase="{} samples/s",
        is_compared=False,
    ),
    ReportNumber(
        key="mfu",
        label="MFU",
        path="throughput.mfu",
        text=percent_text,
        better="higher",
        row="throughput",
        phrase="MFU {}",
        priority=18,
    ),
    ReportNumber(
        key="device_utilization",
        label="GPU busy",
        path="throughput.device_utilization",
        text=percent_text,
        row="throughput",
        phrase="GPU busy {}",
        is_compared=False,
    ),
    ReportNumber(
        key="energy_wh",
        label="energy",
        path="throughput.energy_wh",
        text=number_text,
        row="throughput",
        phrase="{} Wh",
        is_compared=False,
    ),
    ReportNumber(
        key="rank_imbalance",
        label="rank imbalance",
        path="throughput.rank_imbalance",
        text=number_text,
        row="throughput",
        phrase="fullest rank {} x the mean",
        is_compared=False,
    ),
    ReportNumber(
        key="window_steps",
        label="steps measured",
        path="throughput.window_steps",
        text=lambda steps: count_text(steps, "step"),
        row="throughput",
        phrase="over {}",
        is_compared=False,
    ),
    ReportNumber(
        key="compiled_graphs",
        label="compiled graphs",
        path="throughput.compiled_graphs",
        text=lambda graphs: count_text(graphs, "graph"),
        row="throughput",
        phrase="{} compiled",
        is_compared=False,
    ),
    ReportNumber(
        key="expert_load_highest",
        label="most used expert",
        path="expert_load.highest",
        text=percent_text,
        row="experts",
        priority=19,
    ),
    ReportNumber(
        key="time_s",
        label="time",
        path="phases_s.total",
        text=duration_text,
        better="lower",
        row="time",
        needs_equal_work=True,
        priority=8,
    ),
    ReportNumber(
        key="training_s",
        label="training",
        path="phases_s.training",
        text=duration_text,
        better="lower",
        row="time",
        phrase="{} of training",
        needs_equal_work=True,
        priority=17,
    ),
    ReportNumber(
        key="allocated_bytes",
        label="peak memory",
        definition="Highest device memory in tensors, as torch counts it, of the fullest rank.",
        path="peak_memory.allocated_bytes",
        text=bytes_text,
        better="lower",
        row="peak memory",
        priority=3,
    ),
    ReportNumber(
        key="reserved_bytes",
        label="reserved",
        definition="Highest device memory that torch took from the driver, of the fullest rank.",
        path="peak_memory.reserved_bytes",
        text=bytes_text,
        better="lower",
        row="peak memory",
        priority=16,
    ),
    ReportNumber(
        key="tensors_bytes",
        label="tensors",
        definition="Bytes in tensors at the peak of the measured steps, of the fullest rank.",
        path="step_memory.fullest.peak_breakdown_bytes.total",
        text=bytes_text,
        better="lower",
        row="step memory",
        priority=7,
    ),
    ReportNumber(
        key="predicted_bytes",
        label="predicted",
        definition="Bytes in tensors at the peak of the measured step of rank 0, as predicted.",
        path="step_memory.predicted.peak_bytes",
        text=bytes_text,
        row="predicted",
        priority=20,
    ),
    ReportNumber(
        key="prediction_error",
        label="off by",
        path="step_memory.predicted.error_fraction",
        text=lambda fraction: f"{fraction * 100:+z.1f} %",
        row="predicted",
        priority=21,
    ),
    *(
        ReportNumber(
            key=f"{part.name}_bytes",
            label=part.name.replace("_", " "),
            path=f"step_memory.fullest.peak_breakdown_bytes.{part.name}",
            text=bytes_text,
            row="step memory",
            hides_zero=True,
            priority=22 + number,
        )
        for number, part in enumerate(fields(Breakdown))
    ),
    ReportNumber(
        key="host_bytes",
        label="host memory",
        definition="Highest resident host memory without file-mapped pages, of the fullest rank.",
        path="peak_memory.host_bytes",
        text=bytes_text,
        better="lower",
        row="peak memory",
        priority=10,
    ),
)
"""All of them, in the order of the columns of a comparison."""
