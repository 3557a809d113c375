"""What a cell shows while libraries are loaded."""

import importlib
import sys
from contextlib import AbstractContextManager, nullcontext


def shown() -> AbstractContextManager[None]:
    """In a notebook, show that libraries are loaded if that takes long."""
    # A kernel has imported IPython before any cell runs; other processes are spared the import of
    # the display.
    if "IPython" not in sys.modules:
        return nullcontext()
    display = importlib.import_module("ftkit.extensions.notebook.display")
    if not display.in_notebook():
        return nullcontext()
    context: AbstractContextManager[None] = display.shown_if_late("loading libraries ...")
    return context
