"""The grid of labels and values in which results are shown on a terminal."""

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ftkit.utils.console.formatting import printable


def labelled_grid(rows: Iterable[tuple[str | Text, RenderableType]]) -> Table:
    """A label and a value on each line, without box characters; text is shown as it is."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="cyan")
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(
            Text(label) if isinstance(label, str) else label,
            Value(value) if isinstance(value, str) else value,
        )
    return grid


class Value:
    """A text whose lines break between words, but not between a number and its unit."""

    def __init__(self, text: str) -> None:
        self._text = printable(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        joined = Text(_BEFORE_UNIT.sub(_JOINT, self._text))
        lines = joined.wrap(console, options.max_width, overflow="fold")
        yield Text("\n".join(line.plain.rstrip() for line in lines).replace(_JOINT, " "))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, Text(self._text))


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMG]iB|B|ms|s|min|h)\b|%)")
_JOINT = "\ue000"
"""As wide as a space, and nothing that lines break at."""
