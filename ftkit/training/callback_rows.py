"""Callbacks that are called without being named; what makes one is imported where a run begins."""

from dataclasses import dataclass
from typing import Any

from ftkit.utils.registry import Registry, imported


@dataclass(frozen=True)
class CallbackRow:
    """A callback."""

    name: str
    """Also that of its state in checkpoints."""
    place: str
    """MODULE:FUNCTION that makes a `ftkit.training.callbacks.Callback` of the `Setup` and the
    `Journal` of a run, or returns None, where the run needs none."""

    def made(self, setup: Any, journal: Any) -> Any:
        """Make it, as `place` says."""
        return imported(self.place)(setup, journal)


CALLBACKS = Registry(
    "callbacks",
    (CallbackRow,),
    core=(CallbackRow("patience", "ftkit.training.callbacks:make_patience"),),
)
"""In the order in which they are called, after those of the plugin in use. Rows of other packages
are not called, because nobody names them."""
