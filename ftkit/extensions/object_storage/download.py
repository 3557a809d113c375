"""Download of runs at a url: into the directory that stands for it, and as copies to look at.

Small files are downloaded at once. Shards and other large files stay at the url until they are
needed: a checkpoint whose metadata is here counts as complete, and its missing files are read from
the url (`ranges.py`). Checkpoints that this machine could not upload are kept.
"""

import json
import math
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from itertools import count, pairwise
from pathlib import Path

from ftkit.checkpoint.metadata import METADATA, CheckpointError, is_shard, read_metadata
from ftkit.checkpoint.store import step_of
from ftkit.errors import UserError
from ftkit.extensions.object_storage.claim import EXPIRES_S, ClaimWatch, is_claim
from ftkit.extensions.object_storage.objects import Objects
from ftkit.extensions.object_storage.replica import Listing, Replica, fetch_missing, fetch_whole
from ftkit.runs.directory import RunDirectory
from ftkit.runs.lock import is_at_work_here
from ftkit.utils.damaged_files import reading
from ftkit.utils.files import remove
from ftkit.utils.process import print_line
from ftkit.utils.progress import print_notice
from ftkit.utils.url_files import StorageError, unreachable
from ftkit.utils.urls import display_path

SMALL_BYTES = 2**20
"""Files up to this size are downloaded with their run."""
_LOOKS_EVERY_S = 5.0
"""A run uploads its rows every half a minute; more requests would show nothing more."""


# --- What lies at the url of a run ----------------------------------------------------------------


def checkpoint_name(run: RunDirectory, step: int) -> str:
    """Common prefix of the names of a checkpoint's objects, without the slash."""
    return run.store.path(step).relative_to(run.path).as_posix()


def committed_steps(listing: Iterable[str]) -> set[int]:
    """Steps of the complete checkpoints at a url: metadata is uploaded last."""
    parts = (name.split("/") for name in listing)
    found = (step_of(part[1]) for part in parts if len(part) == 3 and part[2] == METADATA)
    return {step for step in found if step is not None}


def is_state_file(run: RunDirectory, name: str) -> bool:
    """Return whether an object is a file of the state, which is there only during a run."""
    return name.startswith(f"{run.state.name}/") and not is_claim(name)


def delete_checkpoint(replica: Replica, name: str, listing: Iterable[str]) -> list[str]:
    """Delete a checkpoint at a url, its metadata first: from then on it counts as incomplete.

    Args:
        replica: of the run.
        name: common prefix of its objects.
        listing: names of the objects that are there.

    Returns:
        The names of what was deleted.

    Raises:
        StorageError: the storage does not do it.
    """
    metadata = f"{name}/{METADATA}"
    names = [key for key in listing if key.startswith(f"{name}/")]
    replica.delete(sorted(names, key=lambda key: key != metadata))
    return names


# --- Into the directory that stands for the url ---------------------------------------------------


def run_around(path: Path) -> RunDirectory:
    """The run that a path belongs to: as itself, as its checkpoints or one, or as its result."""
    run = RunDirectory(path)
    if path.name == run.final.name:
        return RunDirectory(path.parent)
    for inside, place in pairwise((path, *path.parents)):
        if place.name == run.store.directory.name and step_of(inside.name) is not None:
            return RunDirectory(place.parent)
    if path.name == run.store.directory.name:
        return RunDirectory(path.parent)
    return run


def refresh(path: Path) -> None:
    """Download the small files of the run that a path belongs to. See `ftkit.runs.url_runs`."""
    run = run_around(path)
    if not is_at_work_here(run):
        try:
            fetch_run(run)
        except StorageError as error:
            raise unreachable(error) from error


