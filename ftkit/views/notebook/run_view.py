"""The view of a run that has ended: what was learned, what it took, and the rest folded."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path

from ftkit.errors import UserError
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.metrics import Row, read_metrics
from ftkit.runs.report.report import Report
from ftkit.runs.report.rows import end_text, essential_rows, subject_text
from ftkit.runs.report.table import STYLE_OF_OUTCOME, report_as_html
from ftkit.runs.state import RunState
from ftkit.strategies.step_memory import CATEGORIES, Breakdown, Category, StepMemory
from ftkit.utils.console.curve import means
from ftkit.utils.console.formatting import bytes_text, duration_text, number_text, percent_text
from ftkit.utils.console.html import as_image, block, curve_picture, escaped, grid, labelled, styled
from ftkit.views.comparison.plots import PART_COLORS

MEASURED = "measured here"
_HEADS: dict[Category, str] = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "temporaries": "temporary",
    "unattributed": "other",
}
_VISIBLE = 1 / 500
"""Share of a peak from which on a part of it has a column."""
_BAR_WIDTH, _BAR_HEIGHT = 120, 12
_CURVE = 300, 50
_CURVE_POINTS = 150
_FEWEST_SAMPLES = 5
"""In a curve."""
_BREAK_S = 2.5
"""Samples are two seconds apart; a longer time between two is one in which nothing ran."""
_SERIES = (
    ("GPU memory", "GPU", "device0_memory_bytes", "device0_utilization"),
    ("host memory", "CPU", "host_memory_bytes", "host_cpu_utilization"),
)
"""What is measured of what, and its columns in system.csv: the first GPU, or else the host."""


def ended_as_html(run: RunState) -> str:
    """A run that has ended; of one that was killed, that there is no report."""
    series = over_time(RunDirectory(run.out_dir).system)
    if run.report is None or run.state == "killed":
        words = "It was killed before it could write a report."
        return block(state_as_html(short(run.out_dir), run), words) + series
    report, out_dir = run.report, short(run.out_dir)
    return (
        block(
            f"{state_as_html(out_dir, run)} {escaped(end_text(report))}",
            escaped(", ".join((subject_text(report), *speed_texts(report)))),
            labelled(essential_rows(report, out_dir)),
        )
        + _memory(report.step_memory)
        + series
        + block(folded("all that was measured", report_as_html(report, out_dir)))
    )


def summary_as_html(run: RunState) -> str:
    """A run that has ended, in a line."""
    reason = run.report.exit_reason if run.report else ""
    return f"{state_as_html(short(run.out_dir), run)} {escaped(reason)}"


def short(path: Path) -> Path:
    """A path as people write it here."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def state_as_html(name: object, run: RunState) -> str:
    """What it is called, and the word for how it ended."""
    style = STYLE_OF_OUTCOME.get(run.state, "bold red")
    return f"<b>{escaped(str(name))}</b> {styled(run.state.replace('_', ' '), style)}"


def speed_texts(report: Report) -> list[str]:
    """How long it trained, and how fast."""
    phases, speed = report.phases_s, report.throughput
    told = []
    if phases is not None and phases.training:
        told.append(f"{duration_text(phases.training)} of training")
    if speed is not None:
        told.append(f"{number_text(speed.tokens_per_s)} tokens/s")
    return told


def memory_table(parts: dict[str, tuple[Breakdown, str]]) -> str:
    """A line for each peak, by where it is from, with a word on it."""
    shown = [
        category
        for category in CATEGORIES
        if any(getattr(peak, category) > _VISIBLE * peak.total for peak, _ in parts.values())
    ]
    rows = [
        [
            escaped(label),
            _bar(peak, shown),
            f"<b>{escaped(bytes_text(peak.total))}</b> {escaped(word)}",
            *(_part(category, getattr(peak, category)) for category in shown),
        ]
        for label, (peak, word) in parts.items()
    ]
    heads = ["", "", "peak memory", *(_HEADS[category] for category in shown)]
    return grid(heads, rows, range(2, len(heads)))


