"""What extensions do and suggest when a run has ended; no torch."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ftkit.recipe.recipe import Recipe
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.report import Report
from ftkit.utils.registry import Registry, imported


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """A part of the end of every run."""

    name: str
    next_commands: Callable[[RunDirectory, Recipe], list[str]]
    """Returns commands to try after a complete run, ready to be typed."""
    write: str = ""
    """MODULE:FUNCTION that writes files beside a result; it is called with the report of the run,
    the directory of its base model, and that of the result, which is complete without them. "": it
    writes none."""


RUN_ENDS: Registry[RunEnd] = Registry("run_ends", (RunEnd,), core=())


def write_beside_result(report: Report, base: Path, result: Path) -> None:
    """Write what extensions add to a result; a file that the disk has no room for is left out.

    Args:
        report: of the run, as it ends: no rank knows the last of its numbers.
        base: directory of the base model.
        result: directory of the result.
    """
    for row in RUN_ENDS:
        if row.write:
            with suppress(OSError):
                imported(row.write)(report, base, result)