def fetch_run(run: RunDirectory) -> Listing:
    """Download the small files of a run, whether it is running or not.

    Returns:
        What lies at the url.

    Raises:
        StorageError: the url cannot be read.
    """
    replica = Replica.of(run.path)
    listing = replica.objects.listing()
    steps = committed_steps(listing)
    is_ahead = _keep_or_drop_local(run, replica, listing, steps)
    for step in steps:
        metadata = f"{checkpoint_name(run, step)}/{METADATA}"
        if replica.version(metadata) != listing[metadata].version:
            _fetch_checkpoint(run, step, replica, listing)
    # A machine that is ahead has newer rows and logs than the url.
    if not is_ahead:
        _fetch_rest(run, replica, listing)
    backups = f"{run.backups.name}/"
    for number in {name.split("/")[1] for name in listing if name.startswith(backups)}:
        # Empty: the next backup of this machine then takes a number that is free at the url, too.
        (run.backups / number).mkdir(parents=True, exist_ok=True)
    replica.save()
    return listing


def fetch_without_shards(checkpoint: Path) -> None:
    """Download all files of a checkpoint but its shards. See `ftkit.runs.url_runs`."""
    with suppress(CheckpointError):  # the next reader reports it
        names = [name for name in read_metadata(checkpoint).files if not is_shard(name)]
        fetch_missing(checkpoint, names)


def fetch_result(path: Path) -> None:
    """Download what is needed to use a result. See `ftkit.runs.url_runs`."""
    run = run_around(path)
    refresh(path)
    # A model or an adapter alone: all of it is the result.
    if path == run.path and not run.is_run() and run.store.newest() is None:
        fetch_whole(path)
    elif path in (run.path, run.final) and run.final.is_dir():
        fetch_whole(run.final)
    elif path not in (run.path, run.final, run.store.directory):
        inside = path.relative_to(run.store.directory)
        fetch_without_shards(run.store.directory / inside.parts[0])
    elif (newest := run.store.newest()) is not None:
        fetch_without_shards(run.store.path(newest))


def fetch_killed(run: RunDirectory, listing: Listing, *, heard_at: str | None) -> None:
    """Download the state that a killed session left at the url, as if it had been killed here.

    Args:
        run: its directory, locked.
        listing: what lies at the url.
        heard_at: when the session last renewed its claim, in ISO 8601; None: its claim is gone.

    Raises:
        StorageError: the url cannot be read.
    """
    inside = f"{run.state.name}/"
    job = f"{inside}{run.job.name}"
    if job not in listing:
        return
    objects = Objects.of(run.path)
    if run.job_of_killed.exists():
        # This machine has that state already, in its own files or from an earlier download.
        is_own = Replica.of(run.path).version(job) == listing[job].version
        if is_own or _started_at_s(run.job_of_killed.read_bytes()) == _started_at_s(
            objects.read(job)
        ):
            return
    remove(run.killed)
    heard_s = time.time() if heard_at is None else datetime.fromisoformat(heard_at).timestamp()
    for name, entry in listing.items():
        if is_state_file(run, name) and entry.size_bytes <= SMALL_BYTES:
            path = run.killed / name.removeprefix(inside)
            objects.download(name, path)
            # The end of a killed session is known from the time of its files.
            os.utime(path, (heard_s, heard_s))


def _started_at_s(job: bytes) -> float | None:
    """The start of a session, which identifies it; None: the job file is damaged."""
    with suppress(UserError), reading("a job file", "a JSON object with started_at_s"):
        return float(json.loads(job)["started_at_s"])
    return None


