"""The job file, from a supervisor to its ranks, and the error file, from a rank to it."""

import dataclasses
import json
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ftkit.checkpoint.metadata import Metadata
from ftkit.errors import UserError
from ftkit.recipe.batches import MicroBatch
from ftkit.recipe.devices import Devices
from ftkit.recipe.objectives import model_beside
from ftkit.recipe.own_metric import OwnMetric
from ftkit.recipe.parsing import from_dict, recipe_as_dict, to_dict
from ftkit.recipe.plan import Plan, make_plan
from ftkit.recipe.plugin import Plugin
from ftkit.recipe.recipe import Method, Recipe
from ftkit.runs.directory import RankDirectory, RunDirectory
from ftkit.runs.report.answers import AnsweredExample, AnswerScore, ExactMatch, TaskScore
from ftkit.runs.report.report import Loss, Progress, Report, Restart, Resumed
from ftkit.utils.console.formatting import exact_utc_text, parse_duration, utc_now
from ftkit.utils.damaged_files import reading
from ftkit.utils.files import write_json, write_with_reserve
from ftkit.utils.hardware import boot_id, hardware, versions
from ftkit.utils.json_values import for_json, from_json

ErrorKind = Literal[
    "user",
    "damaged",
    "out_of_memory",
    "interrupted",
    "not_finite",
    "failed",
    "died",
    "died_for_memory",
]
"""Kinds of errors. The supervisor writes the last two, for a rank that left no error file."""
DIED: tuple[ErrorKind, ...] = ("died", "died_for_memory")
FOR_MEMORY: tuple[ErrorKind, ...] = ("out_of_memory", "died_for_memory")


@dataclass(frozen=True, kw_only=True)
class StopAfter:
    """When a session ends before the run is complete; one of the two is set."""

    steps: int | None = None
    """Optimizer steps of this session."""
    seconds: float | None = None
    """Time since the command started."""

    @classmethod
    def parse(cls, text: str) -> "StopAfter":
        """Parse the value of `--stop_after`: 500 (steps), or a duration such as 90min.

        Raises:
            UserError: it is neither.
        """
        if text.isdecimal() and int(text) > 0:
            return cls(steps=int(text))
        try:
            return cls(seconds=parse_duration(text, "stop_after"))
        except UserError:
            raise UserError(
                f"--stop_after is {text!r}, but must be a number of optimizer steps, or a duration "
                "such as 60s, 90min or 2h. Try --stop_after 500."
            ) from None

    def __str__(self) -> str:
        if self.steps is not None:
            return f"--stop_after {self.steps}"
        return f"--stop_after {self.seconds:g}s"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One session of a run, with all that a rank needs to know."""

    recipe: Recipe
    """The recipe; out_dir is the directory that this run owns."""
    devices: Devices
    """Devices of this machine."""
    base: str
    """The base model: a directory, or random:NAME."""
    micro_batch: MicroBatch | None = None
    """Micro-batch that was chosen where the recipe leaves it open; None: the usual one."""
    reference: str | None = None
    """Directory of the recipe's reference model, if its log-probabilities are computed before the
    first step; None: they are not, or the run continues without it."""
    beside: str | None = None
    """The frozen model that is held beside the trained one: a directory, or random:NAME; None:
    there is none. See `ftkit.recipe.objectives.model_beside`."""
    command: tuple[str, ...]
    """The command line, tokens removed."""
    started_at_s: float
    """When the command started, in seconds since the epoch."""
    began_s: float = field(default_factory=time.monotonic)
    """When the command started, by this machine's clock that cannot be set (`time.monotonic`)."""
    start: str | None = None
    """The directory of the checkpoint to continue from; None: from the base model."""
    start_step: int = 0
    """Its step: optimizer steps done in earlier sessions."""
    stop_after: StopAfter | None = None
    """When to stop gracefully before the run is done."""
    changes: tuple[str, ...] = ()
    """Changes of settings that affect training since the checkpoint, one line each."""
    restarts: tuple[Restart, ...] = ()
    """Restarts of the run up to the start of this session."""
    quiet: bool = False
    """True if only warnings and results are shown."""
    metrics: tuple[OwnMetric, ...] = ()
    """Metrics of the user's own, from the command line."""
    trusted: str | None = None
    """The directory whose Python code tasks may run."""
    plugin: Plugin | None = None
    """The plugin, with its content: other hosts need no file."""

    @property
    def directory(self) -> RunDirectory:
        """Directory of the run."""
        return RunDirectory(self.recipe.out_dir)

    @cached_property
    def plan(self) -> Plan:
        """The recipe resolved on the devices."""
        return make_plan(self.recipe, self.devices, chosen=self.micro_batch)

    @property
    def located_recipe(self) -> Recipe:
        """The recipe, which names models by where they are on this machine."""
        names: dict[str, Any] = {"checkpoint_dir": self.base}
        beside = model_beside(self.recipe)
        if beside is not None and self.beside is not None:
            names[beside.key] = self.beside
        return dataclasses.replace(self.recipe, **names)

    def new_report(self, start: Metadata | None = None) -> Report:
        """The report of a session before its first step; it covers earlier sessions.

        Args:
            start: metadata of the checkpoint that it continues from; None: the run is new.
        """
        report = Report(
            # It stays so if the rank dies before it can say how it ended.
            outcome="failed",
            exit_reason="the process ended without an error message",
            exit_code=1,
            phase="set_up",
            started_at=exact_utc_text(self.started_at_s),
            finished_at=utc_now(),
            command=list(self.command),
            method=self.recipe.method,
            recipe=recipe_as_dict(self.recipe),
            versions=versions(),
            hardware=hardware(),
            progress=Progress(),
            restarts=list(self.restarts),
            micro_batch_halved=0 if self.micro_batch is None else self.micro_batch.halved,
        )
        if start is None:
            return report
        # What covers the whole run comes from the checkpoint; all else begins with this session.
        carried = start.carried
        return dataclasses.replace(
            report,
            progress=Progress(steps=start.step, samples=start.samples, epochs=start.epochs),
            loss=from_json(Loss, carried.get("loss") or {}),
            exact_match=from_json(ExactMatch | None, carried.get("exact_match")),
            examples=from_json(list[AnsweredExample], carried.get("examples") or []),
            scores=from_json(list[AnswerScore], carried.get("scores") or []),
            tasks=from_json(list[TaskScore], carried.get("tasks") or []),
            resumed=None
            if self.start is None
            else Resumed(
                from_step=start.step,
                checkpoint=self.directory.shown_path(Path(self.start)),
                strategy=start.layout.strategy,
                world_size=start.layout.world_size,
                changes=list(self.changes),
            ),
        )

    def write(self, path: Path) -> None:
        """Write the job file for the ranks, without the access token."""
        values = {
            "method": self.recipe.method,
            "recipe": to_dict(self.recipe),
            "devices": dataclasses.asdict(self.devices),
            "base": self.base,
            "micro_batch": self.micro_batch and dataclasses.asdict(self.micro_batch),
            "reference": self.reference,
            "beside": self.beside,
            "command": self.command,
            "started_at_s": self.started_at_s,
            "began": [boot_id(), self.began_s],
            "start": self.start,
            "start_step": self.start_step,
            "stop_after": dataclasses.asdict(self.stop_after) if self.stop_after else None,
            "changes": self.changes,
            "restarts": [dataclasses.asdict(restart) for restart in self.restarts],
            "quiet": self.quiet,
            "metrics": [dataclasses.asdict(metric) for metric in self.metrics],
            "trusted": self.trusted,
            "plugin": None if self.plugin is None else self.plugin.to_json(),
        }
        write_json(path, values)

    @classmethod
    def read(cls, path: Path) -> "Job":
        """Read a job file.

        Raises:
            UserError: it is damaged, or of another version.
        """
        with reading(path, "a job, as the supervisor of a run writes it"):
            return cls._of(json.loads(path.read_bytes()))

    @classmethod
    def _of(cls, values: dict[str, Any]) -> "Job":
        method: Method = values["method"]
        devices = values["devices"]
        return cls(
            recipe=from_dict(values["recipe"], method),
            # JSON has no tuples.
            devices=Devices(
                **devices | {key: tuple(devices[key]) for key in ("names", "memory_bytes")}
            ),
            base=values["base"],
            micro_batch=from_json(MicroBatch | None, values.get("micro_batch")),
            reference=values["reference"],
            beside=values["beside"],
            command=tuple(values["command"]),
            started_at_s=values["started_at_s"],
            began_s=_began_here_s(*values.get("began", (None, 0.0))),
            start=values["start"],
            start_step=values["start_step"],
            stop_after=StopAfter(**values["stop_after"]) if values["stop_after"] else None,
            changes=tuple(values["changes"]),
            restarts=tuple(from_json(list[Restart], values["restarts"])),
            quiet=values["quiet"],
            metrics=tuple(OwnMetric(**metric) for metric in values["metrics"]),
            trusted=values["trusted"],
            plugin=Plugin.from_json(values["plugin"]) if values.get("plugin") else None,
        )


