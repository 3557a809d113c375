"""Table of a comparison: for a terminal of any width, as Markdown, CSV, JSON or HTML."""

import csv
import dataclasses
import html
import io
import re
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ftkit.extensions.comparison.columns import (
    Column,
    all_columns,
    distinct,
    number_columns,
    page_columns,
    setting_columns,
    shown_columns,
)
from ftkit.extensions.comparison.runs import ComparedRun, LeftOutRun
from ftkit.redaction import shown
from ftkit.runs.report.report import ENDED_WELL
from ftkit.runs.report.table import STYLE_OF_OUTCOME
from ftkit.utils.console.formatting import shortened
from ftkit.utils.console.html import GOOD
from ftkit.utils.urls import display_path

_GAP = 2
_LONGEST = 28
"""Most characters of a name or a setting in a terminal."""
_MOST_BLOCKS = 3
_LONGEST_IF_NARROW = 20
_LONGEST_LABEL = 10
"""Longer labels are broken at an underscore."""
_STYLE_OF_STATE: dict[str, str] = {
    **STYLE_OF_OUTCOME,
    "starting": "bold",
    "running": "bold",
    "killed": "bold red",
}
_BEST = "bold green"


class ComparisonTable:
    """Table for a terminal with a row for each run.

    If it is too wide, a few runs become blocks of columns, one below the other; of many runs, the
    rows are shortened.
    """

    def __init__(self, runs: list[ComparedRun]) -> None:
        self._runs = runs
        self._shown = shown_columns(runs)
        self._columns = [_for_terminal(column, _LONGEST) for column in self._shown]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if _width(self._columns) <= width:
            yield _by_rows(self._columns)
        # Otherwise it is transposed: a column for each run.
        elif blocks := _blocks(self._columns, width):
            for i, runs in enumerate(blocks):
                yield from [""] * (i > 0)
                yield _by_columns(self._columns, runs)
        else:
            # Many runs stay rows, with shorter texts and without the least important columns.
            kept = _narrowed([_for_terminal(c, _LONGEST_IF_NARROW) for c in self._shown], width)
            yield _by_rows(kept)
            keys = {column.key for column in kept}
            gone = [column.label for column in self._shown if column.key not in keys]
            if gone:
                yield Text(
                    f"left out for width: {', '.join(gone)} (--format csv has all)", style="dim"
                )
        if any(column.best for column in self._columns):
            yield Text("* best of the successful runs", style="dim")
        for note in notes(self._runs):
            yield Text(note, style="dim")


def notes(runs: list[ComparedRun]) -> list[str]:
    """Return notes on runs that ended early, or whose times are of their last session alone."""
    lines = []
    for run in runs:
        if run.state == "running":
            lines.append(f"{run.name}: running; see ftkit watch {run.out_dir}")
        elif run.state == "killed":
            lines.append(f"{run.name}: killed before it could write its report")
        elif run.state not in ENDED_WELL:
            lines.append(f"{run.name}: {shortened(run.report.exit_reason, 160)}")
        if resumed := run.report.resumed:
            lines.append(
                f"{run.name}: time, speed and memory are of its last session, "
                f"from step {resumed.from_step:,}"
            )
    return [shown(line) for line in lines]


def as_markdown(runs: list[ComparedRun]) -> str:
    """Return a table for a README or an issue, with the best values in bold."""
    columns = shown_columns(runs)
    lines = [
        [_markdown_cell(column.label) for column in columns],
        ["---:" if column.is_numeric else "---" for column in columns],
    ]
    for i in range(len(runs)):
        cells = [(_markdown_cell(column.texts[i]), i in column.best) for column in columns]
        lines.append([f"**{text}**" if best else text for text, best in cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def as_csv(runs: list[ComparedRun]) -> str:
    """Return every column with its raw values, for spreadsheets and scripts."""
    columns = all_columns(runs)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.key for column in columns] + ["out_dir", "exit_reason"])
    for i, run in enumerate(runs):
        values = [column.values[i] for column in columns]
        writer.writerow([*values, display_path(run.out_dir), run.report.exit_reason])
    # `print` adds the last line end.
    return text.getvalue().rstrip("\n")


def as_json(runs: list[ComparedRun], left_out: Sequence[LeftOutRun]) -> dict[str, Any]:
    """Return the runs with their settings that differ and their results, ready for JSON."""
    settings, results = setting_columns(runs), number_columns(runs)
    return {
        "runs": [
            {
                "run": run.name,
                "out_dir": display_path(run.out_dir),
                "state": run.state,
                "exit_reason": run.report.exit_reason,
                "settings": {column.key: column.values[i] for column in settings},
                "results": {column.key: column.values[i] for column in results},
                "memory_parts_bytes": run.memory_parts,
                "memory_limit_bytes": run.memory_limit_bytes,
                "best": [column.key for column in results if i in column.best],
            }
            for i, run in enumerate(runs)
        ],
        "left_out": [{"path": display_path(item.path), "reason": item.reason} for item in left_out],
    }


