"""What the live page shows of runs: numbers for its curves, and texts as escaped HTML."""

import math
import threading
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from ftkit.comparison.runs import ComparedRun, LeftOutRun, look_at_runs, read_runs
from ftkit.comparison.table import comparison_as_html
from ftkit.console.formatting import age_text, bytes_text, loss_text
from ftkit.console.html import escaped, grid
from ftkit.errors import UserError
from ftkit.remote.fetch import unreachable
from ftkit.remote.objects import StorageError
from ftkit.remote.urls import spelt
from ftkit.report.metrics import Row, loss_columns
from ftkit.report.table import report_as_html
from ftkit.runs.carrying.seen import UrlCopies
from ftkit.runs.checkpoints import CheckpointEntry, entry_of
from ftkit.runs.directory import RunDirectory
from ftkit.runs.watch import Sight, Watcher, sight_as_html

_MOST_POINTS = 400
_MOST_COMPARED = 10
"""Curves in one picture."""
_LOOKS_EVERY_S = 1.0
"""However many pages ask."""
_SCALES = {"_bytes": 2.0**-30, "_utilization": 100.0, "_power_w": 1.0}
"""Of what is sampled, by the ending of its name: what makes GiB, % and W of it."""
_FROM_ZERO = ("tokens/s", "GiB", "%", "W")

_Points = list[tuple[float, float]]


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
        self._runs: list[ComparedRun] = []
        self._left_out: list[LeftOutRun] = []
        self._looked_s = -math.inf

    @property
    def title(self) -> str:
        """What is shown."""
        return spelt(self._directory)

    def all_runs(self) -> dict[str, Any]:
        """All runs in short, their losses, and the comparison of several, ready for JSON."""
        with self._lock:
            self._look()
            several = len(self._runs) > 1
            return {
                "runs": [_in_short(run) for run in self._runs],
                "left_out": [f"{spelt(one.path)} {one.reason}" for one in self._left_out],
                "comparison": comparison_as_html(self._runs) if several else "",
                "losses": [
                    {"name": run.name, "points": thinned(_loss_points(run))}
                    for run in self._runs[:_MOST_COMPARED]
                ]
                if several
                else [],
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
            "memory": [
                {"name": name, "text": bytes_text(size), "bytes": size}
                for name, size in run.memory_parts.items()
            ],
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
    """At most so many points, each the mean of its neighbours; finite ones only."""
    found = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(found) <= most:
        return found
    edges = [round(i * len(found) / most) for i in range(most + 1)]
    parts = [found[start:end] for start, end in pairwise(edges)]
    return [
        (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts
    ]


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


def _loss_points(run: ComparedRun) -> Iterable[tuple[float, float]]:
    return zip(map(float, run.training.steps), run.training.losses, strict=True)


def _charts(sight: Sight) -> list[dict[str, Any]]:
    """Of the steps, and of host and devices over the time."""

    def by_step(rows: list[Row], column: str, name: str) -> dict[str, Any]:
        return {"name": name, "points": thinned(_column(rows, "step", column))}

    def chart(title: str, unit: str, *series: dict[str, Any], x: str = "step") -> dict[str, Any]:
        told = [one for one in series if one["points"]]
        least = 0 if unit in _FROM_ZERO else None
        most = 100 if unit == "%" else None
        return {"title": title, "unit": unit, "x": x, "least": least, "most": most, "series": told}

    rows, of_sources = sight.rows, loss_columns(sight.validations)
    return [
        chart(
            "Loss",
            "nats per label token",
            by_step(rows, "loss", "training"),
            by_step(sight.validations, "val_loss", "validation"),
            *(by_step(sight.validations, column, name) for name, column in of_sources),
        ),
        chart("Speed", "tokens/s", by_step(rows, "tokens_per_s", "speed")),
        chart("Learning rate", "", by_step(rows, "lr", "learning rate")),
        chart("Gradient norm", "", by_step(rows, "grad_norm", "norm")),
        chart("Memory", "GiB", *_of_system(sight.samples, "_bytes"), x="minutes"),
        chart("Busy", "%", *_of_system(sight.samples, "_utilization"), x="minutes"),
        chart("Power", "W", *_of_system(sight.samples, "_power_w"), x="minutes"),
    ]


def _of_system(samples: list[Row], ending: str) -> list[dict[str, Any]]:
    """Series of host and devices whose names end so, over minutes from the first sample."""
    columns = [column for column in (samples[-1] if samples else ()) if column.endswith(ending)]
    began_s = samples[0]["time_s"] or 0.0 if samples else 0.0
    scale = _SCALES[ending]
    return [
        {
            "name": column.removesuffix(ending).replace("_", " "),
            "points": thinned(
                ((time_s - began_s) / 60, value * scale)
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