def _began_here_s(boot: str | None, began_s: float) -> float:
    """Return when a command started, by this machine's clock."""
    # Each machine has such a clock of its own, which begins when it starts.
    return began_s if boot is not None and boot == boot_id() else time.monotonic()


@dataclass(frozen=True, kw_only=True)
class RankError:
    """Error that ended a rank."""

    kind: ErrorKind
    """Decides the outcome of the run, and its exit code."""
    message: str
    """Message for the user: one or a few lines."""
    happened_at_s: float
    """Seconds since the epoch; of several ranks the first error is the cause."""
    file: str | None = None
    """For `damaged`: name of the checkpoint's directory, and of the file in it."""
    remedy: str = ""
    """For `not_finite`: options with which the run is worth continuing."""
    computed_from: int | None = None
    """For `not_finite`: step whose weights alone gave the number; see `Report.diverged_from`."""

    def to_text(self) -> str:
        """Content of its file."""
        return json.dumps(for_json(dataclasses.asdict(self)))

    def write(self, directory: RankDirectory) -> None:
        """Write the error for the supervisor, without secrets, even if the disk is full."""
        # `for_json` also removes access tokens, which messages of libraries may quote.
        values = for_json(dataclasses.asdict(self))
        write_with_reserve(lambda: write_json(directory.error, values), directory.run.reserve)

    @classmethod
    def read(cls, directory: RankDirectory) -> "RankError | None":
        """Read the error of a rank; None: it left none. A damaged file is an error itself."""
        if not directory.error.exists():
            return None
        try:
            with reading(directory.error, "a JSON object that says how a rank failed"):
                error = from_json(cls, json.loads(directory.error.read_bytes()))
                assert isinstance(error, cls)
                return error
        except UserError as damage:
            return cls(kind="failed", message=str(damage), happened_at_s=time.time())
