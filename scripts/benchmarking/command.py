"""What the commands of ``scripts/benchmark`` share: options, and where their figures go."""

import argparse
import json
from pathlib import Path
from typing import Any, Protocol

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"
Figures = dict[str, Any]
"""What a command has measured, as it stands in its JSON file."""


class Benchmark(Protocol):
    """A module that is a command of ``scripts/benchmark``."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Options of this command alone."""

    def measure(self, asked: argparse.Namespace) -> Figures:
        """Measure what was asked; `keep` is called after each run."""

    def markdown(self, figures: Figures) -> str:
        """The figures as tables."""

    def draw(self, figures: Figures, picture: Path) -> None:
        """The figures as a picture, if there is anything to draw."""

    def exit_code(self, figures: Figures) -> int:
        """0 unless the figures say that nothing came of it."""


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Options of all commands."""
    parser.add_argument("--steps", type=int, help="of every run, instead of what is usual")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--limit_s", type=float, default=300, help="of one run; default: 300")
    parser.add_argument(
        "--out", type=Path, help="JSON file for the figures; a .md and a .svg come beside it"
    )
    parser.add_argument("--go_on", action="store_true", help="keep the runs that --out has")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only show these figures")
    parser.add_argument(
        "--write", action="store_true",
        help=f"put the tables of --out or --show into docs/{DOCUMENT.name}, too",
    )  # fmt: skip


def run(benchmark: Benchmark, asked: argparse.Namespace) -> int:
    """Measure what was asked, or show what was measured; the exit code."""
    if asked.write and not (asked.show or asked.out):
        raise SystemExit("--write names the file of the figures in the document. Add --out FILE.")
    figures = json.loads(asked.show.read_text()) if asked.show else benchmark.measure(asked)
    text = benchmark.markdown(figures)
    print(text)
    if asked.out and not asked.show:
        asked.out.with_suffix(".md").write_text(text + "\n")
        benchmark.draw(figures, asked.out.with_suffix(".svg"))
    if asked.write:
        file = (asked.show or asked.out).name
        DOCUMENT.write_text(with_tables(DOCUMENT.read_text(), asked.command, text, file))
    return 0 if asked.show else benchmark.exit_code(figures)


def with_tables(document: str, command: str, text: str, file: str) -> str:
    """The document with the tables of a command at its place.

    Args:
        document: has a mark where they begin and one where they end.
        command: of ``scripts/benchmark``.
        text: the tables.
        file: name of that with the figures.
    """
    start, end = f"<!-- made by scripts/benchmark {command} -->\n", "<!-- end -->"
    before, found, rest = document.partition(start)
    _, closed, after = rest.partition(end)
    assert found and closed, f"{DOCUMENT} has no place for the tables of {command}"
    return f"{before}{start}{text}\n\nFigures: `{file}`.\n{end}{after}"


def begun(asked: argparse.Namespace, empty: Figures) -> Figures:
    """The figures of --out that the command goes on with, or none yet."""
    if asked.go_on and asked.out and asked.out.exists():
        found: Figures = json.loads(asked.out.read_text())
        return found
    return empty


def keep(figures: Figures, asked: argparse.Namespace) -> None:
    """Write what there is so far: a command may be ended at any time."""
    if asked.out:
        asked.out.write_text(json.dumps(figures, indent=1) + "\n")
