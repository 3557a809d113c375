"""Runs of a comparison: finding them, and their settings, results and curves."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.recipe.adapter_types import LORA
from ftkit.recipe.recipe import LoraRecipe
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.metrics import Row, read_metrics, read_validation
from ftkit.runs.report.report import RankMemory, Report, Resolved
from ftkit.runs.state import StateName, look
from ftkit.runs.url_runs import RunCopy, refresh
from ftkit.utils.accelerators.kinds import HOST_KIND
from ftkit.utils.finite_numbers import finite
from ftkit.utils.hardware import Hardware
from ftkit.utils.names import leaves
from ftkit.utils.progress import OnProgress
from ftkit.utils.urls import display_path, local_path, url_of

_NOT_COMPARED = ("out_dir", "resume", "access_token", "log")
"""Keys of a recipe that do not affect what a run computes."""
CROSS_ENTROPIES = ("sft", "dft", "eaft")
"""Objectives that are validated by plain cross-entropy, whatever they train."""
_DEFAULTS = {f.name: f.default for f in fields(LoraRecipe) if f.default is not MISSING} | {
    "peft": LORA  # by its name alone
}


@dataclass(frozen=True, kw_only=True)
class LeftOutRun:
    """A path that is left out of a comparison."""

    path: Path
    """The path as it was given."""
    reason: str
    """Reason in one line."""


@dataclass(frozen=True)
class Curve:
    """Losses in the order of the steps."""

    steps: list[int]
    """Optimizer steps done."""
    seconds: list[float]
    """Training time up to the step, over all sessions."""
    losses: list[float]
    """Loss of the step, in nats per label token."""


@dataclass(frozen=True)
class ComparedRun:
    """A run in a comparison."""

    name: str
    """Short name that differs from those of the other runs."""
    out_dir: Path
    """Its directory."""
    state: StateName
    """State: running, or how it ended."""
    report: Report
    """Its measurements."""
    copy: RunCopy | None = None
    """Local copy of its files, if out_dir stands for a url."""

    @property
    def files(self) -> RunDirectory:
        """Its files, or the local copies of them."""
        return RunDirectory(self.copy.directory if self.copy else self.out_dir)

    @property
    def resolved(self) -> Resolved:
        """Resolved values of the recipe, as far as they are known."""
        return self.report.resolved or Resolved()

    @property
    def loss_of(self) -> str:
        """What its loss is of: losses of another model or objective are on another scale."""
        recipe = self.report.recipe
        objective = (recipe.get("objective") or {}).get("class_path", "sft")
        model = str(recipe.get("checkpoint_dir", ""))
        return model if objective in CROSS_ENTROPIES else f"{model}, {objective}"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings by the keys of the command line, with resolved values where none was set."""
        recipe = {k: v for k, v in self.report.recipe.items() if k not in _NOT_COMPARED}
        settings = {"method": self.report.method, **dict(_settings_in(recipe))}
        # Reports of earlier versions have the older name of the key.
        if (path := settings.pop("data.json_path", None)) is not None:
            settings["data.path"] = path
        for key, value in (
            # What the run used counts, also where its recipe left it open or at auto.
            ("precision", self.resolved.precision),
            ("strategy", self.resolved.strategy),
            ("devices", self.resolved.devices),
            ("device", self.resolved.device or self.resolved.accelerator),
            ("train.max_seq_length", self.resolved.max_seq_length),
        ):
            if value is not None:
                settings[key] = value
        for key in ("micro_batch_size", "micro_batch_tokens"):
            if settings.get(f"train.{key}") is None and (value := getattr(self.resolved, key)):
                settings[f"train.{key}"] = value
        return settings

    @cached_property
    def training(self) -> Curve:
        """Training losses that are finite; empty if there are no rows."""
        rows = _rows(read_metrics, self.files.metrics)
        steps, seconds, losses = [], [], []
        elapsed_s = 0.0
        for row in rows:
            tokens, speed = row.get("tokens"), row.get("tokens_per_s")
            # Rows have no time: this is the duration of the step.
            elapsed_s += finite(tokens / speed) or 0.0 if tokens and speed else 0.0
            loss, step = row.get("loss"), row.get("step")
            if step is not None and loss is not None and math.isfinite(loss):
                steps.append(int(step))
                seconds.append(elapsed_s)
                losses.append(loss)
        return Curve(steps, seconds, losses)

    @cached_property
    def validation(self) -> list[tuple[int, float]]:
        """Step and loss of every validation with a finite loss."""
        rows = _rows(read_validation, self.files.validation)
        return [
            (int(row["step"]), loss)
            for row in rows
            if row["step"] is not None
            and (loss := row["val_loss"]) is not None
            and math.isfinite(loss)
        ]

    @property
    def memory_parts(self) -> dict[str, int]:
        """Bytes at the peak of the fullest rank by what they hold; the parts add up to the peak.

        Tensors are categorised only in the measured steps, and the peak may come at another time:
        the rest are `other tensors`. The peak of a run is unknown before its end.
        """
        ranks = self.report.peak_memory.ranks if self.report.peak_memory else []
        parts: dict[str, int] = {}
        measured = self.report.step_memory.fullest if self.report.step_memory else None
        if measured:
            # First the tensors by category, then the rest of the rank's peak.
            named = asdict(measured.peak_breakdown_bytes)
            parts = {name.replace("_", " "): size for name, size in named.items() if size > 0}
        if not ranks:  # the run is running
            return parts
        fullest = max(ranks, key=lambda rank: (rank.allocated_bytes or 0, _host_bytes(rank)))
        if measured:
            # The rank whose parts were measured; another one may have a higher peak.
            fullest = next((rank for rank in ranks if rank.rank == measured.rank), fullest)
        known = sum(parts.values())
        if fullest.allocated_bytes is None:
            rest = {"other host memory": _host_bytes(fullest) - known}
        else:
            reserved = fullest.reserved_bytes or 0
            rest = {
                "other tensors": fullest.allocated_bytes - known,
                "reserved, not used": reserved - max(fullest.allocated_bytes, known),
            }
        return {name: size for name, size in (parts | rest).items() if size > 0}

    @property
    def memory_limit_bytes(self) -> int | None:
        """Memory of the device; on CPU, memory of the machine divided by its ranks."""
        hardware = self.report.hardware or Hardware()
        if self.resolved.accelerator != HOST_KIND:
            sizes = [
                gpu.memory_bytes
                for gpu in hardware.gpus
                if gpu.name == self.resolved.device and gpu.memory_bytes
            ]
            # Of several GPUs of that name it is not known which the run used.
            return min(sizes, default=None)
        if hardware.memory_bytes is None:
            return None
        return hardware.memory_bytes // (self.resolved.devices or 1)


