"""Display of a run in a notebook cell or, in a program, as lines."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import Any, Protocol

from ftkit.errors import UserError
from ftkit.extensions.comparison.plots import PART_COLORS
from ftkit.extensions.watch.watch import Lines, RunSnapshot, means, snapshot_as_html
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report import numbers
from ftkit.runs.report.metrics import Row, read_system
from ftkit.runs.report.report import Report
from ftkit.runs.report.table import (
    STYLE_OF_OUTCOME,
    end_text,
    essential_rows,
    report_as_html,
    subject_text,
)
from ftkit.runs.state import RunState
from ftkit.strategies.step_memory import CATEGORIES, Breakdown, Category, StepMemory
from ftkit.utils import progress
from ftkit.utils.console.formatting import bytes_text, duration_text, percent_text
from ftkit.utils.console.html import as_image, block, curve_picture, escaped, grid, labelled, styled
from ftkit.utils.progress import print_shown


class OutputPlace(Protocol):
    """A place that shows a run while it is running."""

    interval_s: float
    """Time between two updates."""

    def say(self, text: str) -> None:
        """Show progress from before the run can be shown; empty: remove it."""

    def show(self, snapshot: RunSnapshot) -> None:
        """Show the present state of the run."""

    def conclude(self, run: RunState) -> None:
        """Show how it ended."""

    def note(self, text: str) -> None:
        """Show a note that stays."""


def place(ended: Callable[[RunState], str] | None = None) -> OutputPlace:
    """Return the cell that is being run or, without a notebook, standard output.

    Args:
        ended: returns the HTML of a run that has ended. Default: `ended_as_html`.
    """
    return Cell(ended or ended_as_html) if in_notebook() else Terminal()


def in_notebook() -> bool:
    """Return whether this process is a notebook kernel."""
    # Looked up and not imported: a kernel has imported it, and other processes may lack it.
    shell: Any = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")


@contextmanager
def shown_if_late(text: str) -> Iterator[None]:
    """Show a text while the block runs, if that takes long."""
    # Only what was shown is removed: a display of nothing would leave an empty output.
    output, is_shown = place(), False

    def show() -> None:
        nonlocal is_shown
        is_shown = True
        output.say(text)

    try:
        with progress.announced_if_late(show):
            yield
    finally:
        if is_shown:
            output.say("")


class Cell:
    """One display below the cell, updated in place until it shows the ended run."""

    interval_s = 0.5

    def __init__(self, ended: Callable[[RunState], str]) -> None:
        self._ended = ended
        self._handle: Any = None
        self._note = ""

    def say(self, text: str) -> None:
        self._put(escaped(text))

    def show(self, snapshot: RunSnapshot) -> None:
        self._put(snapshot_as_html(snapshot))

    def conclude(self, run: RunState) -> None:
        self._put(self._ended(run))

    def note(self, text: str) -> None:
        # Kept, and put below every later content: a display is replaced as a whole.
        self._note = styled(text, "bold")

    def _put(self, content: str) -> None:
        from IPython.display import HTML, display

        page = HTML(block(content, self._note) if self._note else content)
        # The first output makes the display, later ones replace its content.
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)


class Terminal:
    """Lines on standard output."""

    interval_s = 2.0

    def __init__(self) -> None:
        self._said = ""
        self._lines = Lines()

    def say(self, text: str) -> None:
        if text and text != self._said:
            print_shown(text)
            self._said = text

    def show(self, snapshot: RunSnapshot) -> None:
        self._lines.show(snapshot)

    def conclude(self, run: RunState) -> None:
        """Do nothing: the last line has said it."""

    def note(self, text: str) -> None:
        print_shown(text)


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
"""Smallest share of a peak at which a part of it has a column."""
_BAR_WIDTH, _BAR_HEIGHT = 120, 12
_CURVE = 300, 50
# A point for two pixels of the width.
_CURVE_POINTS = 150
_FEWEST_SAMPLES = 5
"""Fewest samples that are drawn as a curve."""
_BREAK_S = 2.5
"""Samples are two seconds apart; nothing ran in longer gaps."""
_SERIES = (
    ("GPU memory", "GPU", "device0_memory_bytes", "device0_utilization"),
    ("host memory", "CPU", "host_memory_bytes", "host_cpu_utilization"),
)
"""Names, and columns of system.csv, of the first GPU and of the host."""


def ended_as_html(run: RunState) -> str:
    """Return an ended run as HTML: results, costs, memory, and the whole report folded."""
    series = over_time(RunDirectory(run.out_dir).system)
    # The report of a killed run is not final.
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
    """Return name, state and reason of an ended run in a line of HTML."""
    reason = run.report.exit_reason if run.report else ""
    return f"{state_as_html(short(run.out_dir), run)} {escaped(reason)}"


def short(path: Path) -> Path:
    """Return a path relative to the current directory, if it lies in it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def state_as_html(name: object, run: RunState) -> str:
    """Return a name in bold, and how its run ended."""
    style = STYLE_OF_OUTCOME.get(run.state, "bold red")
    return f"<b>{escaped(str(name))}</b> {styled(run.state.replace('_', ' '), style)}"


