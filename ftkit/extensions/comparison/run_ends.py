"""ftkit compare as a next command at the end of a run."""

import shlex
from pathlib import Path

from ftkit.recipe.recipe import Recipe
from ftkit.runs.directory import RunDirectory
from ftkit.runs.run_ends import RunEnd
from ftkit.utils.urls import display_path


def _next_commands(run: RunDirectory, _: Recipe) -> list[str]:
    other = _newest_beside(run)
    if other is None:
        return []
    this, beside = (shlex.quote(display_path(path)) for path in (run.path, other))
    return [f"ftkit compare {this} {beside}"]


def _newest_beside(run: RunDirectory) -> Path | None:
    """The newest among the other runs in the same directory."""
    beside = [
        path
        for path in run.path.parent.iterdir()
        if path.name != run.path.name and RunDirectory(path).report.exists()
    ]
    return max(beside, key=lambda path: path.stat().st_mtime, default=None)


ROWS = (RunEnd(name="comparison", next_commands=_next_commands),)
