"""What a run's url gets besides checkpoints, and who sends of these what is not here."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from ftkit.checkpoint.store import LATEST
from ftkit.runs.directory import RunDirectory

_NOT_CARRIED = ("wandb",)
"""Which has a service of its own."""


class Others(Protocol):
    """Other hosts whose ranks write into directories of their own, and send their shards."""

    def lead(self, current: int | None, kept: Iterable[int], newest: int) -> None:
        """Say which checkpoint is to be sent now, which later, and which is the newest."""

    def sent(self, step: int) -> Mapping[str, str]:
        """Checksums, by name, of the files of a checkpoint that they have sent."""

    def problem(self) -> str:
        """Why one of them cannot send; empty: all can."""


def files_of(run: RunDirectory, everything: bool) -> Iterator[Path]:
    """All but checkpoints and what is being written, settings of the result after its weights.

    While the run is at work, what is only there once is left for the end.
    """
    left_out = {run.state.name, run.store.directory.name, *_NOT_CARRIED}
    latest = run.store.directory / LATEST
    if latest.exists():
        yield latest
    for top in sorted(run.path.iterdir(), key=lambda path: (path == run.report, path.name)):
        if top.name in left_out or top.name.startswith("."):
            continue
        if top.is_file():
            yield top
        elif everything or top != run.final:
            found = [path for path in top.rglob("*") if path.is_file() and not path.is_symlink()]
            inside = [
                p for p in found if not any(part[0] == "." for part in p.relative_to(top).parts)
            ]
            yield from sorted(inside, key=lambda path: (path.suffix == ".json", path.name))