def _keep_or_drop_local(
    run: RunDirectory, replica: Replica, listing: Listing, steps: set[int]
) -> bool:
    """Keep or drop checkpoints of this machine alone; return whether it is ahead of the url.

    One that was at the url has been deleted there, and is deleted here, too; so is one of which
    other machines had shards. One that was never uploaded is kept, unless another machine continued
    from an earlier one: then it moves to set_aside.
    """
    store = run.store
    local = sorted(set(store.steps()) - steps)
    metadata = {step: f"{checkpoint_name(run, step)}/{METADATA}" for step in [*local, *steps]}
    unsent = [step for step in local if replica.version(metadata[step]) is None]
    # The rest of these is on other machines, so nothing can continue from them here.
    incomplete = [step for step in unsent if not _has_all_files(store.path(step))]
    for step in incomplete:
        print_line(
            f"ftkit: the checkpoint of step {step} is not at {display_path(run.path)}, and this "
            "machine has only a part of it: other machines did not upload their shards. It is "
            "deleted"
        )
    unsent = [step for step in unsent if step not in incomplete]
    for step in set(local) - set(unsent):
        store.delete(step)
        for name in replica.names():
            if name.startswith(f"{checkpoint_name(run, step)}/"):
                replica.forget(name)
    if not unsent:
        return False
    # The url is as this machine left it: the run was not continued elsewhere.
    if all(replica.version(metadata[s]) == listing[metadata[s]].version for s in steps):
        return True
    taken = [int(path.name) for path in run.backups.glob("*") if path.name.isdecimal()]
    target = run.backups / str(max(taken, default=0) + 1) / store.directory.name
    target.mkdir(parents=True)
    for step in unsent:
        store.path(step).rename(target / store.path(step).name)
    print_line(
        f"ftkit: {display_path(run.path)} was continued on another machine: the checkpoints of "
        f"step {', '.join(map(str, unsent))}, which are only on this machine, are now in {target}"
    )
    return False


def _has_all_files(checkpoint: Path) -> bool:
    try:
        return all((checkpoint / name).exists() for name in read_metadata(checkpoint).files)
    except CheckpointError:  # damaged, which is reported elsewhere
        return True


def _fetch_checkpoint(run: RunDirectory, step: int, replica: Replica, listing: Listing) -> None:
    """Download metadata and small files of a checkpoint; they replace another of that step."""
    store, name = run.store, checkpoint_name(run, step)
    partial = store.partial(step)
    remove(partial)
    small = {
        file: entry
        for file, entry in listing.items()
        if file.startswith(f"{name}/")
        and (entry.size_bytes <= SMALL_BYTES or file == f"{name}/{METADATA}")
        and not is_shard(file.removeprefix(f"{name}/"))
    }
    for file in small:
        replica.objects.download(file, partial / file.removeprefix(f"{name}/"))
    # Only when the new one is here as a whole.
    remove(store.path(step))
    # By one rename, like a checkpoint that is written here.
    partial.rename(store.path(step))
    for file, entry in small.items():
        replica.note(file, entry.version)


def _fetch_rest(run: RunDirectory, replica: Replica, listing: Listing) -> None:
    """Download the files of the run itself, and the small ones of its result."""
    final = f"{run.final.name}/"
    elsewhere = (f"{run.store.directory.name}/", f"{run.state.name}/")
    # Deleted at the url since: deleted here, too.
    for name in replica.names():
        if name not in listing and not name.startswith(elsewhere):
            path = run.path / name
            path.unlink(missing_ok=True)
            replica.forget(name)
            with suppress(OSError):
                while (path := path.parent) != run.path:
                    path.rmdir()
    for name, entry in listing.items():
        if "/" in name and not name.startswith(final):
            continue
        known = replica.version(name)
        if known == entry.version and (run.path / name).exists():
            continue
        if "/" in name and entry.size_bytes > SMALL_BYTES:
            # A large file is fetched when it is needed; until then an older copy must not be used.
            if known not in (None, entry.version):
                (run.path / name).unlink(missing_ok=True)
            continue
        replica.download(name, entry.version)
    with suppress(OSError):
        run.final.rmdir()  # if nothing is left in it


# --- As a copy, for readers -----------------------------------------------------------------------


