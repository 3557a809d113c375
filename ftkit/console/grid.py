"""The grid of labels and values in which results are shown on a terminal."""

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ftkit.console.formatting import printable


def labelled_grid(rows: Iterable[tuple[str | Text, RenderableType]]) -> Table:
    """A label and a value on each line, without box characters; text is shown as it is."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="cyan")
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(
            Text(label) if isinstance(label, str) else label,
            Text(printable(value)) if isinstance(value, str) else value,
        )
    return grid