def over_time(file: Path) -> str:
    """How much memory was taken and how busy the device was, over the time of training.

    Args:
        file: system.csv. Where there is none, as in runs of earlier versions, nothing is shown.
    """
    try:
        rows = read_metrics(file)
    except (OSError, UserError):
        return ""
    cells = []
    for memory, device, taken_in, used_as in _SERIES:
        known = [r for r in rows if r.get(taken_in) is not None and r.get(used_as) is not None]
        if known:
            taken, used = _column(known, taken_in), _column(known, used_as)
            times = _column(known, "time_s")
            passed = [0.0, *(min(max(b - a, 0.0), _BREAK_S) for a, b in pairwise(times))]
            most, mean = bytes_text(int(max(taken))), percent_text(_mean(passed, used))
            curve = _curve(f"{memory} over time", passed, taken, max(taken))
            cells.append(f"{memory}: at most {most}{curve}")
            curve = _curve(f"use of the {device} over time", passed, used, 1.0)
            cells.append(f"{device} busy: {mean} on average{curve}")
            break
    return grid([], [cells]) if cells else ""


def folded(title: str, content: str) -> str:
    """Content that is seen once its title is clicked."""
    return f"<details><summary>{escaped(title)}</summary>{content}</details>"


def _memory(measured: StepMemory | None) -> str:
    """The fullest rank's peak, and what was expected of rank 0."""
    if measured is None:
        return ""
    parts = {MEASURED: (measured.fullest.peak_breakdown_bytes, "")}
    if (expected := measured.predicted) is not None:
        error = f"({expected.error_fraction * 100:+z.1f} %)"
        parts = {"predicted": (expected.peak_breakdown_bytes, error)} | parts
    return memory_table(parts)


def _column(rows: Sequence[Row], name: str) -> list[float]:
    return [float(row[name] or 0) for row in rows]


def _mean(passed: Sequence[float], values: Sequence[float]) -> float:
    """Each sample counts for the time since the one before it."""
    if not sum(passed):
        return sum(values) / len(values)
    return sum(map(mul, values, passed)) / sum(passed)


def _curve(words: str, passed: Sequence[float], values: Sequence[float], high: float) -> str:
    """The values above a line at zero, with the time below it, if they are enough for a curve."""
    if len(values) < _FEWEST_SAMPLES or not high:
        return ""
    at = means(list(accumulate(passed)), _CURVE_POINTS)
    picture = curve_picture(means(values, _CURVE_POINTS), *_CURVE, bounds=(0.0, high), at=at)
    ends = ("0 s", " time ", duration_text(sum(passed)))
    return (
        '<div style="border-bottom:1px solid #8888;line-height:0">'
        f"{as_image(picture, words)}</div>"
        '<div style="display:flex;justify-content:space-between;opacity:0.7">'
        f"{''.join(f'<span>{escaped(end)}</span>' for end in ends)}</div>"
    )


def _part(category: Category, count: int) -> str:
    """A part of the memory, with the colour that it has in the bar."""
    mark = f'<span style="color:{_colour(category)}" aria-hidden="true">&#9632;</span>'
    return f"{mark} {escaped(bytes_text(count))}"


def _bar(parts: Breakdown, shown: Sequence[Category]) -> str:
    """The parts of a peak as one bar, as long for any peak: what dominates is seen."""
    left, pieces = 0.0, []
    for category in shown:
        share = getattr(parts, category) / (parts.total or 1)
        pieces.append(
            f'<rect x="{left:.1f}" y="0" width="{share * _BAR_WIDTH:.1f}" height="{_BAR_HEIGHT}" '
            f'fill="{_colour(category)}"></rect>'
        )
        left += share * _BAR_WIDTH
    drawing = (
        f'<svg viewBox="0 0 {_BAR_WIDTH} {_BAR_HEIGHT}" width="{_BAR_WIDTH}" '
        f'height="{_BAR_HEIGHT}">{"".join(pieces)}</svg>'
    )
    return as_image(drawing, "shares of the peak")


def _colour(category: Category) -> str:
    return PART_COLORS[category.replace("_", " ")]
