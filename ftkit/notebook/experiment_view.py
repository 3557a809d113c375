"""The view of an experiment: what is new in it, and a line each for prediction and measurement."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftkit.comparison.plots import PART_COLORS
from ftkit.config.parsing import to_dict
from ftkit.config.recipe import Recipe
from ftkit.config.recipe_keys import shown_value
from ftkit.console.formatting import bytes_text, duration_text, number_text, percent_text
from ftkit.console.html import block, curve_picture, escaped, grid, styled
from ftkit.errors import UserError
from ftkit.planner.predict import Planned
from ftkit.planner.table import plans_as_html, verdict
from ftkit.report.metrics import read_metrics
from ftkit.report.report import Report
from ftkit.report.step_memory import CATEGORIES, Breakdown, Category
from ftkit.report.table import STYLE_OF_OUTCOME, report_as_html
from ftkit.runs.directory import RunDirectory
from ftkit.runs.state import RunState
from ftkit.utils.dotted_keys import leaves

_SAY_NOTHING = ("out_dir", "resume", "access_token")
"""Keys in which any two experiments differ."""
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
_BAR_WIDTH, _BAR_HEIGHT = 160, 12
_CURVE = 300, 50
_FEWEST_SAMPLES = 5
"""In a curve; they are two seconds apart."""
_SERIES = (
    ("GPU memory", "GPU", "device0_memory_bytes", "device0_utilization"),
    ("host memory", "CPU", "host_memory_bytes", "host_cpu_utilization"),
)
"""What is measured of what, and its columns in system.csv: the first GPU, or else the host."""


@dataclass(frozen=True)
class Difference:
    """A key of a recipe that has another value than in the experiment before."""

    key: str
    """As on the command line."""
    before: Any
    """Its value there; None: empty."""
    now: Any
    """Its value here."""


def changed_keys(before: Recipe, now: Recipe) -> list[Difference]:
    """Keys of both recipes with other values; of full and LoRA fine-tuning first the method."""
    found = [Difference("method", before.method, now.method)] * (before.method != now.method)
    others = _keys_of(before)
    found += [
        Difference(key, others[key], value)
        for key, value in _keys_of(now).items()
        if key in others and others[key] != value
    ]
    return found


def experiment_as_html(
    name: str, changed: Sequence[Difference], planned: Planned, state: RunState
) -> str:
    """An experiment as HTML.

    Args:
        name: its name.
        changed: what is new in its recipe.
        planned: what was predicted.
        state: of its run.
    """
    report = state.report
    words = styled(state.state.replace("_", " "), STYLE_OF_OUTCOME.get(state.state, "bold red"))
    parts = {_where(planned): (Breakdown(**planned.memory.breakdown_bytes), verdict(planned))}
    folded = [_folded("all that was predicted", plans_as_html([planned]))]
    told = []
    if report is not None:
        told = _told(planned, report)
        folded.append(_folded("all that was measured", report_as_html(report)))
        if (memory := report.step_memory) is not None:
            parts["measured here"] = (memory.fullest.peak_breakdown_bytes, "")
    return (
        block(f"<b>{escaped(name)}</b> {words} {escaped(', '.join(told))}", _changes(changed))
        + _table(parts)
        + _over_time(RunDirectory(state.out_dir).system)
        + block(*folded)
    )


def _keys_of(recipe: Recipe) -> dict[str, Any]:
    """Every key with its value, as the command line calls them."""
    return {
        key.replace(".init_args", "").removesuffix(".class_path"): value
        for key, value in leaves(to_dict(recipe))
        if key not in _SAY_NOTHING
    }


def _changes(changed: Sequence[Difference]) -> str:
    rows = [
        [
            f"<code>{escaped(difference.key)}</code>",
            escaped(_value(difference.before)),
            f"<b>{escaped(_value(difference.now))}</b>",
        ]
        for difference in changed
    ]
    return grid(["what is new", "before", "now"], rows) if rows else ""


def _value(value: Any) -> str:
    return value if isinstance(value, str) else shown_value(value)


def _where(planned: Planned) -> str:
    gpu = planned.gpu.name if planned.gpu is not None else planned.plan.accelerator
    return f"predicted, {gpu}"


def _told(planned: Planned, report: Report) -> list[str]:
    """How the run ended, what ran in place of what was predicted, and how fast."""
    told = [report.exit_reason]
    resolved, phases, speed = report.resolved, report.phases_s, report.throughput
    if resolved is not None and resolved.base_model not in (None, planned.base_model):
        told.append(f"{resolved.base_model} in place of {planned.base_model}")
    if phases is not None and phases.training:
        told.append(f"{duration_text(phases.training)} of training")
    if speed is not None:
        told.append(f"{number_text(speed.tokens_per_s)} tokens/s")
    return told


def _table(parts: dict[str, tuple[Breakdown, str]]) -> str:
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


def _over_time(file: Path) -> str:
    """How much memory was taken and how busy the device was, from sample to sample."""
    try:
        rows = read_metrics(file)
    except (OSError, UserError):  # a run of an earlier version has none
        return ""
    cells = []
    for memory, device, taken_in, used_as in _SERIES:
        taken = [value for row in rows if (value := row.get(taken_in)) is not None]
        used = [value for row in rows if (value := row.get(used_as)) is not None]
        if taken and used:
            most, mean = bytes_text(int(max(taken))), percent_text(sum(used) / len(used))
            cells.append(f"{memory}: at most {most}{_curve(taken, max(taken))}")
            cells.append(f"{device} busy: {mean} on average{_curve(used, 1.0)}")
            break
    return grid([], [cells]) if cells else ""


def _curve(values: Sequence[float], high: float) -> str:
    """The values from sample to sample, from zero up, if they are enough for a curve."""
    if len(values) < _FEWEST_SAMPLES or not high:
        return ""
    return f"<br>{curve_picture(values, *_CURVE, bounds=(0.0, high))}"


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
            f'fill="{_colour(category)}">'
            f"<title>{_HEADS[category]} {percent_text(share)}</title></rect>"
        )
        left += share * _BAR_WIDTH
    return (
        f'<svg viewBox="0 0 {_BAR_WIDTH} {_BAR_HEIGHT}" width="{_BAR_WIDTH}" '
        f'height="{_BAR_HEIGHT}" role="img" aria-label="shares of the peak">{"".join(pieces)}</svg>'
    )


def _colour(category: Category) -> str:
    return PART_COLORS[category.replace("_", " ")]


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escaped(title)}</summary>{content}</details>"
