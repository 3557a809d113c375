"""Terminals, streams and text on them: redrawn lines, wrapped text, grids of labels and values."""

import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TextIO, cast

from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType, RenderResult
from rich.file_proxy import FileProxy
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ftkit.redaction import shown
from ftkit.utils.streams import discard

REPORT_WIDTH = 80
"""Width of tables where there is no terminal."""


class LastingStream:
    """A text stream that never raises; on_failure gets the first error."""

    def __init__(self, stream: TextIO, on_failure: Callable[[OSError], None]) -> None:
        self._stream = stream
        self._on_failure = on_failure
        self._failed = False

    @property
    def encoding(self) -> str:
        """Encoding of the stream; rich draws with ASCII characters where it is not Unicode."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def fileno(self) -> int:
        """File descriptor; raises OSError if there is none."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()

    def write(self, text: str) -> int:
        """Write and flush; characters the encoding lacks become question marks."""
        # A model may answer in any script, whatever the terminal shows.
        known = text.encode(self.encoding, "replace").decode(self.encoding)
        self._attempt(lambda: self._stream.write(known))
        self.flush()
        return len(text)

    def flush(self) -> None:
        """Flush."""
        self._attempt(self._stream.flush)

    def close(self) -> None:
        """Close."""
        self._attempt(self._stream.close)

    def discard(self) -> None:
        """Discard all further output, also what the interpreter flushes at its end."""
        discard(self._stream)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._on_failure(error)


class SafeConsole(Console):
    """A console that removes escapes and secrets of foreign text, but not its own styles."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Segments of a renderable, and of each of its parts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown(segment.text))


class _Terminal(SafeConsole):
    """A console as wide as its own stream, which leaves the cursor visible.

    A killed process could not show the cursor again. Rich measures descriptors 0 to 2, none of
    which is the terminal in a rank.
    """

    @property  # type: ignore[misc]  # nobody sets it
    def size(self) -> ConsoleDimensions:
        """Columns and lines; $COLUMNS, if it is set."""
        if "COLUMNS" not in os.environ:
            with suppress(OSError):
                columns, lines = os.get_terminal_size(self.file.fileno())
                # Some pseudo-terminals report a size of 0 x 0.
                if columns and lines:
                    return ConsoleDimensions(columns, lines)
        return super().size

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing."""
        return False


def terminal_of(stream: TextIO | LastingStream) -> Console | None:
    """The console of a stream on which lines can be redrawn; None for a pipe, file or notebook."""
    if not stream.isatty():
        return None
    # highlight=False: rich would colour every number in a message.
    terminal = _Terminal(
        file=cast(TextIO, stream), force_terminal=True, force_jupyter=False, highlight=False
    )
    return None if terminal.is_dumb_terminal else terminal


def plain_text(renderable: RenderableType, width: int = REPORT_WIDTH) -> str:
    """The renderable as text without escape sequences, at most `width` columns wide."""
    file = io.StringIO()
    console = SafeConsole(
        file=file,
        width=width,
        force_terminal=False,
        force_jupyter=False,
        color_system=None,
        highlight=False,
    )
    console.print(renderable)
    # Rich pads the cells of tables with spaces.
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def fitted(text: str, stream: TextIO) -> str:
    """The text, wrapped between words to the width of the terminal if the stream is one."""
    terminal = terminal_of(stream)
    return text if terminal is None else plain_text(Text(text), terminal.width)


def print_directly() -> None:
    """Undo rich's redirection in a forked process, such as one that loads data.

    A thread that was not forked may have held the lock of the console, which then stays locked.
    """
    if isinstance(sys.stdout, FileProxy):
        sys.stdout = sys.stdout.rich_proxied_file
    if isinstance(sys.stderr, FileProxy):
        sys.stderr = sys.stderr.rich_proxied_file


def labelled_grid(rows: Iterable[tuple[str | Text, RenderableType]]) -> Table:
    """A label and a value on each line, without box characters; text is not read as markup."""
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
        self._text = shown(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        joined = Text(_BEFORE_UNIT.sub(_JOINT, self._text))
        # Wrapped here, while the joints are in the text, and not by rich.
        lines = joined.wrap(console, options.max_width, overflow="fold")
        yield Text("\n".join(line.plain.rstrip() for line in lines).replace(_JOINT, " "))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, Text(self._text))


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMG]iB|B|ms|s|min|h)\b|%)")
# Of Unicode's private use area, because rich breaks lines at a no-break space.
_JOINT = "\ue000"
"""Placeholder as wide as a space, at which rich does not break lines."""
