"""`ftkit.Experiments`: settings that are predicted, run and shown one after another."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.extensions.comparison.compare import Comparison, compare
from ftkit.extensions.notebook import display
from ftkit.extensions.notebook.api import PathLike, Run, ShownReport, start, switches
from ftkit.extensions.notebook.display import (
    MEASURED,
    folded,
    memory_table,
    over_time,
    speed_texts,
    state_as_html,
)
from ftkit.extensions.notebook.plans import Plans, ShownPlan, plan
from ftkit.planning.predict import Planned
from ftkit.planning.table import plans_as_html, verdict
from ftkit.recipe.parsing import to_dict
from ftkit.recipe.recipe import Recipe
from ftkit.recipe.recipe_keys import shown_value
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.report import Report
from ftkit.runs.report.table import report_as_html
from ftkit.runs.state import RunState, look
from ftkit.strategies.step_memory import Breakdown
from ftkit.utils.console.html import block, escaped, grid
from ftkit.utils.names import leaves


class Experiment:
    """One of several settings: its prediction and its run."""

    def __init__(self, name: str, planned: ShownPlan, run: Run, than: "Experiment | None") -> None:
        self.name = name
        self.plan = planned
        """Prediction from before the run, for the chosen GPU."""
        self.run = run
        """Its run on this machine."""
        self.differences: list[Difference] = (
            [] if than is None else changed_keys(than.plan.plan.recipe, planned.plan.recipe)
        )
        """Keys of its recipe with other values than in the experiment it is compared with."""

    @property
    def planned(self) -> Breakdown:
        """Bytes in tensors at the predicted peak, by category."""
        return Breakdown(**self.plan.memory.breakdown_bytes)

    @property
    def measured(self) -> Breakdown:
        """Bytes in tensors at the measured peak, by category.

        Raises:
            UserError: no step was measured.
        """
        memory = self.report.step_memory
        if memory is None:
            raise UserError(f"{self.name} ended before the memory of a step was measured.")
        return memory.fullest.peak_breakdown_bytes

    @property
    def report(self) -> ShownReport:
        """Measurements of the run.

        Raises:
            UserError: the run has no report.
        """
        report = self.run.report
        if report is None:
            raise UserError(f"{self.name} has no report: its run was killed.")
        return report

    def as_html(self, state: RunState) -> str:
        """Return its view in a cell, with its run in this state."""
        return experiment_as_html(self.name, self.differences, self.plan, state)

    def __repr__(self) -> str:
        return f"<ftkit experiment {self.name}: {self.run.outcome}>"

    def _repr_html_(self) -> str:
        return self.as_html(look(self.run.out_dir))


class Experiments:
    """Settings side by side: `run` plans, runs and shows one, and all are kept.

    Example::

        experiments = ftkit.Experiments("out/batch", gpu="a100-80gb")
        experiments.run("batch-8", "recipes/tiny-llama-full.yaml", command="finetune_full")
        experiments.compare()
    """

    def __init__(
        self, out_dir: PathLike, *, gpu: str | None = None, here: Mapping[str, Any] | None = None
    ) -> None:
        """Start without experiments.

        Args:
            out_dir: directory of the runs.
            gpu: GPU to predict for, such as a100-80gb; auto: the one of this machine.
            here: keys of runs that do not apply to predictions, such as a small model in place of
                a large one that needs another GPU.
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
        plugin: PathLike | None = None,
        **keys: Any,
    ) -> None:
        """Predict what a recipe needs, run it, and show both with what changed in the recipe.

        Args:
            name: of the experiment and its directory.
            recipe: a recipe file.
            command: finetune or finetune_full.
            than: name of the experiment to compare it with. Default: the one before.
            here: further keys of this run that do not apply to its prediction.
            force: start even if memory is predicted to be too small.
            plugin: Python file of your own, as --plugin.
            keys: of the recipe, dotted: `**{"train.micro_batch_size": 8}`.

        Raises:
            UserError: the command refused to run; the message says why.
            KeyboardInterrupt: it was interrupted before it started, or twice.
        """
        out_dir = self._out_dir / name
        planned = plan(recipe, command=command, gpu=self._gpu, name=name, plugin=plugin, **keys)
        # Made before the run starts, because the cell shows it when the run ends.
        done = Experiment(name, planned, Run(out_dir.absolute()), self._before(name, than))
        # What applies here only comes last, so that it replaces keys of the prediction.
        own_keys = keys | self._here | dict(here or {}) | {"out_dir": os.fspath(out_dir)}
        # A cell that is run again replaces its experiment.
        words = switches(overwrite=True, force=force, plugin=plugin)
        done.run = start(command, recipe, own_keys, words, display.place(done.as_html))
        self._done.pop(name, None)  # so that a repeated one becomes the last
        self._done[name] = done

    def compare(self) -> Comparison:
        """Return all experiments side by side, as measured."""
        return compare([experiment.run for experiment in self])

    @property
    def plans(self) -> Plans:
        """All experiments side by side, as predicted."""
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
        """The experiment that one is compared with."""
        if than is None:
            # One that is repeated is not compared with itself.
            others = [experiment for experiment in self if experiment.name != name]
            return others[-1] if others else None
        if than not in self._done:
            there_are = ", ".join(self._done) or "none"
            raise UserError(
                f"than is {than!r}, but no such experiment ran. There are: {there_are}."
            )
        return self._done[than]


