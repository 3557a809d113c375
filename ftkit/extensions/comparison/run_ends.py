"""ftkit compare as a next command at the end of a run."""

import shlex
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.recipe.recipe import Recipe
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.report import read_report
from ftkit.runs.run_ends import RunEnd
from ftkit.utils.urls import display_path


def _next_commands(run: RunDirectory, _: Recipe) -> list[str]:
    other = _newest_beside(run)
    if other is None:
        return []
    this, beside = (shlex.quote(display_path(path)) for path in (run.path, other))
    return [f"ftkit compare {this} {beside}"]


def _newest_beside(run: RunDirectory) -> Path | None:
    """The newest among the runs of the same data and model in the same directory."""
    own = _subject(run.path)
    beside = [
        path
        for path in run.path.parent.iterdir()
        if path.name != run.path.name and RunDirectory(path).report.exists()
    ]
    # Losses on other data, or of another model's tokens, say nothing about each other.
    newest_first = sorted(beside, key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in newest_first if own and _subject(path) == own), None)


def _subject(directory: Path) -> tuple[Any, Any] | None:
    """Base model and data of a run, as its report has them; None: it has no report that is read."""
    try:
        recipe = read_report(RunDirectory(directory).report).recipe
    except UserError:
        return None
    return recipe.get("checkpoint_dir"), recipe.get("data")


ROWS = (RunEnd(name="comparison", next_commands=_next_commands),)
