"""Pictures of terminals, as SVG files that load nothing."""

import io
import re
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.terminal_theme import DIMMED_MONOKAI

_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Rich's pictures load a font from a server; without this the reader's own font is used."""


def drawn(shown: Iterable[RenderableType], *, width: int, title: str, name: str) -> str:
    """A picture of a terminal.

    Args:
        shown: what it shows, from above.
        width: columns.
        title: its title.
        name: prefix of identifiers in the file.
    """
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, highlight=False
    )
    for one in shown:
        console.print(one)
    return _FONT.sub("", console.export_svg(title=title, theme=DIMMED_MONOKAI, unique_id=name))
