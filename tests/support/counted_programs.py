"""A plugin that writes down how many programs each step of a run compiles."""

import json

import ftkit
from ftkit.runs.report.meters import StepRecord
from ftkit.training.callbacks import RunView


class Count(ftkit.Callback):
    """Writes compiled.json into the directory of the run: a number for each step of the session."""

    def __init__(self) -> None:
        self._compiled: list[int | None] = []

    def on_step(self, run: RunView, record: StepRecord) -> None:
        """Note a step; what a validation compiled counts to the step after it."""
        self._compiled.append(record.compiled_graphs)
        (run.out_dir / "compiled.json").write_text(json.dumps(self._compiled))
