"""The checkpoint store: how checkpoints are committed, verified and removed.

A checkpoint comes by one rename, when all of it is on the disk, and goes by one rename, before any
of it is removed. So whatever has its final name is whole, unless it was damaged later; names that
begin with a dot are on their way, or were left by a crash.
"""

import contextlib
import os
import re
import stat
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from ftkit.checkpoint.checksums import hash_file, problem_elsewhere
from ftkit.checkpoint.files import METADATA
from ftkit.checkpoint.metadata import (
    CheckpointError,
    FileEntry,
    Metadata,
    read_metadata,
    write_metadata,
)
from ftkit.utils.files import remove, sync, write_durably
from ftkit.utils.progress import OnProgress
from ftkit.utils.remote.ranges import lies_elsewhere

LATEST = "latest"
"""Names the newest checkpoint, for people and scripts; never read here."""
PROGRESS_INTERVAL_S = 0.2

KeepEvery = int | Mapping[int, int] | None
"""Which steps are kept for good; see `is_milestone`."""

_STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")


def step_of(name: str) -> int | None:
    """The step that a directory's name stands for; None: it is no name of a checkpoint."""
    found = _STEP.fullmatch(name)
    return int(found.group(1)) if found else None


def is_milestone(step: int, keep_every: KeepEvery) -> bool:
    """Whether the checkpoint of a step is kept for good.

    Args:
        step: of the checkpoint.
        keep_every: an interval of steps, or intervals by the step up to which each of them holds;
            the last one holds beyond its step, too. None: none is kept.
    """
    if not keep_every:
        return False
    if isinstance(keep_every, int):
        return step % keep_every == 0
    ends = sorted(keep_every)
    end = next((end for end in ends if step <= end), ends[-1])
    return step % keep_every[end] == 0


def check_files(directory: Path) -> list[str]:
    """What is wrong with a checkpoint as far as names and sizes tell; empty: nothing."""
    try:
        metadata = read_metadata(directory)
    except CheckpointError as error:
        return [str(error)]
    found = (_problem(directory, name, entry) for name, entry in sorted(metadata.files.items()))
    return [problem for problem in found if problem]


def verify(
    directory: Path, progress: OnProgress | None = None, *, fetching: bool = True
) -> list[str]:
    """What is wrong with a checkpoint, checksums and files that it does not list included.

    Args:
        directory: of the checkpoint.
        progress: called now and then, by the calling thread.
        fetching: read files that lie at a url in any case; see `problem_elsewhere`.
    """
    try:
        files = read_metadata(directory).files
    except CheckpointError as error:
        return [str(error)]
    total = sum(entry.size_bytes for entry in files.values())
    done = dict.fromkeys(files, 0)
    stopped = threading.Event()

    def check(name: str) -> str | None:
        def count(size: int) -> None:
            done[name] += size
            if stopped.is_set():
                raise InterruptedError

        return problem_of(directory, name, files[name], count, fetching=fetching)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        largest_first = sorted(files, key=lambda name: -files[name].size_bytes)
        checks = {name: pool.submit(check, name) for name in largest_first}
        try:
            while wait(checks.values(), timeout=PROGRESS_INTERVAL_S).not_done:
                if progress:
                    progress(sum(done.values()), total)
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    problems = {name: check.result() for name, check in checks.items()}
    known = {METADATA, *files}
    unlisted = [
        name
        for name in _files_in(directory)
        if name not in known and not _REPLACEMENT.fullmatch(name)
    ]
    return [
        *(problem for _, problem in sorted(problems.items()) if problem),
        *(f"{directory / name} is not one of its files." for name in unlisted),
    ]


def problem_of(
    directory: Path,
    name: str,
    entry: FileEntry,
    on_block: Callable[[int], None] | None = None,
    *,
    fetching: bool = True,
) -> str | None:
    """What is wrong with one file of a checkpoint, its checksum included; None: nothing.

    Args:
        directory: of the checkpoint.
        name: of the file, relative to it.
        entry: what the file must be.
        on_block: told the length of each block that is done.
        fetching: read a file that lies at a url in any case; see `problem_elsewhere`.
    """
    if problem := _problem(directory, name, entry):
        return problem
    path = directory / name
    if lies_elsewhere(path):
        return problem_elsewhere(path, entry, on_block, fetching=fetching)
    try:
        if hash_file(path, on_block) != entry:
            return f"{path} is damaged: its checksum is another."
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})."
    return None


