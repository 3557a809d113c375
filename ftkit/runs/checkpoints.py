"""Checkpoints of a run on disk: where they are, and in what state."""

import dataclasses
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from ftkit.checkpoint.metadata import METADATA, CheckpointError, Metadata, read_metadata
from ftkit.checkpoint.store import Store, check_files, step_of
from ftkit.errors import UserError
from ftkit.runs.directory import RunDirectory
from ftkit.runs.url_runs import refresh
from ftkit.utils.urls import display_path, url_of


@dataclass(frozen=True, kw_only=True)
class RunCheckpoints:
    """The checkpoints that a path stands for: those of a run, or one of them."""

    path: Path
    """Path as given."""
    store: Store
    """Holds the checkpoints."""
    single: Path | None = None
    """The checkpoint, if the path is that of one."""

    @property
    def runs(self) -> list[RunDirectory]:
        """The directory of the run; two of them where `checkpoints` is a link."""
        directories = (self.store.directory.resolve(), self.store.directory)
        return [
            RunDirectory(path)
            # By the resolved directory: one that came twice could not be locked the second time.
            for path in {path.parent.resolve(): path.parent for path in directories}.values()
        ]

    def directories(self) -> list[Path]:
        """All checkpoints, by step."""
        return [self.single] if self.single else [*map(self.store.path, self.store.steps())]

    def chosen(self, step: str | None) -> Path:
        """The checkpoint of a step, as given on a command line; None: the newest.

        Raises:
            UserError: there is none.
        """
        directories = self.directories()
        if not directories:
            raise UserError(
                f"{display_path(self.path)} holds no checkpoint. Name a run that has saved one."
            )
        if step is None:
            return directories[-1]
        if self.single:
            raise UserError(
                f"{display_path(self.path)} is one checkpoint already. Leave the step {step} out."
            )
        # A number, or the name of a checkpoint's directory. isdecimal alone would take digits of
        # any script.
        number = int(step) if step.isascii() and step.isdecimal() else step_of(step)
        steps = self.store.steps()
        if number is None:
            raise UserError(f"STEP is {step!r}, but must be a number. Try {steps[-1]}.")
        if number not in steps:
            raise UserError(
                f"{display_path(self.path)} holds no checkpoint of step {number}. "
                f"Try one of {', '.join(map(str, steps))}."
            )
        return self.store.path(number)


def find(path: Path) -> RunCheckpoints:
    """Find the checkpoints that a path stands for.

    Raises:
        UserError: it belongs to no run.
    """
    path = path.expanduser()
    refresh(path)
    if not path.is_dir():
        if url_of(path) is not None:
            raise UserError(
                f"{display_path(path)} holds no run and no checkpoint. Name the out_dir of a run, "
                "such as s3://BUCKET/out/lora."
            )
        raise UserError(
            f"{path} is not a directory. Name the out_dir of a run, such as out/finetune/lora."
        )
    run = RunDirectory(path)
    inside = run.store.directory
    for directory in (path, inside):
        if directory.exists() and not os.access(directory, os.R_OK | os.X_OK):
            raise UserError(f"{directory} cannot be read. Check who owns it.")
    # A run first: its directory may have any name, also that of a checkpoint.
    if inside.is_dir():
        return RunCheckpoints(path=path, store=run.store)
    # The name of "." and ".." says nothing about what is there.
    directory = path.resolve() if path.name in ("", "..") else path
    if step_of(directory.name) is not None or (path / METADATA).exists():
        return RunCheckpoints(path=path, store=Store(directory.parent), single=directory)
    # A directory of checkpoints: by its name, also an empty one, or by its content.
    if directory.name == inside.name or Store(directory).steps():
        return RunCheckpoints(path=path, store=Store(directory))
    if run.recipe.exists():
        return RunCheckpoints(path=path, store=run.store)
    raise UserError(
        f"{path} holds no run and no checkpoint. "
        "Name the out_dir of a run, such as out/finetune/lora."
    )


def find_all(path: Path) -> RunCheckpoints:
    """Find the checkpoints of a run.

    Raises:
        UserError: the path is none of a run, or a single checkpoint.
    """
    place = find(path)
    if place.single:
        name = display_path(path)
        raise UserError(f"{name} is one checkpoint, not a run. Try ftkit checkpoints show {name}.")
    return place


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """A checkpoint, or an incomplete one."""

    path: Path
    state: Literal["complete", "damaged", "being written", "leftover"]
    size_bytes: int
    written_s: float
    metadata: Metadata | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def step(self) -> int | None:
        """Step in the metadata, or else in the name."""
        if self.metadata:
            return self.metadata.step
        # A leftover is called .step-00001500.partial, or ends with another word.
        return step_of(self.path.name.removeprefix(".").partition(".")[0])

    def as_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return {
            "step": self.step,
            "path": display_path(self.path),
            "state": self.state.replace(" ", "_"),
            "problems": self.problems,
            "size_bytes": self.size_bytes,
            "metadata": dataclasses.asdict(self.metadata) if self.metadata else None,
        }


def entry_of(path: Path) -> CheckpointEntry:
    """A checkpoint, checked by names and sizes."""
    try:
        metadata = read_metadata(path)
    except CheckpointError as error:
        return CheckpointEntry(
            path=path,
            state="damaged",
            size_bytes=size_of(path),
            written_s=_modified_s(path),
            problems=[str(error)],
        )
    problems = misnamed(path) or check_files(path)
    return CheckpointEntry(
        path=path,
        state="damaged" if problems else "complete",
        size_bytes=size_of(path),
        # The metadata know better: a copied or downloaded file has a new time.
        written_s=_seconds_of(metadata.saved_at) or _modified_s(path),
        metadata=metadata,
        problems=problems,
    )


def leftover(path: Path, at_work: bool) -> CheckpointEntry:
    """Describe a checkpoint that is being written, or was when the run crashed."""
    return CheckpointEntry(
        path=path,
        state="being written" if at_work else "leftover",
        size_bytes=size_of(path),
        written_s=_modified_s(path),
    )


def misnamed(directory: Path) -> list[str]:
    """The problem of a checkpoint with the name of another step; empty: there is none."""
    step = step_of(directory.name)
    if step is None:
        return []
    try:
        Store(directory.parent).metadata(step)
    except CheckpointError as error:
        return [str(error)]
    return []


def size_of(path: Path) -> int:
    """Bytes of all files in a directory, or of one file; those only at its url count, too."""
    found = 0
    if url_of(path) is not None:
        with suppress(CheckpointError):
            files = read_metadata(path).files.items()
            # What is at the url alone counts by its metadata, the rest by its files below.
            found = sum(e.size_bytes for name, e in files if not (path / name).exists())
    for file in [path, *path.rglob("*")]:
        try:
            found += file.lstat().st_size if not file.is_dir() else 0
        # An active run may delete files between listing and stat.
        except OSError:
            continue
    return found


def _modified_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return time.time()


def _seconds_of(utc: str) -> float | None:
    try:
        return datetime.fromisoformat(utc).timestamp()
    except ValueError:
        return None
