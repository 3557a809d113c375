"""The table of a comparison: for a terminal of any width, as Markdown, CSV, JSON or HTML."""

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

from ftkit.runs.report.report import ENDED_WELL
from ftkit.runs.report.table import STYLE_OF_OUTCOME
from ftkit.utils.console.formatting import printable, shortened
from ftkit.utils.console.html import GOOD
from ftkit.utils.remote.urls import display_path
from ftkit.views.comparison.columns import (
    Column,
    all_columns,
    by_worth,
    distinct,
    measure_columns,
    name_columns,
    setting_columns,
)
from ftkit.views.comparison.runs import ComparedRun, LeftOutRun

_GAP = 2
_LONGEST = 28
"""Characters of a name or a setting in a terminal."""
_MOST_BLOCKS = 3
_LONGEST_IF_NARROW = 20
_LONGEST_HEAD = 10
"""Longer heads are broken at an underscore."""
_STYLE_OF_STATE: dict[str, str] = {
    **STYLE_OF_OUTCOME,
    "starting": "bold",
    "running": "bold",
    "killed": "bold red",
}
_BEST = "bold green"


class ComparisonTable:
    """The table for a terminal: a row for each run, or a column where that is too wide.

    Few runs are shown in blocks of columns, one below the other; of many, the rows are shortened.
    """

    def __init__(self, runs: list[ComparedRun]) -> None:
        self._runs = runs
        self._shown = shown_columns(runs)
        self._columns = [_for_terminal(column, _LONGEST) for column in self._shown]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if _width(self._columns) <= width:
            yield _by_rows(self._columns)
        elif blocks := _blocks(self._columns, width):
            for i, runs in enumerate(blocks):
                yield from [""] * (i > 0)
                yield _by_columns(self._columns, runs)
        else:
            kept = _narrowed([_for_terminal(c, _LONGEST_IF_NARROW) for c in self._shown], width)
            yield _by_rows(kept)
            keys = {column.key for column in kept}
            gone = [column.head for column in self._shown if column.key not in keys]
            if gone:
                yield Text(
                    f"left out for width: {', '.join(gone)} (--format csv has all)", style="dim"
                )
        if any(column.best for column in self._columns):
            yield Text("* best of those that ended well", style="dim")
        for note in notes(self._runs):
            yield Text(note, style="dim")


def shown_columns(runs: list[ComparedRun]) -> list[Column]:
    """What a table for people shows: no measure that no run has."""
    measured = [column for column in measure_columns(runs) if any(column.values)]
    return [*name_columns(runs), *setting_columns(runs), *measured]


def notes(runs: list[ComparedRun]) -> list[str]:
    """What the numbers alone do not tell: why a run ended early, and what its times are of."""
    found = []
    for run in runs:
        if run.state == "running":
            found.append(f"{run.name}: at work; see ftkit watch {run.out_dir}")
        elif run.state == "killed":
            found.append(f"{run.name}: killed before it could write its report")
        elif run.state not in ENDED_WELL:
            found.append(f"{run.name}: {shortened(run.report.exit_reason, 160)}")
        if resumed := run.report.resumed:
            found.append(
                f"{run.name}: time, speed and memory are of its last session, "
                f"from step {resumed.from_step:,}"
            )
    return [printable(note) for note in found]


def as_markdown(runs: list[ComparedRun]) -> str:
    """A table for a README or an issue; the best values are bold."""
    columns = shown_columns(runs)
    lines = [
        [_markdown_cell(column.head) for column in columns],
        ["---:" if column.is_numeric else "---" for column in columns],
    ]
    for i in range(len(runs)):
        cells = [(_markdown_cell(column.texts[i]), i in column.best) for column in columns]
        lines.append([f"**{text}**" if best else text for text, best in cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def as_csv(runs: list[ComparedRun]) -> str:
    """Every column with its raw values, for spreadsheets and scripts."""
    columns = all_columns(runs)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.key for column in columns] + ["out_dir", "exit_reason"])
    for i, run in enumerate(runs):
        values = [column.values[i] for column in columns]
        writer.writerow([*values, display_path(run.out_dir), run.report.exit_reason])
    return text.getvalue().rstrip("\n")


def as_json(runs: list[ComparedRun], left_out: Sequence[LeftOutRun]) -> dict[str, Any]:
    """The runs with what differs and what came out, ready for JSON."""
    settings, measures = setting_columns(runs), measure_columns(runs)
    return {
        "runs": [
            {
                "run": run.name,
                "out_dir": display_path(run.out_dir),
                "state": run.state,
                "exit_reason": run.report.exit_reason,
                "settings": {column.key: column.values[i] for column in settings},
                "results": {column.key: column.values[i] for column in measures},
                "memory_parts_bytes": run.memory_parts,
                "memory_limit_bytes": run.memory_limit_bytes,
                "best": [column.key for column in measures if i in column.best],
            }
            for i, run in enumerate(runs)
        ],
        "left_out": [{"path": display_path(item.path), "reason": item.reason} for item in left_out],
    }