_SAY_NOTHING = ("out_dir", "resume", "access_token")
"""Keys that are no difference between experiments."""


@dataclass(frozen=True)
class Difference:
    """A key of a recipe with another value than in the experiment before."""

    key: str
    """Key as on the command line."""
    before: Any
    """Value in the experiment before; None: not set."""
    now: Any
    """Value in this experiment."""


def changed_keys(before: Recipe, now: Recipe) -> list[Difference]:
    """Return keys of both recipes with different values; the method comes first if it differs."""
    changes = [Difference("method", before.method, now.method)] * (before.method != now.method)
    others = _keys_of(before)
    changes += [
        Difference(key, others[key], value)
        for key, value in _keys_of(now).items()
        # Keys that only one method has follow from the change of the method.
        if key in others and others[key] != value
    ]
    return changes


def experiment_as_html(
    name: str, changed: Sequence[Difference], planned: Planned, state: RunState
) -> str:
    """Return an experiment as HTML.

    Args:
        name: of the experiment.
        changed: keys that differ from the experiment before.
        planned: its prediction.
        state: state of its run.
    """
    report = state.report
    parts = {_where(planned): (Breakdown(**planned.memory.breakdown_bytes), verdict(planned))}
    rest = [folded("all that was predicted", plans_as_html([planned]))]
    summary = []
    if report is not None:
        summary = _summary(planned, report)
        rest.append(folded("all that was measured", report_as_html(report)))
        if (memory := report.step_memory) is not None:
            parts[MEASURED] = (memory.fullest.peak_breakdown_bytes, "")
    head = f"{state_as_html(name, state)} {escaped(', '.join(summary))}"
    return (
        block(head, _changes(changed))
        + memory_table(parts)
        + over_time(RunDirectory(state.out_dir).system)
        + block(*rest)
    )


def _keys_of(recipe: Recipe) -> dict[str, Any]:
    """Values by key, as the command line names them."""
    return {
        key.replace(".init_args", "").removesuffix(".class_path"): value
        for key, value in leaves(to_dict(recipe))
        if key not in _SAY_NOTHING
    }


def _changes(changed: Sequence[Difference]) -> str:
    rows = [
        [
            f"<code>{escaped(difference.key)}</code>",
            _value(difference.before),
            f"<b>{_value(difference.now)}</b>",
        ]
        for difference in changed
    ]
    return grid(["what is new", "before", "now"], rows) if rows else ""


def _value(value: Any) -> str:
    """A value as the recipe writes it; long ones, such as paths, wrap."""
    text = value if isinstance(value, str) else shown_value(value)
    return f'<span style="white-space:normal;overflow-wrap:anywhere">{escaped(text)}</span>'


def _where(planned: Planned) -> str:
    gpu = planned.gpu.name if planned.gpu is not None else planned.plan.accelerator
    return f"predicted, {gpu}"


def _summary(planned: Planned, report: Report) -> list[str]:
    """Texts on the end of the run, on another model than predicted, and on its speed."""
    texts = [report.exit_reason]
    resolved = report.resolved
    # Such as a small model here in place of a large one that was predicted.
    if resolved is not None and resolved.base_model not in (None, planned.base_model):
        texts.append(f"{resolved.base_model} in place of {planned.base_model}")
    return [*texts, *speed_texts(report)]
