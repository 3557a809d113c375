"""What the live page shows of runs: numbers for its curves, and texts as escaped HTML."""

import math
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.runs.checkpoints import CheckpointEntry, entry_of
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.metrics import Row, loss_columns
from ftkit.runs.report.table import report_as_html
from ftkit.runs.sync.download import UrlCopies
from ftkit.utils.console.formatting import age_text, bytes_text, loss_text
from ftkit.utils.console.html import escaped, grid
from ftkit.utils.remote.objects import StorageError
from ftkit.utils.remote.replica import unreachable
from ftkit.utils.remote.urls import display_path
from ftkit.views.comparison.runs import ComparedRun, LeftOutRun, look_at_runs, read_runs
from ftkit.views.comparison.table import comparison_as_html
from ftkit.views.watch import Sight, Watcher, sight_as_html

_MOST_POINTS = 400
_MOST_COMPARED = 10
"""Curves in one picture."""
_LOOKS_EVERY_S = 1.0
"""However many pages ask."""
_SCALES = {"_bytes": 2.0**-30, "_utilization": 100.0, "_power_w": 1.0}
"""Of what is sampled, by the ending of its name: what makes GiB, % and W of it."""
_LONG_S = 3 * 3600
"""Of this and less, time is in minutes."""
_LOGARITHMIC = ("Loss", "Gradient norm")
"""Charts that may be shown so."""
_FROM_ZERO = ("tokens/s", "GiB", "%", "W")

_Points = list[tuple[float, ...]]


class Sights:
    """The runs of a directory, or the run that it is, looked at when a page asks."""

    def __init__(self, directory: Path, *, copy_at: Path | None) -> None:
        """Prepare.

        Args:
            directory: of a run or of runs; it may be empty yet.
            copy_at: where copies may lie of what is at a url; None: it is on this machine.
        """
        self._directory = directory
        self._copies = None if copy_at is None else UrlCopies(directory, copy_at)
        self._lock = threading.Lock()
        self._watchers: dict[Path, Watcher] = {}
        self._entries: dict[Path, CheckpointEntry] = {}
        self._losses: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}
        """Thinned losses of runs, with size and time of the file that they are of."""
        self._runs: list[ComparedRun] = []
        self._left_out: list[LeftOutRun] = []
        self._looked_s = -math.inf

    @property
    def title(self) -> str:
        """What is shown."""
        return display_path(self._directory if self._directory.name else self._directory.resolve())

    def all_runs(self) -> dict[str, Any]:
        """All runs in short, their losses, and the comparison of several, ready for JSON."""
        with self._lock:
            self._look()
            several = len(self._runs) > 1
            return {
                "runs": [_in_short(run) for run in self._runs],
                "left_out": [f"{display_path(one.path)} {one.reason}" for one in self._left_out],
                "comparison": comparison_as_html(self._runs) if several else "",
                "losses": [self._loss(run) for run in _drawn(self._runs)] if several else [],
            }

    def run(self, name: str) -> dict[str, Any] | None:
        """A run in full, ready for JSON; None: there is none of this name."""
        with self._lock:
            self._look()
            for run in self._runs:
                if run.name == name:
                    return self._in_full(run)
        return None

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOKS_EVERY_S:
            return
        self._runs, self._left_out = self._found()
        self._looked_s = now_s
        places = {run.files.path for run in self._runs}
        for gone in self._watchers.keys() - places:
            del self._watchers[gone]
            self._losses.pop(gone, None)

    def _found(self) -> tuple[list[ComparedRun], list[LeftOutRun]]:
        if self._copies is None:
            runs, left_out = read_runs([self._directory])
            return runs, [one for one in left_out if one.path != self._directory]
        try:
            copies = self._copies.look()
        except StorageError as error:
            reason = str(unreachable(error)).splitlines()[0].removeprefix(f"{self.title}: ")
            return [], [LeftOutRun(path=self._directory, reason=reason)]
        return look_at_runs({copy.path: copy for copy in copies})

    def _watcher(self, run: ComparedRun) -> Watcher:
        place = run.files.path
        if place not in self._watchers:
            self._watchers[place] = Watcher(run.out_dir, run.copy)
        return self._watchers[place]

    def _loss(self, run: ComparedRun) -> dict[str, Any]:
        """The losses of a run; of one that goes on only new rows are read, of others none."""
        metrics = run.files.metrics
        try:
            status = metrics.stat()
        except OSError:
            return {"name": run.name, "points": []}
        stamp, place = (status.st_size, status.st_mtime_ns), run.files.path
        if place not in self._losses or self._losses[place][0] != stamp:
            rows = self._watcher(run).rows.read_on()
            self._losses[place] = stamp, _by_step(rows, "loss", run.name, noisy=True)
        return {**self._losses[place][1], "name": run.name}

    def _in_full(self, run: ComparedRun) -> dict[str, Any] | None:
        try:
            sight = self._watcher(run).look()
        except UserError:  # it is gone
            return None
        report = sight.report
        ended = report is not None and not sight.run.at_work
        return {
            **_in_short(run),
            "sight": sight_as_html(sight, with_curve=False),
            "charts": [chart for chart in _charts(sight) if chart["series"]],
            "memory": _memory(run),
            "memory_limit": bytes_text(limit) if (limit := run.memory_limit_bytes) else "",
            "checkpoints": self._checkpoints(run.files),
            "report": report_as_html(report, sight.run.out_dir) if ended and report else "",
        }

    def _checkpoints(self, run: RunDirectory) -> str:
        """A table of complete checkpoints, the newest first; each is read once."""
        paths = [run.store.path(step) for step in reversed(run.store.steps())]
        entries = [self._entries.setdefault(path, entry_of(path)) for path in paths]
        rows = [
            (
                f"{entry.step:,}" if entry.step is not None else "?",
                age_text(time.time() - entry.written_s) + " ago",
                bytes_text(entry.size_bytes),
                loss_text(loss)
                if entry.metadata and (loss := entry.metadata.validation_loss) is not None
                else "",
                escaped("; ".join((entry.state, *entry.problems))),
            )
            for entry in entries
        ]
        heads = ("step", "written", "size", "validation loss", "state")
        return grid(heads, rows, right=(0, 2, 3)) if rows else ""