_SETTINGS_FIRST = 3
"""Settings that a page shows before the results; of more, the results come first."""


def comparison_as_html(runs: list[ComparedRun]) -> str:
    """The table as HTML, with its notes; needs no style sheet."""
    columns = shown_columns(runs)
    settings = [column for column in columns if column.is_setting]
    if len(settings) > _SETTINGS_FIRST:  # results are seen without scrolling
        others = [column for column in columns if not column.is_setting]
        columns = [*others, *settings]
    heads = "".join(_html_cell("th", column, column.head) for column in columns)
    rows = []
    for i, run in enumerate(runs):
        cells = "".join(
            _html_cell("td", column, column.texts[i], best=i in column.best) for column in columns
        )
        rows.append(f'<tr class="{html.escape(run.state)}">{cells}</tr>')
    said = "".join(f"<li>{html.escape(note)}</li>" for note in notes(runs))
    return (
        f'<div style="overflow-x:auto"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div><ul>{said}</ul>"
    )


def _html_cell(tag: str, column: Column, text: str, *, best: bool = False) -> str:
    escaped = html.escape(printable(text))
    align = "right" if column.is_numeric else "left"
    wrap = ";white-space:nowrap" if column.is_numeric and tag == "td" else ""
    content = f'<b title="best" style="color:{GOOD}">{escaped}</b>' if best else escaped
    return f'<{tag} style="text-align:{align}{wrap}">{content}</{tag}>'


def _markdown_cell(text: str) -> str:
    return re.sub(r"([\\|*`<\[\]]|\b_|_\b)", r"\\\1", shortened(text))


def _for_terminal(column: Column, longest: int) -> Column:
    """The column with texts of a bounded length, and a star before the best."""

    def cut(text: str) -> str:
        half = (longest - 2) // 2
        return text if len(text) <= longest else f"{text[:half]}..{text[-half:]}"

    texts = distinct([shortened(text) for text in column.texts], cut)
    starred = [f"* {text}" if i in column.best else text for i, text in enumerate(texts)]
    return dataclasses.replace(column, texts=starred)


def _broken(head: str) -> str:
    """A head of a row, on two lines if it is long: micro_ and batch_size."""
    breaks = [i + 1 for i, letter in enumerate(head) if letter == "_"]
    if len(head) <= _LONGEST_HEAD or not breaks:
        return head
    middle = min(breaks, key=lambda i: abs(i - len(head) / 2))
    return f"{head[:middle]}\n{head[middle:]}"


def _column_width(column: Column) -> int:
    return max(map(cell_len, [*_broken(column.head).split("\n"), *column.texts]))


def _width(columns: list[Column]) -> int:
    return sum(map(_column_width, columns)) + _GAP * (len(columns) - 1)


def _blocks(columns: list[Column], width: int) -> list[list[int]]:
    """The runs in blocks that fit as columns; none if there are too many for that."""
    heads = max(cell_len(column.head) for column in columns)
    blocks: list[list[int]] = []
    left = 0
    for i in range(len(columns[0].texts)):
        needed = _GAP + max(cell_len(column.texts[i]) for column in columns)
        if heads + needed > width:
            return []
        if not blocks or needed > left:
            blocks.append([])
            left = width - heads
        blocks[-1].append(i)
        left -= needed
    return blocks if len(blocks) <= _MOST_BLOCKS else []


def _narrowed(columns: list[Column], width: int) -> list[Column]:
    """As many of the columns as fit, those of most worth first, in their order."""
    kept: list[Column] = []
    for column in by_worth(columns):
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
            Text(_broken(column.head)),
            justify="right" if column.is_numeric else "left",
            overflow="fold",
            no_wrap=column.key != "run",
        )
    for i in range(len(columns[0].texts)):
        table.add_row(*(_cell(column, i) for column in columns))
    return table


def _by_columns(columns: list[Column], runs: list[int]) -> Table:
    table = Table.grid(padding=(0, _GAP, 0, 0))
    heads = max(cell_len(column.head) for column in columns)
    table.add_column(no_wrap=True, style="cyan", min_width=heads)
    for _ in runs:
        table.add_column(no_wrap=True)
    for column in columns:
        cells = [_cell(column, i) for i in runs]
        if column.key == "run":
            cells = [Text(cell.plain, "bold") for cell in cells]
        table.add_row(Text(column.head), *cells)
    return table
