"""The view of an experiment: what is new in it, and a line each for prediction and measurement."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ftkit.planning.predict import Planned
from ftkit.planning.table import plans_as_html, verdict
from ftkit.recipe.parsing import to_dict
from ftkit.recipe.recipe import Recipe
from ftkit.recipe.recipe_keys import shown_value
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.report import Report
from ftkit.runs.report.table import report_as_html
from ftkit.runs.state import RunState
from ftkit.strategies.step_memory import Breakdown
from ftkit.utils.console.html import block, escaped, grid
from ftkit.utils.names import leaves
from ftkit.views.notebook.run_view import (
    MEASURED,
    folded,
    memory_table,
    over_time,
    speed_texts,
    state_as_html,
)

_SAY_NOTHING = ("out_dir", "resume", "access_token")
"""Keys in which any two experiments differ."""


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
    parts = {_where(planned): (Breakdown(**planned.memory.breakdown_bytes), verdict(planned))}
    rest = [folded("all that was predicted", plans_as_html([planned]))]
    told = []
    if report is not None:
        told = _told(planned, report)
        rest.append(folded("all that was measured", report_as_html(report)))
        if (memory := report.step_memory) is not None:
            parts[MEASURED] = (memory.fullest.peak_breakdown_bytes, "")
    head = f"{state_as_html(name, state)} {escaped(', '.join(told))}"
    return (
        block(head, _changes(changed))
        + memory_table(parts)
        + over_time(RunDirectory(state.out_dir).system)
        + block(*rest)
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
            _value(difference.before),
            f"<b>{_value(difference.now)}</b>",
        ]
        for difference in changed
    ]
    return grid(["what is new", "before", "now"], rows) if rows else ""


def _value(value: Any) -> str:
    """As it is in the recipe; a long one, such as a path, takes several lines."""
    text = value if isinstance(value, str) else shown_value(value)
    return f'<span style="white-space:normal;overflow-wrap:anywhere">{escaped(text)}</span>'


def _where(planned: Planned) -> str:
    gpu = planned.gpu.name if planned.gpu is not None else planned.plan.accelerator
    return f"predicted, {gpu}"


def _told(planned: Planned, report: Report) -> list[str]:
    """How the run ended, what ran in place of what was predicted, and how fast."""
    told = [report.exit_reason]
    resolved = report.resolved
    if resolved is not None and resolved.base_model not in (None, planned.base_model):
        told.append(f"{resolved.base_model} in place of {planned.base_model}")
    return [*told, *speed_texts(report)]
