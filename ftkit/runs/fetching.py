"""Fetching of a run from its url into the directory that stands for it.

Small files are fetched at once. Shards and other large files stay where they are until somebody
needs them: a checkpoint here whose metadata are here is complete, and what it lacks of its files
lies at its url (`ftkit.utils.remote.ranges`). What a run of this machine could not send is kept.
"""

import json
import os
import time
from contextlib import suppress
from datetime import datetime
from fcntl import LOCK_NB, LOCK_SH, flock
from itertools import pairwise
from pathlib import Path

from ftkit.checkpoint.metadata import METADATA, CheckpointError, is_shard, read_metadata
from ftkit.checkpoint.store import step_of
from ftkit.errors import UserError
from ftkit.runs.carrying.files import is_state
from ftkit.runs.directory import RunDirectory
from ftkit.utils.damaged_files import reading
from ftkit.utils.files import remove
from ftkit.utils.process import print_line
from ftkit.utils.remote.fetch import Known, Listing, fetch_missing, fetch_whole, unreachable
from ftkit.utils.remote.objects import Objects, StorageError
from ftkit.utils.remote.urls import display_path, local_path, url_of

SMALL_BYTES = 2**20
"""A file up to this size is fetched with its run."""


def run_around(path: Path) -> RunDirectory:
    """The run that a path would lie in: itself, or what holds its checkpoints or its result."""
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
    """Bring a run that lies at a url here, as far as its files are small.

    Nothing is done for other paths, and where a run of this machine is at work.

    Raises:
        UserError: the url cannot be read.
    """
    if url_of(path) is None:
        return
    run = run_around(path)
    if not is_at_work_here(run):
        try:
            fetch_run(run)
        except StorageError as error:
            raise unreachable(error) from error


def fetch_run(run: RunDirectory) -> Listing:
    """The same, whether somebody is at work there or not; what lies at the url.

    Raises:
        StorageError: the url cannot be read.
    """
    objects, known = Objects.of(run.path), Known(run.path)
    listing = objects.listing()
    steps = committed_steps(listing)
    is_ahead = _settle_own(run, known, listing, steps)
    for step in steps:
        name = checkpoint_name(run, step)
        if known.version(f"{name}/{METADATA}") != listing[f"{name}/{METADATA}"].version:
            _fetch_checkpoint(run, step, objects, known, listing)
    if not is_ahead:
        _fetch_rest(run, objects, known, listing)
    for number in {name.split("/")[1] for name in listing if name.startswith(_below(run.backups))}:
        (run.backups / number).mkdir(parents=True, exist_ok=True)
    known.save()
    return listing


def committed_steps(listing: Listing) -> set[int]:
    """The steps whose checkpoints are complete at a url: their metadata come last."""
    parts = (name.split("/") for name in listing)
    found = (step_of(part[1]) for part in parts if len(part) == 3 and part[2] == METADATA)
    return {step for step in found if step is not None}


def checkpoint_name(run: RunDirectory, step: int) -> str:
    """How the objects of a checkpoint begin."""
    return run.store.path(step).relative_to(run.path).as_posix()


def fetch_companions(checkpoint: Path) -> None:
    """Bring all files of a checkpoint here but its shards.

    Raises:
        UserError: they cannot be read.
    """
    if url_of(checkpoint) is None:
        return
    with suppress(CheckpointError):  # whoever reads it next says so
        names = [name for name in read_metadata(checkpoint).files if not is_shard(name)]
        fetch_missing(checkpoint, names)


def opened_url(name: str) -> Path:
    """A result that is named by its url, as a path here with all that is needed of it.

    Args:
        name: the url of a run, its checkpoints or one of them, a result, an adapter or a model.

    Raises:
        UserError: the url cannot be read.
    """
    path = local_path(name)
    run = run_around(path)
    refresh(path)
    if path == run.path and not run.is_run() and run.store.newest() is None:
        fetch_whole(path)
    elif path in (run.path, run.final) and run.final.is_dir():
        fetch_whole(run.final)
    elif path not in (run.path, run.final, run.store.directory):
        inside = path.relative_to(run.store.directory)
        fetch_companions(run.store.directory / inside.parts[0])
    elif (newest := run.store.newest()) is not None:
        fetch_companions(run.store.path(newest))
    return path


