"""`ftkit report`: the report of a run, or what a bug report needs as a text to read and to send.

The text holds no records: a log shows a question of the validation data with its answers, which
are left out, and so are these rows of the report's table in it.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.extensions.diagnostics.commands import ReportOptions
from ftkit.redaction import shown
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.report import Report
from ftkit.runs.report.table import end_text, render
from ftkit.runs.state import look
from ftkit.utils.console.display import Display
from ftkit.utils.files import write_durably
from ftkit.utils.hardware import hardware, versions
from ftkit.utils.json_values import for_json, with_secrets_hidden
from ftkit.utils.progress import print_next, print_notice, print_shown
from ftkit.utils.urls import display_path
from ftkit.utils.yaml_files import dump_yaml, load_yaml

_FIRST_LINES, _LAST_LINES = 100, 300
"""Lines of a log that are kept: a page of an issue takes no more."""
_ROW = re.compile(r"example |  (?:with|expected|before|after) ")
"""Beginnings of the rows of a report's table that show a record and answers to it."""
_FURTHER = re.compile(r" {4}")
"""Beginning of the further lines of a row."""


def show_report(options: ReportOptions) -> int:
    """Show the report of a run, or its diagnostics; return the exit code.

    Raises:
        UserError: the run or its report is missing, or the file cannot be written.
    """
    run = RunDirectory(options.out_dir.expanduser())
    if not options.diagnostics:
        found = look(run.path)
        if found.report is None:
            raise UserError(f"{display_path(run.path)} has not measured anything yet.")
        with Display(None) as display:
            display.show(render(found.report, run.path))
        return 0
    text = diagnostics(run)
    print_shown(text)
    if options.out is None:
        this = shlex.quote(display_path(run.path))
        print_next(f"ftkit report {this} --diagnostics --out bug.md")
        return 0
    try:
        write_durably(options.out.expanduser(), text + "\n")
    except OSError as error:
        raise UserError(
            f"--out {options.out} cannot be written: {error.strerror}. Name a file in an existing "
            "directory."
        ) from None
    print_notice(f"ftkit: written to {options.out}; read it before you share it", sys.stderr)
    return 0


def diagnostics(run: RunDirectory) -> str:
    """What a bug report needs of a run, as Markdown.

    Args:
        run: in any state; one that was killed early has no report.

    Raises:
        UserError: the run is missing.
    """
    state, report = "without a report", None
    try:
        found = look(run.path)
        state, report = found.state.replace("_", " "), found.report
    except UserError:
        if not run.is_run():
            raise
    text = "\n".join(_sections(run, state, report))
    return shown(text).replace(str(Path.home()), "~")


def _sections(run: RunDirectory, state: str, report: Report | None) -> Iterator[str]:
    yield "# ftkit diagnostics"
    yield "Without records, answers, passwords and tokens; names of files and models are in it."
    yield f"\n- run: {display_path(run.path)}, {state}"
    if report is not None:
        yield f"- end: {end_text(report)}"
        yield f"- command: {shlex.join(report.command)}"
    known = {} if report is None else report.versions
    yield "\n## Versions\n"
    yield from (f"- {name} {text}" for name, text in (known or versions()).items())
    if known and (changed := dict(versions().items() - known.items())):
        yield f"- now: {', '.join(f'{name} {text}' for name, text in sorted(changed.items()))}"
    machine = report and report.hardware
    yield from _fenced("Hardware" if machine else "Hardware of now", asdict(machine or hardware()))
    if report is not None and report.resolved is not None:
        yield from _fenced("Resolved", for_json(asdict(report.resolved)))
    recipe = {} if report is None else report.recipe
    with suppress(UserError):
        recipe = recipe or load_yaml(run.recipe)
    yield from _fenced("Recipe", with_secrets_hidden(recipe))
    if report is not None and report.warnings:
        yield "\n## Warnings\n"
        yield from (f"- {warning}" for warning in report.warnings)
    with suppress(OSError):
        log = run.log.read_text(encoding="utf-8", errors="replace")
        yield "\n## Log\n\n~~~text"
        yield from _shortened(list(without_records(log.splitlines())))
        yield "~~~"


def _fenced(title: str, values: dict[str, Any]) -> Iterator[str]:
    said = {key: value for key, value in values.items() if value not in (None, [], {})}
    yield f"\n## {title}\n\n~~~yaml\n{dump_yaml(said)}~~~"


def without_records(lines: list[str]) -> Iterator[str]:
    """The lines of a log but for those that show a record of the data or an answer to it.

    Args:
        lines: each with its time before it, where the run itself has written it.
    """
    asks = is_row = False
    for line in lines:
        _, time_ends, text = line.partition("Z ")
        text = text if time_ends else line
        # A question may have several lines; the answer is one.
        if asks or text.startswith("sample: "):
            asks = not text.startswith("answer: ")
            continue
        is_row = _ROW.match(text) is not None or (is_row and _FURTHER.match(text) is not None)
        if not is_row:
            yield line


def _shortened(lines: list[str]) -> list[str]:
    left_out = len(lines) - _FIRST_LINES - _LAST_LINES
    if left_out <= 0:
        return lines
    return [*lines[:_FIRST_LINES], f"... {left_out:,} lines ...", *lines[-_LAST_LINES:]]
