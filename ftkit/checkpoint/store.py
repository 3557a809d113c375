"""The checkpoint store: the checkpoints of a run on disk, from commit to removal.

A checkpoint appears by one rename, when all of it is on the disk, and disappears by one rename,
before any of it is removed. So a directory with a final name is complete, unless it was damaged
later; names with a leading dot are being written or removed, or were left by a crash.
"""

import contextlib
import os
import re
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from ftkit.checkpoint.file_checks import hash_file, remote_problem
from ftkit.checkpoint.metadata import (
    METADATA,
    CheckpointError,
    FileEntry,
    Metadata,
    read_metadata,
    write_metadata,
)
from ftkit.errors import UserError
from ftkit.recipe.recipe import Checkpoint
from ftkit.utils.console.formatting import bytes_text
from ftkit.utils.files import free_disk_bytes, remove, sync, write_durably
from ftkit.utils.finite_numbers import finite
from ftkit.utils.progress import OnProgress
from ftkit.utils.url_files import lies_elsewhere

LATEST = "latest"
"""File that names the newest checkpoint, for people and scripts; ftkit never reads it."""
PROGRESS_INTERVAL_S = 0.2

KeepEvery = int | Mapping[int, int] | None
"""Steps whose checkpoints are kept forever; see `is_milestone`."""

# Eight digits with leading zeros sort as text; from 100,000,000 on there are no leading zeros, so
# each step has exactly one name.
_STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's directory; None: it is another name."""
    found = _STEP.fullmatch(name)
    return int(found.group(1)) if found else None


def is_milestone(step: int, keep_every: KeepEvery) -> bool:
    """Return whether the checkpoint of a step is kept forever.

    Args:
        step: of the checkpoint.
        keep_every: an interval of steps, or intervals by the last step to which each applies; the
            last one also applies after its step. None: no checkpoint is kept.
    """
    if not keep_every:
        return False
    if isinstance(keep_every, int):
        return step % keep_every == 0
    ends = sorted(keep_every)
    # The interval of the first range that reaches the step.
    end = next((end for end in ends if step <= end), ends[-1])
    return step % keep_every[end] == 0


def check_files(directory: Path) -> list[str]:
    """Problems of a checkpoint that can be found by names and sizes of its files."""
    try:
        metadata = read_metadata(directory)
    except CheckpointError as error:
        return [str(error)]
    found = (_problem(directory, name, entry) for name, entry in sorted(metadata.files.items()))
    return [problem for problem in found if problem]