def read_runs(
    paths: Iterable[str | os.PathLike[str]], progress: OnProgress | None = None
) -> tuple[list[ComparedRun], list[LeftOutRun]]:
    """Return the runs at some paths, without duplicates, and the paths that hold none.

    Args:
        paths: runs, their reports, or directories with runs at any depth.
        progress: called before each run is read.
    """
    places: dict[Path, Path] = {}
    left_out: list[LeftOutRun] = []
    for path in map(local_path, paths):
        # Reports of a run at a url are downloaded first.
        refresh(path)
        directories = list(_find(path.expanduser()))
        for directory in directories:
            # Links and overlapping paths lead to a run twice; it is shown under its first path.
            places.setdefault(directory.resolve(), directory)
        if not directories:
            reason = "holds no run" if path.expanduser().exists() else "does not exist"
            left_out.append(LeftOutRun(path=path, reason=reason))
    runs, unmeasured = look_at_runs(dict.fromkeys(places.values()), progress)
    return runs, left_out + unmeasured


def look_at_runs(
    directories: Mapping[Path, RunCopy | None], progress: OnProgress | None = None
) -> tuple[list[ComparedRun], list[LeftOutRun]]:
    """Return the runs in directories, and the directories without any measurement.

    Args:
        directories: of runs, each with a copy to read instead if it stands for a url.
        progress: called before each run is read.
    """
    left_out: list[LeftOutRun] = []
    states = []
    for number, (directory, copy) in enumerate(directories.items()):
        if progress is not None:
            progress(number, len(directories))
        try:
            state = look(directory, copy)
        except UserError as error:
            left_out.append(LeftOutRun(path=directory, reason=_reason(error, directory)))
            continue
        if state.report is None:
            left_out.append(LeftOutRun(path=directory, reason="has not measured anything yet"))
        else:
            states.append((directory, state.state, state.report))
    # Short names depend on which runs are compared.
    names = _names([directory for directory, _, _ in states])
    runs = [
        ComparedRun(name, directory, state, report, directories[directory])
        for name, (directory, state, report) in zip(names, states, strict=True)
    ]
    return runs, left_out


def differing_settings(runs: list[ComparedRun]) -> list[str]:
    """Return keys of settings that differ between runs, in the order of the recipe.

    A setting that a run does not record, because its method or version does not have it, counts as
    the default.
    """
    keys = dict.fromkeys(key for run in runs for key in run.settings)

    def value(run: ComparedRun, key: str) -> Any:
        return run.settings.get(key, _DEFAULTS.get(key))

    return [key for key in keys if any(value(run, key) != value(runs[0], key) for run in runs)]


def _host_bytes(rank: RankMemory) -> int:
    return rank.host_bytes or rank.rss_bytes or 0


def _find(path: Path) -> Iterator[Path]:
    """Yield the runs at a path, at any depth, in the order of their names."""
    # report.json stands for its run.
    if path.is_file() and path == RunDirectory(path.parent).report:
        path = path.parent
    if not path.is_dir():
        return
    for directory, below, _ in os.walk(path):
        if RunDirectory(Path(directory)).is_run():
            # os.walk descends into what this list still holds, but a run contains no further runs.
            below.clear()
            yield Path(directory)
        below[:] = sorted(name for name in below if not name.startswith("."))


def _reason(error: UserError, directory: Path) -> str:
    first = str(error).splitlines()[0]
    # The list of what is left out names the directory itself.
    return first.removeprefix(f"{display_path(directory)} ").rstrip(".")


def _names(directories: list[Path]) -> list[str]:
    """The paths without their common part; urls beside local paths stay whole."""
    absolute = [directory.resolve() for directory in directories]
    local = [directory for directory in absolute if url_of(directory) is None]
    if 0 < len(local) < len(absolute):
        names = dict(zip(local, _names(local), strict=True))
        return [names.get(directory) or display_path(directory) for directory in absolute]
    # The common path of a single run would be all of it.
    if len(absolute) < 2:
        return [directory.name for directory in absolute]
    common = os.path.commonpath(absolute)
    return [str(directory.relative_to(common)) for directory in absolute]


def _settings_in(recipe: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values by dotted keys; a class is the value of its key, with its arguments below it."""
    for key, value in leaves(recipe):
        yield key.removesuffix(".class_path").replace(".init_args.", "."), value


def _rows(read: Callable[[Path], list[Row]], path: Path) -> list[Row]:
    """Rows of a log; none if the file is missing or damaged."""
    try:
        return read(path)
    except UserError:
        return []
