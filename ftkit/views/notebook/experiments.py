"""`ftkit.Experiments`: settings one after another, each planned, run and shown in one view."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.runs.state import RunState, look
from ftkit.strategies.step_memory import Breakdown
from ftkit.views.comparison.compare import Comparison, compare
from ftkit.views.notebook import display
from ftkit.views.notebook.api import PathLike, Run, ShownReport, start
from ftkit.views.notebook.experiment_view import Difference, changed_keys, experiment_as_html
from ftkit.views.notebook.plans import Plans, ShownPlan, plan


class Experiment:
    """One of several settings: what was predicted for it, and what came out."""

    def __init__(self, name: str, planned: ShownPlan, run: Run, than: "Experiment | None") -> None:
        self.name = name
        self.plan = planned
        """What was predicted before it ran, for the GPU that was asked for."""
        self.run = run
        """What ran here."""
        self.differences: list[Difference] = (
            [] if than is None else changed_keys(than.plan.plan.recipe, planned.plan.recipe)
        )
        """The keys of its recipe with other values than in what it is compared with."""

    @property
    def planned(self) -> Breakdown:
        """Bytes in tensors at the predicted peak, by what they are."""
        return Breakdown(**self.plan.memory.breakdown_bytes)

    @property
    def measured(self) -> Breakdown:
        """Bytes in tensors at the measured peak, by what they are.

        Raises:
            UserError: no step was measured.
        """
        memory = self.report.step_memory
        if memory is None:
            raise UserError(f"{self.name} ended before the memory of a step was measured.")
        return memory.fullest.peak_breakdown_bytes

    @property
    def report(self) -> ShownReport:
        """What was measured.

        Raises:
            UserError: the run has left no report.
        """
        report = self.run.report
        if report is None:
            raise UserError(f"{self.name} has no report: its run was killed.")
        return report

    def as_html(self, state: RunState) -> str:
        """The view of it in a cell, once its run is in this state."""
        return experiment_as_html(self.name, self.differences, self.plan, state)

    def __repr__(self) -> str:
        return f"<ftkit experiment {self.name}: {self.run.outcome}>"

    def _repr_html_(self) -> str:
        return self.as_html(look(self.run.out_dir))


class Experiments:
    """Settings side by side: `run` plans, runs and shows one; all of them are kept.

    Example::

        experiments = ftkit.Experiments("out/batch", gpu="a100-80gb")
        experiments.run("batch-8", "recipes/tiny-llama-full.yaml", command="finetune_full")
        experiments.compare()
    """

    def __init__(
        self, out_dir: PathLike, *, gpu: str | None = None, here: Mapping[str, Any] | None = None
    ) -> None:
        """Begin.

        Args:
            out_dir: each run has a directory in it.
            gpu: what predictions are for, such as a100-80gb; auto: the one here.
            here: keys that runs have beyond their recipe and predictions have not, such as a
                small model that stands for a large one where there is no such GPU.
        """
        self._out_dir, self._gpu, self._here = Path(out_dir), gpu, dict(here or {})
        self._done: dict[str, Experiment] = {}

    def run(
        self,
        name: str,
        recipe: PathLike,
        *,
        command: str = "finetune",
        than: str | None = None,
        here: Mapping[str, Any] | None = None,
        force: bool = False,
        **keys: Any,
    ) -> None:
        """Predict what a recipe needs, run it, and show both below what is new in it.

        Args:
            name: of the experiment and its directory.
            recipe: a recipe file.
            command: finetune or finetune_full.
            than: the experiment that it is compared with. Default: the one before.
            here: more keys of this run that its prediction has not.
            force: start even if memory is certainly too small.
            keys: of the recipe, dotted: `**{"train.micro_batch_size": 8}`.

        Raises:
            UserError: it refused to run, and says why.
            KeyboardInterrupt: it was interrupted before it began, or twice.
        """
        out_dir = self._out_dir / name
        planned = plan(recipe, command=command, gpu=self._gpu, name=name, **keys)
        done = Experiment(name, planned, Run(out_dir.absolute()), self._before(name, than))
        asked = keys | self._here | dict(here or {}) | {"out_dir": os.fspath(out_dir)}
        switches = ["--overwrite", *["--force"] * force]
        start(command, recipe, asked, switches, display.place(done.as_html))
        self._done.pop(name, None)  # the newest is the last
        self._done[name] = done

    def compare(self) -> Comparison:
        """All of them side by side, as measured."""
        return compare([experiment.run for experiment in self])

    @property
    def plans(self) -> Plans:
        """All of them side by side, as predicted."""
        return Plans(experiment.plan for experiment in self)

    def __getitem__(self, name: str) -> Experiment:
        return self._done[name]

    def __iter__(self) -> Iterator[Experiment]:
        return iter(self._done.values())

    def __len__(self) -> int:
        return len(self._done)

    def __repr__(self) -> str:
        return f"<{len(self)} ftkit experiments in {self._out_dir}: {', '.join(self._done)}>"

    def _before(self, name: str, than: str | None) -> Experiment | None:
        """What an experiment is compared with."""
        if than is None:
            others = [experiment for experiment in self if experiment.name != name]
            return others[-1] if others else None
        if than not in self._done:
            there_are = ", ".join(self._done) or "none"
            raise UserError(
                f"than is {than!r}, but no such experiment ran. There are: {there_are}."
            )
        return self._done[than]
