"""`ftkit compare`: runs side by side, for the command, for Python, and in a notebook."""

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from ftkit.errors import UserError
from ftkit.extensions.comparison import table
from ftkit.extensions.comparison.columns import in_order
from ftkit.extensions.comparison.commands import CompareOptions
from ftkit.extensions.comparison.plots import Picture, check_plot, save_plot
from ftkit.extensions.comparison.runs import ComparedRun, LeftOutRun, read_runs
from ftkit.utils.console.display import Display
from ftkit.utils.console.terminal import plain_text
from ftkit.utils.process import print_line
from ftkit.utils.progress import OnProgress, print_notice, print_shown
from ftkit.utils.urls import display_path

_WIDTH = 120
"""Characters of a line of `str(comparison)`, which has no terminal to measure."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Runs side by side."""

    runs: list[ComparedRun]
    """Runs in the order in which they are shown."""
    left_out: list[LeftOutRun]
    """Paths that are not compared, with the reasons."""

    def table(self) -> table.ComparisonTable:
        """Return a table for rich, as wide as the terminal."""
        return table.ComparisonTable(self.runs)

    def to_markdown(self) -> str:
        """Return a table with the best values in bold."""
        return table.as_markdown(self.runs)

    def to_csv(self) -> str:
        """Return raw values, a row for each run."""
        return table.as_csv(self.runs)

    def to_json(self) -> dict[str, Any]:
        """Return raw values, ready for JSON."""
        return table.as_json(self.runs, self.left_out)

    @overload
    def plot(self) -> Picture: ...

    @overload
    def plot(self, path: str | Path) -> Path: ...

    def plot(self, path: str | Path | None = None) -> Path | Picture:
        """Draw losses, memory and throughput.

        Args:
            path: a PNG, or an HTML page with the table; None: a picture that a notebook shows.

        Raises:
            UserError: matplotlib is missing, the name has another ending, or it cannot be written.
        """
        return Picture.of(self.runs) if path is None else save_plot(self.runs, Path(path))

    def __str__(self) -> str:
        return plain_text(self.table(), _WIDTH)

    def __repr__(self) -> str:
        return f"<ftkit comparison of {', '.join(run.name for run in self.runs)}>"

    def _repr_html_(self) -> str:
        return table.comparison_as_html(self.runs)


_FORMATS: dict[str, Callable[[Comparison], str]] = {
    "json": lambda comparison: json.dumps(comparison.to_json(), indent=2),
    "csv": Comparison.to_csv,
    "markdown": Comparison.to_markdown,
}
"""Formats of --format other than the table."""


def compare(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    sort: str | None = None,
    progress: OnProgress | None = None,
) -> Comparison:
    """Compare runs, regardless of how they ended.

    Args:
        paths: runs (each its out_dir), or directories that hold runs; one, or several.
        sort: a column to sort by; see `ftkit.extensions.comparison.columns.in_order`.
        progress: called before each run is read.

    Raises:
        UserError: none of the paths leads to a run, or there is no such column.
    """
    # A run is a path as well: `compare(run)`.
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    runs, left_out = read_runs(several, progress)
    if not runs:
        reasons = "; ".join(f"{display_path(item.path)} {item.reason}" for item in left_out)
        raise UserError(
            f"There is nothing to compare: {reasons or 'no run is named'}. Name the out_dir of "
            "runs, such as ftkit compare out/finetune/lora out/finetune/lora-2."
        )
    return Comparison(runs=in_order(runs, sort), left_out=left_out)


def compare_runs(options: CompareOptions) -> int:
    """Print a comparison and draw it; return the exit code."""
    if options.plot is not None:
        # Before runs are read, which may take long.
        check_plot(options.plot)
    # Standard output is for the comparison, which another program may read.
    with Display(None, stream=sys.stderr) as display:
        with display.phase("reading runs", brief=True) as phase:
            comparison = compare(options.runs, sort=options.sort, progress=phase.advance)
        _show(comparison, options)
        if options.plot is not None:
            with display.phase(f"drawing {options.plot}", brief=True):
                comparison.plot(options.plot)
            print_notice(f"ftkit: drawn into {options.plot}", sys.stderr)
    return 0


def _show(comparison: Comparison, options: CompareOptions) -> None:
    for item in comparison.left_out:
        print_line(f"ftkit: {display_path(item.path)} {item.reason}: left out")
    if options.format in _FORMATS:
        print_shown(_FORMATS[options.format](comparison))
    else:
        with Display(None) as display:
            display.show(comparison.table())
