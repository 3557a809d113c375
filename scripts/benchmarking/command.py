"""Shared by the commands of ``scripts/benchmark``: options, and the files of figures."""

import argparse
import json
from pathlib import Path
from typing import Any, Protocol

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"
Figures = dict[str, Any]
"""Measurements of a command, as in its JSON file."""


class Benchmark(Protocol):
    """A module that is a command of ``scripts/benchmark``."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of this command alone."""

    def measure(self, options: argparse.Namespace) -> Figures:
        """Measure what the options select; `keep` is called after each run."""

    def markdown(self, figures: Figures) -> str:
        """Format the figures as tables."""

    def draw(self, figures: Figures, picture: Path) -> None:
        """Draw the figures as a picture, if there is anything to draw."""

    def exit_code(self, figures: Figures) -> int:
        """Return 0 unless the figures show that the benchmark failed."""


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all commands."""
    parser.add_argument("--steps", type=int, help="of every run, instead of the usual number")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check that it runs")
    parser.add_argument("--limit_s", type=float, default=300, help="of one run; default: 300")
    parser.add_argument(
        "--out", type=Path, help="JSON file for the figures; a .md and a .svg are written beside it"
    )
    parser.add_argument(
        "--go_on", action="store_true", help="keep the runs that --out has and that did not fail"
    )
    parser.add_argument("--models", type=Path, help="directory for models, which are kept there")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only show these figures")
    parser.add_argument(
        "--write", action="store_true",
        help=f"put the tables of --out or --show into docs/{DOCUMENT.name}, too",
    )  # fmt: skip


def run(benchmark: Benchmark, options: argparse.Namespace) -> int:
    """Measure, or show earlier figures; return the exit code."""
    if options.write and not (options.show or options.out):
        raise SystemExit("--write names the file of the figures in the document. Add --out FILE.")
    figures = json.loads(options.show.read_text()) if options.show else benchmark.measure(options)
    text = benchmark.markdown(figures)
    print(text)
    if options.out and not options.show:
        options.out.with_suffix(".md").write_text(text + "\n")
        benchmark.draw(figures, options.out.with_suffix(".svg"))
    if options.write:
        file = (options.show or options.out).name
        DOCUMENT.write_text(with_tables(DOCUMENT.read_text(), text, file))
    return 0 if options.show else benchmark.exit_code(figures)


def with_tables(document: str, text: str, file: str) -> str:
    """Return the document with new tables in place of the old ones.

    Args:
        document: with a mark where the tables begin and one where they end.
        text: the tables.
        file: name of the file with the figures, whose first word names their place.
    """
    place = file.partition("-")[0]
    start, end = f"<!-- tables: {place} -->\n", "<!-- end -->"
    before, found, rest = document.partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"docs/{DOCUMENT.name} has no place for tables of {file}.")
    return f"{before}{start}{text}\n\nFigures: `{file}`.\n{end}{after}"


def begun(options: argparse.Namespace, empty: Figures) -> Figures:
    """Return the figures of --out that the command continues, or empty ones.

    Runs that failed are left out, so that they are done again.
    """
    if not (options.go_on and options.out and options.out.exists()):
        return empty
    found: Figures = json.loads(options.out.read_text())
    for name in ("runs", "pairs"):
        if name in found:
            found[name] = [row for row in found[name] if not has_failed(row)]
    return found


def has_failed(row: Figures) -> bool:
    """Return whether a measurement of a row has a failure."""
    return any(isinstance(value, dict) and value.get("failure") for value in row.values())


def not_counted(figures: Figures) -> str:
    """The steps that are not counted, in words: "the first 2 ..."."""
    rows = (*figures.get("runs", ()), *figures.get("pairs", ()))
    runs = [value for row in rows for value in row.values() if isinstance(value, dict)]
    slowed = " and those in which ftkit followed memory or compiled"
    first = f"the first {figures['warm_up_steps']} steps"
    return first + (slowed if any(run.get("slowed") for run in runs) else "")


def keep(figures: Figures, options: argparse.Namespace) -> None:
    """Write the figures so far: a command may be ended at any time."""
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