class UrlCopy:
    """A copy of a run; see `ftkit.runs.url_runs.RunCopy`."""

    def __init__(self, path: Path, copy: Path) -> None:
        """Download nothing yet; `path` stands for the url, and `copy` is an empty directory."""
        self.path, self._run = path, RunDirectory(copy)
        self._replica = Replica(copy, Objects.of(path))
        self._claim = ClaimWatch(self._replica.objects)
        self._looked_s: float | None = None
        self._at_work = False

    @property
    def directory(self) -> Path:
        return self._run.path

    def look(self) -> bool:
        now_s = time.monotonic()
        if self._looked_s is not None and now_s - self._looked_s < _LOOKS_EVERY_S:
            return self._at_work
        try:
            self.take(self._replica.objects.listing())
        except StorageError:
            # An answer that is a few seconds old is better than none.
            if self._looked_s is None:
                raise
        self._looked_s = now_s
        return self._at_work

    def settle(self) -> None:
        with suppress(StorageError):  # the next look reports it
            self.look()
        if self._claim.is_in_doubt:
            print_notice(
                f"{self._replica.objects.url} seems to have been left long ago: watching for up to "
                f"{EXPIRES_S:g} s whether its run is still running"
            )
        for _ in range(math.ceil(EXPIRES_S / _LOOKS_EVERY_S) + 1):
            if not self._claim.is_in_doubt:
                return
            time.sleep(_LOOKS_EVERY_S)
            self.look()

    def take(self, listing: Listing) -> None:
        """Bring the copy to the state of a listing of the run.

        Raises:
            StorageError: the url does not answer.
        """
        claimed, alive = self._claim.look(listing)
        self._update(listing, with_state=claimed)
        self._at_work = alive
        self._looked_s = time.monotonic()

    def _update(self, listing: Listing, *, with_state: bool) -> None:
        """Download what changed, and remove what is gone; state files only of a claimed run."""
        run = self._run
        shown = {run.report.name, run.recipe.name, *(path.name for path in run.rows)}
        wanted = [
            name for name in listing if name in shown or (with_state and is_state_file(run, name))
        ]
        if (newest := max(committed_steps(listing), default=None)) is not None:
            # Its metadata show the newest checkpoint; shards say nothing more.
            wanted.append(f"{checkpoint_name(run, newest)}/{METADATA}")
        for name in set(self._replica.names()) - set(wanted):
            # The directory of a checkpoint or rank as a whole.
            remove(run.path.joinpath(*Path(name).parts[:2]))
            self._replica.forget(name)
        for name in wanted:
            if self._replica.version(name) != listing[name].version:
                # Replaced since the listing; the next look finds its successor.
                with suppress(FileNotFoundError):
                    self._replica.download(name, listing[name].version)


class UrlCopies:
    """Copies of runs, with one listing for all; see `ftkit.runs.url_runs.RunCopies`."""

    def __init__(self, path: Path, place: Path) -> None:
        """Download nothing yet; `path` stands for the url, and `place` is an empty directory."""
        self._path, self._place = path, place
        self._objects = Objects.of(path)
        self._copies: dict[str, UrlCopy] = {}
        self._numbers = count()
        self._looked_s: float | None = None

    def look(self) -> list[UrlCopy]:
        now_s = time.monotonic()
        if self._looked_s is None or now_s - self._looked_s >= _LOOKS_EVERY_S:
            try:
                self._take(self._objects.listing())
            except StorageError:
                if self._looked_s is None:
                    raise
            self._looked_s = now_s
        return [self._copies[name] for name in sorted(self._copies)]

    def _take(self, listing: Listing) -> None:
        found = _by_run(listing)
        for name in set(self._copies) - set(found):
            remove(self._copies.pop(name).directory)
        for name, part in found.items():
            if name not in self._copies:
                place = self._place / str(next(self._numbers))
                self._copies[name] = UrlCopy(self._path / name, place)
            with suppress(StorageError):  # reading the copy reports it
                self._copies[name].take(part)


def _by_run(listing: Listing) -> dict[str, Listing]:
    """The part of each run, by the path of its directory; no run lies inside another."""
    run = RunDirectory(Path())
    signs = {run.report.name, run.recipe.name, run.state.name}
    directories = set()
    for name in listing:
        parts = name.split("/")
        for depth, part in enumerate(parts):
            if part in signs:
                directories.add("/".join(parts[:depth]))
            # Nothing below a hidden directory, such as .run, is a run of its own.
            if part.startswith("."):
                break
    found: dict[str, Listing] = {}
    for name, entry in listing.items():
        parts = name.split("/")
        above = ("/".join(parts[:depth]) for depth in range(len(parts)))
        # The outermost one: a backup in a run looks like a run itself.
        directory = next((path for path in above if path in directories), None)
        if directory is not None:
            inside = name[len(directory) + 1 :] if directory else name
            found.setdefault(directory, {})[inside] = entry
    return found