def speed_texts(report: Report) -> list[str]:
    """Return how long a run trained and how fast, as far as that is known."""
    return numbers.phrases_of(report, "training_s", "tokens_per_s")


def memory_table(parts: dict[str, tuple[Breakdown, str]]) -> str:
    """Return a table with a row for each peak, with its parts as a bar and as numbers.

    Args:
        parts: a peak and a remark on it, by label.
    """
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
    """Return curves of memory and utilization over the time of training, as HTML.

    Args:
        file: system.csv; without it, as in runs of earlier versions, the result is empty.
    """
    try:
        rows = read_system(file)
    except UserError:
        return ""
    cells = []
    # Of the first GPU if it was sampled, else of the host.
    for memory, device, taken_in, used_as in _SERIES:
        known = [r for r in rows if r.get(taken_in) is not None and r.get(used_as) is not None]
        if known:
            taken, used = _column(known, taken_in), _column(known, used_as)
            times = _column(known, "time_s")
            # Time between sessions is cut out; a clock that was set back counts as no time.
            passed = [0.0, *(min(max(b - a, 0.0), _BREAK_S) for a, b in pairwise(times))]
            most, mean = bytes_text(int(max(taken))), percent_text(_mean(passed, used))
            curve = _curve(f"{memory} over time", passed, taken, max(taken))
            cells.append(f"{memory}: at most {most}{curve}")
            curve = _curve(f"use of the {device} over time", passed, used, 1.0)
            cells.append(f"{device} busy: {mean} on average{curve}")
            break
    return grid([], [cells]) if cells else ""


def folded(title: str, content: str) -> str:
    """Return content that is shown when its title is clicked."""
    return f"<details><summary>{escaped(title)}</summary>{content}</details>"


def _memory(measured: StepMemory | None) -> str:
    """Peak of the fullest rank, and the predicted peak of rank 0."""
    if measured is None:
        return ""
    parts = {MEASURED: (measured.fullest.peak_breakdown_bytes, "")}
    if (expected := measured.predicted) is not None:
        error = f"({expected.error_fraction * 100:+z.1f} %)"
        # The prediction stands above the measurement.
        parts = {"predicted": (expected.peak_breakdown_bytes, error)} | parts
    return memory_table(parts)


def _column(rows: Sequence[Row], name: str) -> list[float]:
    return [float(row[name] or 0) for row in rows]


def _mean(passed: Sequence[float], values: Sequence[float]) -> float:
    """Mean of samples, each weighted by the time since the one before it."""
    if not sum(passed):
        return sum(values) / len(values)
    return sum(map(mul, values, passed)) / sum(passed)


def _curve(words: str, passed: Sequence[float], values: Sequence[float], high: float) -> str:
    """Curve of the values over a time axis; empty if there are too few samples."""
    if len(values) < _FEWEST_SAMPLES or not high:
        return ""
    # Times are averaged like the values, so that each point lies in the middle of its samples.
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
    """Size of a part of the memory, with its colour in the bar."""
    mark = f'<span style="color:{_colour(category)}" aria-hidden="true">&#9632;</span>'
    return f"{mark} {escaped(bytes_text(count))}"


def _bar(parts: Breakdown, shown: Sequence[Category]) -> str:
    """Parts of a peak as one bar of constant length, which shows the largest ones."""
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