def verify(
    directory: Path, progress: OnProgress | None = None, *, fetching: bool = True
) -> list[str]:
    """Problems of a checkpoint, by its checksums; unlisted files are problems too.

    Args:
        directory: of the checkpoint.
        progress: called from the calling thread.
        fetching: always read files that are stored at a url; see `remote_problem`.
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
                # A pool cannot stop a running check: an error in its next block ends it. The result
                # is not used.
                raise InterruptedError

        return problem_of(directory, name, files[name], count, fetching=fetching)

    # Threads are enough: hashlib releases the GIL.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        # Largest first, so that no thread is left with a large file when the others are done.
        largest_first = sorted(files, key=lambda name: -files[name].size_bytes)
        checks = {name: pool.submit(check, name) for name in largest_first}
        try:
            while wait(checks.values(), timeout=PROGRESS_INTERVAL_S).not_done:
                if progress:
                    progress(sum(done.values()), total)
        # Ctrl+C too: otherwise leaving the pool waits until all files are hashed.
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    problems = {name: check.result() for name, check in checks.items()}
    known = {METADATA, *files}
    # Checksums cover what is listed: a file that was added would go unnoticed.
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
    """Problem of one file of a checkpoint, by its checksum; None: there is none.

    Args:
        directory: of the checkpoint.
        name: of the file, relative to it.
        entry: its expected size and checksums.
        on_block: called with the length of each block that is done.
        fetching: always read a file that is stored at a url; see `remote_problem`.
    """
    if problem := _problem(directory, name, entry):
        return problem
    path = directory / name
    if lies_elsewhere(path):
        return remote_problem(path, entry, on_block, fetching=fetching)
    try:
        if hash_file(path, on_block) != entry:
            return f"{path} is damaged: its checksum differs."
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})."
    return None


def _problem(directory: Path, name: str, entry: FileEntry) -> str | None:
    """Problem of a file that can be found without reading it; files at a url are not checked."""
    path = directory / name
    try:
        # lstat and the folders: a link would lead out of the checkpoint, to a file that may change.
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
    """Sorted relative paths of everything that is not a directory."""
    return sorted(
        # Names on Linux are bytes: those that are not UTF-8 could not be printed.
        os.fsencode((Path(folder) / name).relative_to(directory)).decode(errors="replace")
        for folder, folders, names in os.walk(directory)
        # os.walk lists links to directories as directories, and does not follow them.
        for name in [*names, *(f for f in folders if (Path(folder) / f).is_symlink())]
    )


class Store:
    """The checkpoints in ``out_dir/checkpoints``.

    Only one process may change them at a time: the one that holds the run's lock, or its rank 0.
    """

    def __init__(self, directory: Path) -> None:
        """Open a store.

        Args:
            directory: of the checkpoints; need not exist yet.
        """
        self.directory = directory

    def path(self, step: int) -> Path:
        """Directory of the checkpoint of a step, whether it exists or not."""
        return self.directory / f"step-{step:08}"

    def partial(self, step: int) -> Path:
        """Directory in which the checkpoint of a step is written."""
        return self._hidden(step, "partial")

    def commit(self, metadata: Metadata) -> Path:
        """Make the partial directory of ``metadata.step`` the checkpoint of this step.

        Every file there but ``metadata.json`` must be complete and synced. An older checkpoint of
        the same step is replaced.

        Raises:
            OSError: it failed; an older checkpoint of the same step is still there.
        """
        step = metadata.step
        partial, final, replaced = self.partial(step), self.path(step), self._replaced(step)
        # Last of all files: metadata.json lists the others, so it states that they are complete.
        write_metadata(metadata, partial)
        # Directories after their content: a rename may reach the disk before entries that were not
        # synced.
        for folder, _, _ in os.walk(partial, topdown=False):
            sync(Path(folder))
        if os.path.lexists(final):
            # rename() cannot replace a directory with files: set the old one aside first.
            remove(replaced)
            final.rename(replaced)
        try:
            partial.rename(final)
        except OSError:
            self.restore_replaced()
            raise
        sync(self.directory)
        # The directory of checkpoints itself may be new.
        sync(self.directory.parent)
        self._point_to_newest()
        with contextlib.suppress(OSError):  # the next start removes it
            remove(replaced)
        return final

    def discard_partial(self, step: int) -> None:
        """Remove the partial checkpoint of a step, if there is one."""
        remove(self.partial(step))

    def leftovers(self) -> list[Path]:
        """Files of checkpoints that were being written or deleted during a crash."""
        if not self.directory.is_dir():
            return []
        found = {entry for entry in self.directory.iterdir() if _LEFTOVER.fullmatch(entry.name)}
        replacements = {
            entry
            for step in self.steps()
            for entry in self.path(step).glob(f".{METADATA}.*")
            if _REPLACEMENT.fullmatch(entry.name)
        }
        # A checkpoint that was set aside may be the only complete one of its step: it is restored.
        return sorted((found | replacements) - set(self._unreplaced()))

    def remove_leftovers(self) -> list[Path]:
        """Remove what a crash left, and return what was removed.

        If the crash came while a checkpoint was being replaced, the old one is restored.
        """
        self.restore_replaced()
        removed = self.leftovers()
        for entry in removed:
            remove(entry)
        return removed

    def restore_replaced(self) -> None:
        """Restore the old checkpoint if a crash came while it was being replaced."""
        for entry in self._unreplaced():
            entry.rename(entry.with_name(_name_of(entry)))
            sync(self.directory)

    def steps(self) -> list[int]:
        """Steps of all checkpoints in ascending order, including damaged ones."""
        if not self.directory.is_dir():
            return []
        found = ((step_of(entry.name), entry) for entry in self.directory.iterdir())
        return sorted(step for step, entry in found if step is not None and entry.is_dir())

    def newest(self) -> int | None:
        """Step of the newest checkpoint."""
        return max(self.steps(), default=None)

    def metadata(self, step: int) -> Metadata:
        """Metadata of the checkpoint of a step.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, or of another step.
        """
        metadata = read_metadata(self.path(step))
        if metadata.step != step:
            raise CheckpointError(
                f"{self.path(step)} holds the checkpoint of step {metadata.step}."
            )
        return metadata

    def check_files(self, step: int) -> list[str]:
        """Problems of a checkpoint that can be found by names and sizes of its files."""
        return self._problem_of_step(step) or check_files(self.path(step))

    def verify(self, step: int, progress: OnProgress | None = None) -> list[str]:
        """Problems of a checkpoint, by its checksums; see the function `verify`."""
        return self._problem_of_step(step) or verify(self.path(step), progress)

    def delete(self, step: int) -> None:
        """Delete the checkpoint of a step; a crash never leaves half of it."""
        # First a rename, which a crash cannot leave half done.
        deleted = self._hidden(step, "deleted")
        # What a crash left of an earlier deletion: rename() cannot replace it.
        remove(deleted)
        self.path(step).rename(deleted)
        # Synced first: otherwise a crash could bring back a checkpoint whose files are gone.
        sync(self.directory)
        self._point_to_newest()
        remove(deleted)

    def kept(self, keep_last: int, keep_every: KeepEvery, keep_best: int) -> set[int]:
        """Steps of the checkpoints that the retention rule keeps.

        Args:
            keep_last: how many of the newest.
            keep_every: see `is_milestone`.
            keep_best: how many with the lowest validation loss; the newer ones of equal loss.
        """
        # Damaged checkpoints are kept beside the others: a person may want to inspect them.
        steps = self.steps()
        # They do not count among the newest or the best, so they displace no intact one.
        damaged = {step for step in steps if self.check_files(step)}
        sound = [step for step in steps if step not in damaged]
        losses = {step: self.metadata(step).validation_loss for step in sound} if keep_best else {}
        # Of equal losses the newer step sorts first.
        measured = [(loss, -s) for s, its in losses.items() if (loss := finite(its)) is not None]
        return {
            *damaged,
            *sound[max(len(sound) - keep_last, 0) :],
            *(step for step in sound if is_milestone(step, keep_every)),
            *(-negative for _, negative in sorted(measured)[:keep_best]),
        }

    def prune(self, *, keep_last: int, keep_every: KeepEvery, keep_best: int) -> list[int]:
        """Delete all checkpoints that `kept` does not keep, and return their steps."""
        kept = self.kept(keep_last, keep_every, keep_best)
        deleted = [step for step in self.steps() if step not in kept]
        for step in deleted:
            self.delete(step)
        return deleted

    def move_later(self, after_step: int, target: Path) -> list[int]:
        """Move the checkpoints of later steps to ``target/checkpoints``, and return their steps."""
        moved = [step for step in self.steps() if step > after_step]
        if not moved:
            return []
        backup = target / self.directory.name
        backup.mkdir(parents=True, exist_ok=True)
        # The newest first: whatever a crash leaves behind is then a run up to an earlier step.
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
        """Old checkpoints that were set aside for a replacement that was not completed."""
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
        # Only a hint for people: a checkpoint is complete without it.
        with contextlib.suppress(OSError):
            newest = self.newest()
            if newest is None:
                (self.directory / LATEST).unlink(missing_ok=True)
            else:
                write_durably(self.directory / LATEST, f"{self.path(newest).name}\n")


_REPLACEMENT = re.compile(rf"\.{re.escape(METADATA)}\.[0-9]+")
"""Left in a checkpoint by a crash while its metadata were being replaced."""
_LEFTOVER = re.compile(rf"\.{_STEP.pattern}\.(?:partial|deleted|replaced)|\.{LATEST}\.[0-9]+")


def _name_of(hidden: Path) -> str:
    """Final name of a checkpoint that is being written or removed."""
    return hidden.name.removeprefix(".").rpartition(".")[0]


def best_checkpoint(
    places: Sequence[tuple[Store, int]],
    now: tuple[float, int] | None,
    warn: Callable[[str], None],
) -> tuple[int, int] | None:
    """Step and place of the lowest validation loss; the newest one of equal loss.

    Args:
        places: stores of one run and the last step to consider in each; if several have the same
            step, the first one is taken.
        now: loss and step of the current state of training, if its loss was measured.
        warn: called with the problem of each damaged checkpoint that would have been the best.

    Returns:
        The step and the index of its store, or -1 for the current state; None: no loss is known.
    """
    # None that is NaN: a sort would leave it in front of any other.
    candidates = [] if now is None or finite(now[0]) is None else [(now[0], -now[1], -1)]
    for index, (store, last_step) in enumerate(places):
        for step in store.steps():
            try:
                loss = finite(store.metadata(step).validation_loss)
            except CheckpointError:
                continue
            if loss is not None and step <= last_step:
                # A tuple sorts by loss, then by newest step, then by the order of the stores.
                candidates.append((loss, -step, index))
    for _, minus_step, index in sorted(candidates):
        # The current state of training is in memory: there are no files to verify.
        if index < 0:
            return -minus_step, index
        # Only candidates are read in full, the best one first, because hashing takes long.
        problems = verify(places[index][0].path(-minus_step))
        if not problems:
            return -minus_step, index
        warn(f"the checkpoint with the lowest validation loss cannot be used: {problems[0]}")
    return None


def check_disk(
    out_dir: Path,
    checkpoint_bytes: int,
    settings: Checkpoint,
    existing_bytes: int = 0,
    *,
    steps_left: int,
) -> None:
    """Refuse a run whose checkpoints will not fit on the disk.

    Args:
        out_dir: of the run; exists.
        checkpoint_bytes: size of one checkpoint.
        settings: how many are kept. Those that `keep_every` adds are not counted.
        existing_bytes: of checkpoints that exist and will be deleted during the run.
        steps_left: optimizer steps to come, each with at most one checkpoint.

    Raises:
        UserError: the disk has too little free space.
    """
    count = settings.most_at_once(steps_left)
    needed = count * checkpoint_bytes
    # Old checkpoints only make room if enough new ones follow that they are deleted.
    if count < steps_left:
        needed -= existing_bytes
    free = free_disk_bytes(out_dir)
    if needed <= free:
        return
    several = settings.keep_last + settings.keep_best > 1
    advice = "--checkpoint.keep_last 1 --checkpoint.keep_best 0, or another --out_dir"
    raise UserError(
        f"The checkpoints need {bytes_text(needed)} ({count} x {bytes_text(checkpoint_bytes)}, "
        f"for checkpoint.keep_last {settings.keep_last}"
        f"{f', checkpoint.keep_best {settings.keep_best}' if settings.keep_best else ''} and the "
        f"one that is being written), but the disk of {out_dir} has {bytes_text(free)} free. Try "
        f"{advice if several else 'another --out_dir, or --checkpoint.save false'}."
    )