def comparison_as_html(runs: list[ComparedRun]) -> str:
    """Return the table as HTML with its notes; it needs no style sheet."""
    columns = page_columns(runs)
    heads = "".join(
        _html_cell("th", column, column.label, title=column.meaning) for column in columns
    )
    rows = []
    for i, run in enumerate(runs):
        cells = "".join(
            _html_cell("td", column, column.texts[i], best=i in column.best) for column in columns
        )
        rows.append(f'<tr class="{html.escape(run.state)}">{cells}</tr>')
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes(runs))
    return (
        f'<div style="overflow-x:auto"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div><ul>{items}</ul>"
    )


def _html_cell(tag: str, column: Column, text: str, *, best: bool = False, title: str = "") -> str:
    escaped = html.escape(shown(text))
    align = "right" if column.is_numeric else "left"
    wrap = ";white-space:nowrap" if column.is_numeric and tag == "td" else ""
    content = f'<b title="best" style="color:{GOOD}">{escaped}</b>' if best else escaped
    hint = f' title="{html.escape(title)}"' if title else ""
    return f'<{tag} style="text-align:{align}{wrap}"{hint}>{content}</{tag}>'


def _markdown_cell(text: str) -> str:
    # Names of runs and tasks contain underscores, which Markdown would read as emphasis.
    return re.sub(r"([\\|*`<\[\]]|\b_|_\b)", r"\\\1", shortened(text))


def _for_terminal(column: Column, longest: int) -> Column:
    """The column with shortened texts, and a star before the best."""

    def cut(text: str) -> str:
        # The middle is cut; `distinct` keeps texts whole that would become equal.
        half = (longest - 2) // 2
        return text if len(text) <= longest else f"{text[:half]}..{text[-half:]}"

    texts = distinct([shortened(text) for text in column.texts], cut)
    starred = [f"* {text}" if i in column.best else text for i, text in enumerate(texts)]
    return dataclasses.replace(column, texts=starred)


def _broken(label: str) -> str:
    """A label on two lines if it is long: micro_ and batch_size."""
    breaks = [i + 1 for i, letter in enumerate(label) if letter == "_"]
    if len(label) <= _LONGEST_LABEL or not breaks:
        return label
    middle = min(breaks, key=lambda i: abs(i - len(label) / 2))
    return f"{label[:middle]}\n{label[middle:]}"


def _column_width(column: Column) -> int:
    return max(map(cell_len, [*_broken(column.label).split("\n"), *column.texts]))


def _width(columns: list[Column]) -> int:
    return sum(map(_column_width, columns)) + _GAP * (len(columns) - 1)


def _blocks(columns: list[Column], width: int) -> list[list[int]]:
    """Indices of the runs in blocks that fit as columns; empty if they need too many blocks."""
    labels = max(cell_len(column.label) for column in columns)
    blocks: list[list[int]] = []
    left = 0
    for i in range(len(columns[0].texts)):
        needed = _GAP + max(cell_len(column.texts[i]) for column in columns)
        # A run does not fit beside the labels: no block would.
        if labels + needed > width:
            return []
        # A new block below starts with the labels again.
        if not blocks or needed > left:
            blocks.append([])
            left = width - labels
        blocks[-1].append(i)
        left -= needed
    return blocks if len(blocks) <= _MOST_BLOCKS else []


def _narrowed(columns: list[Column], width: int) -> list[Column]:
    """Return the columns that fit, chosen by priority, in their order."""
    kept: list[Column] = []
    for column in sorted(columns, key=lambda column: column.priority):
        # A column that is too wide does not keep out narrower ones that come later.
        if not kept or _width([*kept, column]) <= width:
            kept.append(column)
    return [column for column in columns if column in kept]


def _cell(column: Column, i: int) -> Text:
    style = _BEST if i in column.best else ""
    if column.key == "state":
        style = _STYLE_OF_STATE[column.values[i]]
    return Text(column.texts[i], style)


def _by_rows(columns: list[Column]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(
            Text(_broken(column.label)),
            justify="right" if column.is_numeric else "left",
            overflow="fold",
            # Only long names may wrap: numbers must stay whole.
            no_wrap=column.key != "run",
        )
    for i in range(len(columns[0].texts)):
        table.add_row(*(_cell(column, i) for column in columns))
    return table


def _by_columns(columns: list[Column], runs: list[int]) -> Table:
    table = Table.grid(padding=(0, _GAP, 0, 0))
    labels = max(cell_len(column.label) for column in columns)
    table.add_column(no_wrap=True, style="cyan", min_width=labels)
    for _ in runs:
        table.add_column(no_wrap=True)
    for column in columns:
        cells = [_cell(column, i) for i in runs]
        if column.key == "run":
            # Names are the heads of the columns.
            cells = [Text(cell.plain, "bold") for cell in cells]
        table.add_row(Text(column.label), *cells)
    return table
