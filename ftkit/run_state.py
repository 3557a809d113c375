"""What the files of a run say about it from outside: at work, killed or ended, and its report.

Nothing is written, so any number of processes may look, also from another machine with the same
disk.
"""

import dataclasses
import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Literal

from ftkit.checkpoint.store import Store
from ftkit.errors import UserError
from ftkit.ranks import STATE, rank_directory
from ftkit.report.report import (
    FILE_NAME,
    OutcomeName,
    PeakMemory,
    Report,
    read_report,
)
from ftkit.resume import CHECKPOINTS, RECIPE
from ftkit.survey import Place, is_at_work

StateName = Literal["starting", OutcomeName, "running", "killed"]
"""`starting`: it has no report yet; `killed`: it ended and nobody could write its report."""
AT_WORK: tuple[StateName, ...] = ("starting", "running")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run at one moment."""

    out_dir: Path
    """Its directory, as it was given."""
    state: StateName
    """At work, or how it ended."""
    report: Report | None
    """Of a run that has ended; else what its ranks have noted so far, which is a few seconds old.
    None: they have noted nothing."""

    @property
    def at_work(self) -> bool:
        """Whether more is to come."""
        return self.state in AT_WORK


@dataclass(frozen=True, kw_only=True)
class Supervisor:
    """The process that a run at work belongs to; it stands in the lock of the run."""

    host: str
    """Name of its machine."""
    process: int
    """Its process id there."""

    @classmethod
    def here(cls) -> "Supervisor":
        """This process."""
        return cls(host=socket.gethostname(), process=os.getpid())

    @classmethod
    def of(cls, out_dir: Path) -> "Supervisor | None":
        """That of a run; None: it has none now, or it cannot be read."""
        try:
            found = json.loads((out_dir / STATE / "lock").read_text(encoding="utf-8"))
            return cls(host=found["host"], process=found["process"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def to_json(self) -> str:
        """What the lock holds."""
        return json.dumps(dataclasses.asdict(self))


def is_run(path: Path) -> bool:
    """Whether a directory is that of a run."""
    return any((path / name).exists() for name in (FILE_NAME, RECIPE, STATE))


def look(out_dir: Path) -> RunState:
    """The state of a run.

    Raises:
        UserError: the directory is none of a run, or its report is damaged.
    """
    if not is_run(out_dir):
        raise UserError(
            f"{out_dir} holds no run. Name the out_dir of a run, such as out/finetune/lora."
        )
    at_work = is_at_work(Place(path=out_dir, store=Store(out_dir / CHECKPOINTS)))
    # A run that ends writes its report, then removes its state, and only then lets go of the lock.
    if at_work or (out_dir / STATE / "lock").exists():
        noted = _noted(out_dir)
        at_work_state: StateName = "running" if noted else "starting"
        return RunState(out_dir=out_dir, state=at_work_state if at_work else "killed", report=noted)
    if not (out_dir / FILE_NAME).exists():
        raise UserError(f"{out_dir} holds no report: its run left none, or has not begun yet.")
    report = read_report(out_dir)
    return RunState(out_dir=out_dir, state=report.outcome, report=report)


def _noted(out_dir: Path) -> Report | None:
    """What the ranks have noted: the report of rank 0 with the memory of all."""
    directories = (rank_directory(out_dir / STATE, rank) for rank in count())
    reports = []
    for directory in takewhile(Path.exists, directories):
        with suppress(UserError):  # not there yet, or not any more
            reports.append(read_report(directory))
    if not reports:
        return None
    memory = [rank for report in reports if report.peak_memory for rank in report.peak_memory.ranks]
    return dataclasses.replace(reports[0], peak_memory=PeakMemory.of(memory) if memory else None)
