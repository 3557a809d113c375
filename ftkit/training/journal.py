"""The journal of a rank: where messages and progress go, and where measurements go."""

from dataclasses import dataclass

from ftkit.training.recorder import Recorder
from ftkit.utils.console.display import Display


@dataclass(frozen=True)
class Journal:
    """What is told while a rank works, to a person and to the report."""

    display: Display
    recorder: Recorder

    def warn(self, text: str) -> None:
        """Say it now and in the report."""
        self.display.warning(text)
        self.recorder.warn(text)
