"""What the extension adds to the end of a run: a model card, and ftkit merge as a next command."""

import shlex
from pathlib import Path

from ftkit.recipe.recipe import Recipe
from ftkit.runs.directory import RunDirectory
from ftkit.runs.run_ends import RunEnd
from ftkit.utils.urls import display_path, url_of


def _next_commands(run: RunDirectory, recipe: Recipe) -> list[str]:
    # ftkit merge writes to local disks only: for a run at a url, into the current directory.
    merged = Path(run.path.name if url_of(run.path) else run.path)
    merged = merged.with_name(f"{merged.name}-merged")
    # Of a base of random weights nothing is saved.
    if not run.final.is_dir() or recipe.method != "lora" or merged.exists():
        return []
    this = shlex.quote(display_path(run.path))
    return [f"ftkit merge {this} --out {shlex.quote(str(merged))}"]


ROWS = (
    RunEnd(
        name="publish",
        next_commands=_next_commands,
        write="ftkit.extensions.publish.model_card:write_card",
    ),
)
