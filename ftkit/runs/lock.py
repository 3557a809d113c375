"""Lock of a run's directory: how a process claims it, and which process holds it."""

import dataclasses
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from ftkit.errors import UserError
from ftkit.runs.checkpoints import RunCheckpoints
from ftkit.runs.directory import RunDirectory
from ftkit.runs.url_runs import refresh
from ftkit.utils.damaged_files import reading
from ftkit.utils.files import remove
from ftkit.utils.json_values import from_json
from ftkit.utils.progress import print_notice
from ftkit.utils.urls import display_path

LOST_S = 150.0
"""Seconds that a restarted run waits for its predecessor, which needs up to two minutes to notice
that a machine is lost."""
_POLL_S = 0.2
Use = Literal["new", "overwrite", "go_on"]
"""Use of a directory: an empty one, this one emptied, or this one as it is."""


@contextmanager
def claim(wanted: Path, use: Use, *, patience_s: float = 0.0) -> Iterator[RunDirectory]:
    """Lock a run directory inside the block.

    A new run leaves a directory with anything in it alone, and takes WANTED-2, WANTED-3, ... After
    a UserError, overwritten files are back, and a run to be continued is as it was.

    Args:
        wanted: the directory.
        use: of the directory.
        patience_s: how long to wait for a run that is running there.

    Raises:
        UserError: another run is running there, or it cannot be written.
    """
    out_dir = wanted
    number = 2
    try:
        # A run at the url counts, too: its small files appear in the directory.
        if use == "new":
            refresh(out_dir)
        while use == "new" and out_dir.is_dir() and any(out_dir.iterdir()):
            out_dir = wanted.with_name(f"{wanted.name}-{number}")
            refresh(out_dir)
            number += 1
        run = RunDirectory(out_dir)
        # Empty directories that were made for a run that did not start are removed again.
        created = [path for path in (out_dir, *out_dir.parents) if not path.exists()]
        run.state.mkdir(parents=True, exist_ok=True)
        lock = run.lock.open("a")  # "w" would erase what a running run wrote into it
    except OSError as error:
        raise unwritable(out_dir, error) from None
    with lock:
        try:
            _wait_for_lock(lock, out_dir, patience_s)
        except BlockingIOError:
            raise UserError(
                f"out_dir {display_path(out_dir)} belongs to a run that is still running. Wait for "
                "it, or try another --out_dir."
            ) from None
        was_killed = _keep_what_was_killed(run) if use == "go_on" else False
        # Emptied after the lock is held; before, it is the content of another run.
        lock.truncate(0)
        lock.write(Supervisor.here().to_json())
        lock.flush()
        if use != "go_on":
            _remove_all_but(run.lock)  # left by a run that was killed with its supervisor
        run.replaced.mkdir()
        if use != "go_on":
            # Moved, not deleted: a mistake found before the first step puts all of it back.
            _move_all_but(run.state, run.replaced)
        stays = False
        try:
            yield run
        except UserError:  # nothing has run: leave the directory as it was
            if use != "go_on":
                _remove_all_but(run.state)
                for entry in run.replaced.iterdir():
                    entry.rename(out_dir / entry.name)
            elif was_killed:
                _put_back_what_was_killed(run)
                # The killed session's state is in its place again, for the next attempt to learn
                # from.
                stays = True
            raise
        finally:
            # With the state go the files that this run has replaced.
            if not stays:
                shutil.rmtree(run.state, ignore_errors=True)
            for path in created:
                if any(path.iterdir()):
                    break
                path.rmdir()


def _wait_for_lock(lock: IO[str], out_dir: Path, patience_s: float) -> None:
    """Lock a run, or raise BlockingIOError if another process holds it for all of `patience_s`."""
    deadline, is_reported = time.monotonic() + patience_s, False
    while True:
        try:
            # The kernel drops the lock with its process: a lock of a killed run never has to be
            # broken.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        if not is_reported:
            holder, is_reported = Supervisor.in_file(Path(lock.name)), True
            where = f" on {holder.host}" if holder else ""
            print_notice(f"waiting for the run{where} that is still running in {out_dir}")
        time.sleep(_POLL_S)


