"""The table of a report, for people."""

import re
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.rule import Rule
from rich.text import Text

from ftkit.runs.report.report import Report
from ftkit.runs.report.rows import end_text, measured_rows, subject_text, told_rows
from ftkit.utils.console.formatting import printable
from ftkit.utils.console.html import block, escaped, labelled, styled
from ftkit.utils.console.terminal import Value, labelled_grid
from ftkit.utils.remote.urls import display_path

STYLE_OF_OUTCOME: dict[str, str] = {
    "completed": "bold green",
    "stopped": "bold green",
    "interrupted": "bold yellow",
    "out_of_memory": "bold red",
    "failed": "bold red",
}
"""Of the word for how a run ended."""


def render(report: Report, out_dir: Path | None = None) -> Group:
    """The report as a table for people; what was not reached has no row.

    It has no box characters, so that it reads the same in a terminal, in a log file and without
    colour.

    Args:
        report: of a run with any outcome.
        out_dir: the run's directory as the reader should see it; without it, the paths of the
            files are shown as the report has them.
    """
    words = Text(report.outcome.replace("_", " "), STYLE_OF_OUTCOME[report.outcome])
    rows: list[tuple[str | Text, RenderableType]] = [
        (words, end_text(report)),
        *((label, _Parts(value)) for label, value in measured_rows(report) if value),
        *told_rows(report, out_dir),
    ]
    title = Text(printable(_title(report)), "bold")
    line = Rule(title, characters="-", align="left", style="dim")
    return Group(line, labelled_grid(rows))


def summary_line(report: Report, out_dir: Path) -> str:
    """How a run ended, and where its result is.

    Args:
        report: of the run.
        out_dir: the run's directory.
    """
    final = report.files and report.files.final
    result = f"; result in {display_path(out_dir / final)}" if final else ""
    return (
        f"{display_path(out_dir)}: {report.outcome.replace('_', ' ')}, {report.exit_reason}{result}"
    )


def report_as_html(report: Report, out_dir: Path | None = None) -> str:
    """The same as HTML for a notebook; see `render`."""
    words = styled(report.outcome.replace("_", " "), STYLE_OF_OUTCOME[report.outcome])
    return block(
        f"<b>{escaped(_title(report))}</b>",
        f"{words} {escaped(end_text(report))}",
        labelled((*measured_rows(report), *told_rows(report, out_dir))),
    )


def _title(report: Report) -> str:
    return f"ftkit {subject_text(report)}".rstrip()


class _Parts:
    """A text that wraps after its commas and colons; what is longer than a line, between words."""

    def __init__(self, text: str) -> None:
        self._text = printable(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, *rest = re.split("(?<=[,:]) ", self._text)
        lines = [first]
        for part in rest:
            if len(lines[-1]) + len(part) < options.max_width:
                lines[-1] += f" {part}"
            else:
                lines.append(part)
        yield Value("\n".join(lines))