def _settle_own(run: RunDirectory, known: Known, listing: Listing, steps: set[int]) -> bool:
    """Decide about checkpoints that are here alone; whether this machine is ahead of the url.

    One that was there and is no more has been deleted, and so is one of which this machine has a
    part. One that was never sent is kept if nobody else has gone on meanwhile; else it goes to
    set_aside.
    """
    store = run.store
    own = sorted(set(store.steps()) - steps)
    metadata_name = {step: f"{checkpoint_name(run, step)}/{METADATA}" for step in [*own, *steps]}
    unsent = [step for step in own if known.version(metadata_name[step]) is None]
    halves = {step for step in unsent if not _is_whole(store.path(step))}
    for step in sorted(halves):
        print_line(
            f"ftkit: the checkpoint of step {step} is not at {display_path(run.path)} and not "
            "whole on this machine: other machines did not upload their shards of it. It is "
            "deleted"
        )
    unsent = [step for step in unsent if step not in halves]
    for step in set(own) - set(unsent):
        store.delete(step)
        for name in known.names():
            if name.startswith(f"{checkpoint_name(run, step)}/"):
                known.forget(name)
    if not unsent:
        return False
    if all(known.version(metadata_name[s]) == listing[metadata_name[s]].version for s in steps):
        return True
    taken = [int(path.name) for path in run.backups.glob("*") if path.name.isdecimal()]
    target = run.backups / str(max(taken, default=0) + 1) / store.directory.name
    target.mkdir(parents=True)
    for step in unsent:
        store.path(step).rename(target / store.path(step).name)
    print_line(
        f"ftkit: {display_path(run.path)} has gone on elsewhere: checkpoints of step "
        f"{', '.join(map(str, unsent))}, which are only on this machine, are in {target} now"
    )
    return False


def fetch_killed(run: RunDirectory, listing: Listing, *, heard_at: str | None) -> None:
    """Bring here what a session left that was killed on another machine, as if it were this one.

    Args:
        run: its directory, locked.
        listing: what lies at the url.
        heard_at: when the session renewed its claim for the last time; ISO 8601. None: its claim is
            gone.

    Raises:
        StorageError: the url cannot be read.
    """
    inside = _below(run.state)
    job = f"{inside}{run.job.name}"
    if job not in listing:
        return
    objects = Objects.of(run.path)
    if run.job_of_killed.exists():
        is_known = Known(run.path).version(job) == listing[job].version  # sent from here
        if is_known or _start_of(run.job_of_killed.read_bytes()) == _start_of(objects.read(job)):
            return
    remove(run.killed)
    heard_s = time.time() if heard_at is None else datetime.fromisoformat(heard_at).timestamp()
    for name, entry in listing.items():
        if is_state(run, name) and entry.size_bytes <= SMALL_BYTES:
            path = run.killed / name.removeprefix(inside)
            objects.download(name, path)
            os.utime(path, (heard_s, heard_s))


def _start_of(job: bytes) -> float | None:
    """When the session of a job file started, which tells it from others; None: it is damaged."""
    with suppress(UserError), reading("a job file", "a JSON object with started_at_s"):
        return float(json.loads(job)["started_at_s"])
    return None


def _is_whole(checkpoint: Path) -> bool:
    """Whether all files of a checkpoint are here, or it is damaged, which others say."""
    try:
        return all((checkpoint / name).exists() for name in read_metadata(checkpoint).files)
    except CheckpointError:
        return True


def _fetch_checkpoint(
    run: RunDirectory, step: int, objects: Objects, known: Known, listing: Listing
) -> None:
    """A checkpoint with its metadata and small files; another one of the same step goes."""
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
        objects.download(file, partial / file.removeprefix(f"{name}/"))
    remove(store.path(step))
    partial.rename(store.path(step))
    for file, entry in small.items():
        known.note(file, entry.version)


def _fetch_rest(run: RunDirectory, objects: Objects, known: Known, listing: Listing) -> None:
    """The files of the run itself, and of its result those that are small."""
    final = _below(run.final)
    wanted = {
        name: entry for name, entry in listing.items() if "/" not in name or name.startswith(final)
    }
    elsewhere = (f"{run.store.directory.name}/", _below(run.state))
    for name in known.names():
        if name not in listing and not name.startswith(elsewhere):
            path = run.path / name
            path.unlink(missing_ok=True)
            known.forget(name)
            with suppress(OSError):
                while (path := path.parent) != run.path:
                    path.rmdir()
    for name, entry in wanted.items():
        if known.version(name) == entry.version and (run.path / name).exists():
            continue
        if "/" in name and entry.size_bytes > SMALL_BYTES:
            if known.version(name) not in (None, entry.version):
                (run.path / name).unlink(missing_ok=True)
            continue
        objects.download(name, run.path / name)
        known.note(name, entry.version)
    with suppress(OSError):
        run.final.rmdir()  # if nothing is left of it


def _below(directory: Path) -> str:
    return f"{directory.name}/"


def is_at_work_here(run: RunDirectory) -> bool:
    """Whether a process of this machine holds the directory of a run."""
    try:
        with run.lock.open() as lock:
            flock(lock, LOCK_SH | LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