def thinned(points: Iterable[tuple[float, float]], most: int = _MOST_POINTS) -> _Points:
    """At most so many points, finite ones only.

    Of more, each is the mean of its neighbours, and has their least and their highest value, so
    that a spike of one step is seen.
    """
    found = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(found) <= most:
        return list(found)
    edges = [round(i * len(found) / most) for i in range(most + 1)]
    made: _Points = []
    for start, end in pairwise(edges):
        xs, ys = zip(*found[start:end], strict=True)
        made.append((sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys)))
    return made


def _in_short(run: ComparedRun) -> dict[str, Any]:
    progress, loss = run.report.progress, run.report.loss
    return {
        "name": run.name,
        "state": run.state.replace("_", " "),
        "steps": progress.steps if progress else 0,
        "total_steps": run.resolved.total_steps,
        "loss": loss_text(loss.last) if loss and loss.last is not None else "",
        "method": run.report.method,
    }


def _drawn(runs: list[ComparedRun]) -> list[ComparedRun]:
    """The runs whose losses are in one picture: of many, those that began last."""
    latest = sorted(runs, key=lambda run: run.report.started_at, reverse=True)[:_MOST_COMPARED]
    names = {run.name for run in latest}
    return [run for run in runs if run.name in names]


def _memory(run: ComparedRun) -> list[dict[str, Any]]:
    """What memory was at its peak, and what was predicted of it, in bytes and as text."""
    measured = run.memory_parts
    of_step = run.report.step_memory
    predicted: dict[str, int] = {}
    if of_step and of_step.predicted:
        named = asdict(of_step.predicted.peak_breakdown_bytes)
        predicted = {name.replace("_", " "): size for name, size in named.items() if size}
    return [
        {
            "name": name,
            "measured": [measured.get(name, 0), _size(measured.get(name))],
            "predicted": [predicted.get(name, 0), _size(predicted.get(name))],
        }
        for name in dict.fromkeys((*measured, *predicted))
    ]


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else bytes_text(size_bytes)


def _charts(sight: Sight) -> list[dict[str, Any]]:
    """Of the steps, and of host and devices over the time."""

    def chart(title: str, unit: str, *series: dict[str, Any], x: str = "step") -> dict[str, Any]:
        told = [one for one in series if one["points"]]
        least = 0 if unit in _FROM_ZERO else None
        most = 100 if unit == "%" else None
        return {
            "title": title,
            "unit": unit,
            "x": x,
            "least": least,
            "most": most,
            "log": title in _LOGARITHMIC,
            "series": told,
        }

    rows, of_sources = sight.rows, loss_columns(sight.validations)
    samples = sight.samples
    sampled_s = (samples[-1]["time_s"] or 0) - (samples[0]["time_s"] or 0) if samples else 0
    across, unit_s = ("hours", 3600) if sampled_s > _LONG_S else ("minutes", 60)
    return [
        chart(
            "Loss",
            "nats per label token",
            _by_step(rows, "loss", "training", noisy=True),
            _by_step(sight.validations, "val_loss", "validation"),
            *(_by_step(sight.validations, column, name) for name, column in of_sources),
        ),
        chart("Speed", "tokens/s", _by_step(rows, "tokens_per_s", "speed", noisy=True)),
        chart("Learning rate", "", _by_step(rows, "lr", "learning rate")),
        chart("Gradient norm", "", _by_step(rows, "grad_norm", "norm", noisy=True)),
        *(
            chart(title, unit, *_of_system(samples, ending, unit_s), x=across)
            for title, unit, ending in (
                ("Memory", "GiB", "_bytes"),
                ("Busy", "%", "_utilization"),
                ("Power", "W", "_power_w"),
            )
        ),
    ]


def _by_step(rows: list[Row], column: str, name: str, *, noisy: bool = False) -> dict[str, Any]:
    """A series over the steps; one that is noisy may be shown smoothed."""
    return {"name": name, "noisy": noisy, "points": thinned(_column(rows, "step", column))}


def _of_system(samples: list[Row], ending: str, unit_s: float) -> list[dict[str, Any]]:
    """Series of host and devices whose names end so, over the time from the first sample."""
    columns = [column for column in (samples[-1] if samples else ()) if column.endswith(ending)]
    began_s = samples[0]["time_s"] or 0.0 if samples else 0.0
    scale = _SCALES[ending]
    return [
        {
            "name": column.removesuffix(ending).replace("_", " "),
            "points": thinned(
                ((time_s - began_s) / unit_s, value * scale)
                for time_s, value in _column(samples, "time_s", column)
            ),
        }
        for column in columns
    ]


def _column(rows: list[Row], x: str, y: str) -> Iterable[tuple[float, float]]:
    for row in rows:
        across, up = row.get(x), row.get(y)
        if across is not None and up is not None:
            yield float(across), float(up)