def _problem(directory: Path, name: str, entry: FileEntry) -> str | None:
    """What is wrong with a file without reading it; one that lies at a url is not looked at."""
    path = directory / name
    try:
        found = path.lstat()
        folders = [directory / folder for folder in list(Path(name).parents)[:-1]]
        if not stat.S_ISREG(found.st_mode) or any(folder.is_symlink() for folder in folders):
            return f"{path} is not a regular file of the checkpoint."
    except FileNotFoundError:
        return None if lies_elsewhere(path) else f"{path} is missing."
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})."
    if found.st_size != entry.size_bytes:
        return f"{path} has {found.st_size:,} bytes instead of {entry.size_bytes:,}."
    return None


def _files_in(directory: Path) -> list[str]:
    """Paths of all that is no directory, relative, sorted."""
    return sorted(
        os.fsencode((Path(folder) / name).relative_to(directory)).decode(errors="replace")
        for folder, folders, names in os.walk(directory)
        for name in [*names, *(f for f in folders if (Path(folder) / f).is_symlink())]
    )


class Store:
    """The checkpoints in ``out_dir/checkpoints``.

    Only one process may change them at a time: the one that holds the run's lock, or its rank 0.
    """

    def __init__(self, directory: Path) -> None:
        """A store, which need not exist yet.

        Args:
            directory: holds the checkpoints.
        """
        self.directory = directory

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.directory / f"step-{step:08}"

    def partial(self, step: int) -> Path:
        """Where the checkpoint of a step is written."""
        return self._hidden(step, "partial")

    def commit(self, metadata: Metadata) -> Path:
        """Make what was written to the partial directory of ``metadata.step`` the checkpoint.

        Every file there but ``metadata.json`` must be complete and synced. A checkpoint of the
        same step is replaced.

        Raises:
            OSError: and there is no such checkpoint, or still the one before.
        """
        step = metadata.step
        partial, final, replaced = self.partial(step), self.path(step), self._replaced(step)
        write_metadata(metadata, partial)
        for folder, _, _ in os.walk(partial, topdown=False):
            sync(Path(folder))
        if os.path.lexists(final):
            remove(replaced)
            final.rename(replaced)
        try:
            partial.rename(final)
        except OSError:
            self.restore_replaced()
            raise
        sync(self.directory)
        sync(self.directory.parent)
        self._point_to_newest()
        with contextlib.suppress(OSError):  # the next start removes it
            remove(replaced)
        return final

    def discard_partial(self, step: int) -> None:
        """Remove what was written for the checkpoint of a step, if anything was."""
        remove(self.partial(step))

    def leftovers(self) -> list[Path]:
        """What a crash left of checkpoints that were being written or deleted."""
        if not self.directory.is_dir():
            return []
        found = {entry for entry in self.directory.iterdir() if _LEFTOVER.fullmatch(entry.name)}
        replacements = {
            entry
            for step in self.steps()
            for entry in self.path(step).glob(f".{METADATA}.*")
            if _REPLACEMENT.fullmatch(entry.name)
        }
        return sorted((found | replacements) - set(self._unreplaced()))

    def remove_leftovers(self) -> list[Path]:
        """Remove what a crash left; what was removed.

        A checkpoint that was about to be replaced, and was not yet, is put back.
        """
        self.restore_replaced()
        removed = self.leftovers()
        for entry in removed:
            remove(entry)
        return removed

    def restore_replaced(self) -> None:
        """Put back a checkpoint that was about to be replaced when a crash came."""
        for entry in self._unreplaced():
            entry.rename(entry.with_name(_name_of(entry)))
            sync(self.directory)

    def steps(self) -> list[int]:
        """Steps of all checkpoints, damaged or not, ascending."""
        if not self.directory.is_dir():
            return []
        found = ((step_of(entry.name), entry) for entry in self.directory.iterdir())
        return sorted(step for step, entry in found if step is not None and entry.is_dir())

    def newest(self) -> int | None:
        """The last of the steps."""
        return max(self.steps(), default=None)

    def metadata(self, step: int) -> Metadata:
        """What the checkpoint of a step says about itself.

        Raises:
            CheckpointError: it is missing, damaged, or that of another step.
        """
        metadata = read_metadata(self.path(step))
        if metadata.step != step:
            raise CheckpointError(
                f"{self.path(step)} holds the checkpoint of step {metadata.step}."
            )
        return metadata

    def check_files(self, step: int) -> list[str]:
        """What is wrong with a checkpoint as far as names and sizes tell; empty: nothing."""
        return self._problem_of_step(step) or check_files(self.path(step))

    def verify(self, step: int, progress: OnProgress | None = None) -> list[str]:
        """What is wrong with a checkpoint, checksums and files that it does not list included.

        Args:
            step: of the checkpoint.
            progress: called now and then, by the calling thread.
        """
        return self._problem_of_step(step) or verify(self.path(step), progress)

    def delete(self, step: int) -> None:
        """Delete the checkpoint of a step: all of it, or none."""
        deleted = self._hidden(step, "deleted")
        remove(deleted)
        self.path(step).rename(deleted)
        sync(self.directory)
        self._point_to_newest()
        remove(deleted)

    def kept(self, keep_last: int, keep_every: KeepEvery, keep_best: int) -> set[int]:
        """The steps that a rule keeps.

        A damaged checkpoint counts for nothing and is kept: somebody may want to look at it.

        Args:
            keep_last: how many of the newest.
            keep_every: see `is_milestone`.
            keep_best: how many of the lowest validation loss; of equal ones the newer.
        """
        steps = self.steps()
        damaged = {step for step in steps if self.check_files(step)}
        sound = [step for step in steps if step not in damaged]
        losses = {step: self.metadata(step).validation_loss for step in sound} if keep_best else {}
        measured = [(loss, -step) for step, loss in losses.items() if loss is not None]
        return {
            *damaged,
            *sound[max(len(sound) - keep_last, 0) :],
            *(step for step in sound if is_milestone(step, keep_every)),
            *(-negative for _, negative in sorted(measured)[:keep_best]),
        }

    def prune(self, *, keep_last: int, keep_every: KeepEvery, keep_best: int) -> list[int]:
        """Delete every checkpoint that the rule of `kept` does not keep; their steps."""
        kept = self.kept(keep_last, keep_every, keep_best)
        deleted = [step for step in self.steps() if step not in kept]
        for step in deleted:
            self.delete(step)
        return deleted

    def move_later(self, after_step: int, target: Path) -> list[int]:
        """Move the checkpoints of later steps into ``target/checkpoints``; their steps."""
        moved = [step for step in self.steps() if step > after_step]
        if not moved:
            return []
        backup = target / self.directory.name
        backup.mkdir(parents=True, exist_ok=True)
        for step in reversed(moved):
            self.path(step).rename(backup / self.path(step).name)
        sync(backup)
        sync(self.directory)
        self._point_to_newest()
        return moved

    def put_back(self, target: Path) -> None:
        """Undo `move_later`."""
        backup = target / self.directory.name
        for entry in backup.iterdir():
            entry.rename(self.directory / entry.name)
        backup.rmdir()

    def _hidden(self, step: int, what: str) -> Path:
        path = self.path(step)
        return path.with_name(f".{path.name}.{what}")

    def _replaced(self, step: int) -> Path:
        return self._hidden(step, "replaced")

    def _unreplaced(self) -> list[Path]:
        """Checkpoints that lost their name to a replacement that never came."""
        found = self.directory.glob(".step-*.replaced")
        return [
            entry
            for entry in found
            if step_of(_name_of(entry)) is not None
            and not os.path.lexists(entry.with_name(_name_of(entry)))
        ]

    def _problem_of_step(self, step: int) -> list[str]:
        try:
            self.metadata(step)
        except CheckpointError as error:
            return [str(error)]
        return []

    def _point_to_newest(self) -> None:
        """Bring `latest` up to date; only a hint, so a failure is none of the checkpoint."""
        with contextlib.suppress(OSError):
            newest = self.newest()
            if newest is None:
                (self.directory / LATEST).unlink(missing_ok=True)
            else:
                write_durably(self.directory / LATEST, f"{self.path(newest).name}\n")


_REPLACEMENT = re.compile(rf"\.{re.escape(METADATA)}\.[0-9]+")
"""What a crash leaves in a checkpoint whose metadata were being replaced."""
_LEFTOVER = re.compile(rf"\.{_STEP.pattern}\.(?:partial|deleted|replaced)|\.{LATEST}\.[0-9]+")


def _name_of(hidden: Path) -> str:
    """The name that a checkpoint on its way will have, or had."""
    return hidden.name.removeprefix(".").rpartition(".")[0]