def _keep_what_was_killed(run: RunDirectory) -> bool:
    """Move the state of a killed session aside; return whether there is any."""
    if run.killed.exists():  # the session that moved it was killed, too
        for entry in run.killed.iterdir():
            remove(run.state / entry.name)
            entry.rename(run.state / entry.name)
        run.killed.rmdir()
    # Killed before it had a job: there is nothing to learn from what it left.
    if not run.job.exists():
        _remove_all_but(run.lock)
        return False
    run.killed.mkdir()
    # Copied, because this process holds the lock through this very file.
    shutil.copyfile(run.lock, run.lock_of_killed)
    for entry in run.state.iterdir():
        if entry not in (run.lock, run.killed):
            entry.rename(run.killed / entry.name)
    return True


def _put_back_what_was_killed(run: RunDirectory) -> None:
    """Undo `_keep_what_was_killed`."""
    for entry in run.state.iterdir():
        if entry not in (run.lock, run.killed):
            remove(entry)
    for entry in run.killed.iterdir():
        entry.replace(run.state / entry.name)
    run.killed.rmdir()


def unwritable(out_dir: Path, error: OSError) -> UserError:
    """The error of a directory that a run cannot write to."""
    return UserError(
        f"out_dir {out_dir} cannot be written: {error.strerror}. Try another --out_dir."
    )


def _remove_all_but(kept: Path) -> None:
    """Remove everything beside a path."""
    for entry in kept.parent.iterdir():
        if entry.name != kept.name:
            remove(entry)


def _move_all_but(kept: Path, target: Path) -> None:
    """Move everything beside a path."""
    for entry in kept.parent.iterdir():
        if entry.name != kept.name:
            entry.rename(target / entry.name)


@dataclass(frozen=True, kw_only=True)
class Supervisor:
    """The supervisor of a running run, as its lock names it."""

    host: str
    """Name of its machine."""
    process: int
    """Its process id there."""

    @classmethod
    def here(cls) -> "Supervisor":
        """Return the supervisor that this process is."""
        return cls(host=socket.gethostname(), process=os.getpid())

    @classmethod
    def of(cls, out_dir: Path) -> "Supervisor | None":
        """The supervisor of a run; None: it has none now, or its lock cannot be read."""
        return cls.in_file(RunDirectory(out_dir).lock)

    @classmethod
    def in_file(cls, lock: Path) -> "Supervisor | None":
        """The supervisor in the file of a lock; None as for `of`."""
        if not lock.exists() or not lock.stat().st_size:
            return None
        with suppress(UserError), reading(lock, "a JSON object with host and process"):
            found = from_json(cls, json.loads(lock.read_bytes()))
            assert isinstance(found, cls)
            return found
        return None

    def to_json(self) -> str:
        """Content of the lock."""
        return json.dumps(dataclasses.asdict(self))


def is_at_work_here(run: RunDirectory) -> bool:
    """Return whether a process of this machine holds the directory of a run."""
    try:
        with run.lock.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def is_at_work(place: RunCheckpoints) -> bool:
    """Return whether a run is writing these checkpoints."""
    try:
        with claimed(place, hold=False):
            return False
    except UserError:
        return True


@contextmanager
def claimed(place: RunCheckpoints, *, hold: bool) -> Iterator[None]:
    """Refuse to continue while a run uses these checkpoints.

    Args:
        place: the checkpoints.
        hold: also keep a run from starting meanwhile; otherwise nothing is written.

    Raises:
        UserError: one is running, or its directory cannot be written.
    """
    with ExitStack() as stack:
        for run in place.runs:
            # Checkpoints that were copied without their run get no .run directory.
            is_run = run.recipe.exists() or run.state.exists()
            stack.enter_context(_claimed_run(run, hold=hold and is_run))
        # A shared lock that stayed would keep a run from starting.
        if not hold:
            stack.close()
        yield


@contextmanager
def _claimed_run(run: RunDirectory, *, hold: bool) -> Iterator[None]:
    created = hold and not run.state.exists()
    with ExitStack() as stack:
        try:
            if hold:
                run.state.mkdir(exist_ok=True)
            lock = stack.enter_context(run.lock.open("a" if hold else "r"))
            # Shared for those who only look: several may look at once.
            fcntl.flock(lock, (fcntl.LOCK_EX if hold else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{run.path} belongs to a run that is still running. Wait for it."
            ) from None
        except OSError as error:
            # Without a lock file to open there is no run.
            if hold:
                raise UserError(f"{run.path} cannot be written: {error.strerror}.") from None
        try:
            yield
        finally:
            if created:
                shutil.rmtree(run.state, ignore_errors=True)
