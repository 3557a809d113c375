"""The display of a run in a notebook cell, or plain lines in a program."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ftkit.runs.state import RunState
from ftkit.utils import progress
from ftkit.utils.console.html import block, escaped, styled
from ftkit.views.notebook.run_view import ended_as_html
from ftkit.views.watch import Lines, Sight, sight_as_html


class OutputPlace(Protocol):
    """Shows a run while it is at work."""

    interval_s: float
    """Time between two looks at the run."""

    def say(self, text: str) -> None:
        """What happens before there is anything to see of the run; empty: no more."""

    def show(self, sight: Sight) -> None:
        """How the run is now."""

    def conclude(self, run: RunState) -> None:
        """How it has ended."""

    def note(self, text: str) -> None:
        """A word to whoever looks on; stays."""


def place(ended: Callable[[RunState], str] | None = None) -> OutputPlace:
    """The cell that is being run; without a notebook, standard output.

    Args:
        ended: what a cell shows of a run that has ended, as HTML. Default: `ended_as_html`.
    """
    return Cell(ended or ended_as_html) if in_notebook() else Terminal()


def in_notebook() -> bool:
    """Whether this process is a kernel, whose cells show HTML."""
    shell: Any = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")


@contextmanager
def shown_if_late(text: str) -> Iterator[None]:
    """Show that something goes on while the block does, if it takes long."""
    shown, told = place(), False

    def tell() -> None:
        nonlocal told
        told = True
        shown.say(text)

    try:
        with progress.told_if_late(tell):
            yield
    finally:
        if told:
            shown.say("")


class Cell:
    """One display below the cell, updated in place; it ends as the view of the ended run."""

    interval_s = 0.5

    def __init__(self, ended: Callable[[RunState], str]) -> None:
        self._ended = ended
        self._handle: Any = None
        self._note = ""

    def say(self, text: str) -> None:
        self._put(escaped(text))

    def show(self, sight: Sight) -> None:
        self._put(sight_as_html(sight))

    def conclude(self, run: RunState) -> None:
        self._put(self._ended(run))

    def note(self, text: str) -> None:
        self._note = styled(text, "bold")

    def _put(self, content: str) -> None:
        from IPython.display import HTML, display

        page = HTML(block(content, self._note) if self._note else content)
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)


class Terminal:
    """Lines on standard output."""

    interval_s = 2.0

    def __init__(self) -> None:
        self._said = ""
        self._lines = Lines()

    def say(self, text: str) -> None:
        if text and text != self._said:
            print(text, flush=True)
            self._said = text

    def show(self, sight: Sight) -> None:
        self._lines.show(sight)

    def conclude(self, run: RunState) -> None:
        """Its last line has said it."""

    def note(self, text: str) -> None:
        print(text, flush=True)
