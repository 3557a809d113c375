"""What a run's url gets besides checkpoints, and who sends of these what is not here."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ftkit.checkpoint.store import LATEST
from ftkit.runs.directory import RunDirectory
from ftkit.runs.remote_claim import is_claim
from ftkit.utils.files import remove

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

    def gone(self) -> str:
        """Which of them will send nothing any more; empty: none."""


def state_files(run: RunDirectory) -> list[Path]:
    """Of what supervisor and ranks tell each other, what other machines must know.

    It is at the url while the run is at work: `ftkit watch` shows it, and if the run is killed the
    next session learns of it how this one was.
    """
    files = [run.job, run.lock, *(rank.report for rank in run.ranks())]
    return [file for file in files if file.exists()]


def is_state(run: RunDirectory, name: str) -> bool:
    """Whether an object is one of `state_files`."""
    return name.startswith(f"{run.state.name}/") and not is_claim(name)


def carried_files(run: RunDirectory, everything: bool) -> Iterator[Path]:
    """All but checkpoints and what is being written, settings of the result after its weights.

    While the run is at work, what is only there once is left for the end.
    """
    yield from state_files(run)
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


@contextmanager
def linked_checkpoint(run: RunDirectory, step: int) -> Iterator[Path]:
    """The files of a checkpoint under other names, so that they last while they are sent.

    A run that saves faster than it can send would otherwise delete each before it is there.
    """
    directory, held = run.store.path(step), run.state / "sending"
    remove(held)
    try:
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                link = held / path.relative_to(directory)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.hardlink_to(path)
        yield held if held.exists() else directory
    except FileNotFoundError:  # deleted just now: newer ones have taken its place
        yield directory
    finally:
        remove(held)
