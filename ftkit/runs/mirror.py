"""The mirror of a run: what it writes in its directory, carried to its url while it is at work.

The supervisor carries, so that nothing of it is in the processes that train. A checkpoint that is
complete here is sent file by file, its metadata last: that is the moment at which it is there, as
nothing can be renamed. One that goes loses its metadata first. What cannot be sent is said, stays
here as every checkpoint does, and is tried again until newer ones have taken its place.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ftkit.checkpoint.metadata import METADATA, CheckpointError, Metadata, read_metadata
from ftkit.runs.carrying.files import Others, carried_files, is_state, linked_checkpoint
from ftkit.runs.directory import RunDirectory
from ftkit.runs.fetching import checkpoint_name, committed_steps
from ftkit.runs.remote_claim import RemoteClaim, is_claim
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import utc_now
from ftkit.utils.process import print_line
from ftkit.utils.remote.background import begun, each, ends, pause
from ftkit.utils.remote.fetch import Known, Listing
from ftkit.utils.remote.objects import Objects, StorageError
from ftkit.utils.remote.urls import display_path

LOOKS_EVERY_S = 1.0
"""For new checkpoints."""
FILES_EVERY_S = 30.0
"""Rows, logs and the like are sent that often."""
LONGEST_WAIT_S = 60.0
"""Between two attempts while the storage does not take anything."""
LAST_ATTEMPTS_S = 120.0
"""How long the end of a run insists on a storage that does not take anything."""
_FILES_AT_ONCE = 4
_POLL_S = 0.1


class UploadFailed(Exception):
    """A run has ended, and its url does not have all of it; says why, and where all of it is."""


class Mirror:
    """Carries one run to its url."""

    def __init__(self, run: RunDirectory, claim: RemoteClaim, listing: Listing) -> None:
        """Prepare.

        Args:
            run: its directory, which this process holds.
            claim: on the url, held by this process.
            listing: what lies there.
        """
        self._run, self._claim, self._listing = run, claim, dict(listing)
        self._objects = Objects.of(run.path)
        self._known = Known(run.path)
        self._there = committed_steps(listing)
        self._seen = set(self._there)
        """Steps that were here and there: what of them is here no more goes there, too."""
        self._sent: set[tuple[int, str, str]] = set()
        """Step, name and checksum of the files that this process has sent."""
        self._begun: set[int] = set()
        """Steps of which something may be there."""
        self._overwrites = False
        self._is_tidy = False
        self._files_at_s = -FILES_EVERY_S
        self._told: set[str] = set()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_begun: Callable[[], bool] = lambda: True
        self._others: Others | None = None
        self._insists_until_s: float | None = None

    def begin(
        self,
        has_begun: Callable[[], bool],
        *,
        overwrites: bool = False,
        others: Others | None = None,
    ) -> None:
        """Carry from now on, in a thread.

        Args:
            has_begun: whether the run has done anything; the url stays as it is until then.
            overwrites: whether what lies at the url goes then.
            others: who sends what is not here.
        """
        self._has_begun, self._overwrites, self._others = has_begun, overwrites, others
        self._thread = begun(self._carry)

    def send_unsent(self) -> None:
        """Send checkpoints of former sessions, before other hosts go on from one of them.

        Raises:
            StorageError: the storage does not take it.
        """
        for step in self._run.store.steps():
            if step not in self._there:
                self._send_checkpoint(step, self._run.store.path(step))
        self._known.save()

    def stop(self, unless: Callable[[], bool]) -> bool:
        """Carry nothing more; whether what was on its way has ended.

        Args:
            unless: what ends the waiting for it.
        """
        self._ends.set()
        return self._thread is None or ends(self._thread, unless)

    def finish(self, received: Sequence[object] = ()) -> None:
        """Carry what is left, once nobody writes here any more.

        Args:
            received: signals so far; one more ends this.

        Raises:
            UploadFailed: something is left.
        """
        before = len(received)
        deadline_s, wait_s = time.monotonic() + LAST_ATTEMPTS_S, 1.0
        self._insists_until_s = deadline_s

        def interrupted() -> bool:
            return len(received) > before

        title = f"sending the rest to {display_path(self._run.path)} (Ctrl+C leaves it here)"
        with Display(None) as display, display.phase(title, brief=True) as phase:
            problem = "it was interrupted"
            has_stopped = self.stop(interrupted)
            while has_stopped and not interrupted():
                found: list[str] = []

                def work(found: list[str] = found) -> None:
                    found.append(self._problem_of(lambda: self._round(everything=True)))

                if not ends(begun(work), interrupted, lambda: phase.advance(0, 0)):
                    break
                (problem,) = found
                is_over = self._claim.lost_to or (self._others and self._others.gone())
                if not problem or is_over or time.monotonic() > deadline_s:
                    break
                self._tell(problem)
                pause(wait_s, interrupted)
                wait_s = min(2 * wait_s, 10.0)
        if not problem:
            ends(begun(self._remove_state), interrupted)
        elif self._others is not None:
            raise UploadFailed(
                f"{display_path(self._run.path)} does not have all of this run: {problem}. "
                "--resume auto goes on from the newest checkpoint that it has."
            )
        else:
            raise UploadFailed(
                f"{display_path(self._run.path)} does not have all of this run: {problem}. All of "
                f"it is in {self._run.path}; --resume auto on this machine sends it."
            )

    def _remove_state(self) -> None:
        with suppress(StorageError):  # the next session removes it
            self._delete([name for name in self._objects.listing() if is_state(self._run, name)])
            self._known.save()

    def _carry(self) -> None:
        """The thread: look, send, and wait longer the more often that fails."""
        wait_s = LOOKS_EVERY_S
        while not self._ends.wait(wait_s):
            if not self._has_begun():
                continue
            problem = self._problem_of(lambda: self._round(everything=False))
            if self._claim.lost_to:
                self._tell(problem)
                return
            if problem:
                self._tell(problem)
            elif wait_s > LOOKS_EVERY_S:
                self._tell(f"{display_path(self._run.path)} takes files again")
                self._told.clear()
            wait_s = min(2 * max(wait_s, 1.0), LONGEST_WAIT_S) if problem else LOOKS_EVERY_S

    def _problem_of(self, work: Callable[[], None]) -> str:
        """What kept a piece of work from being done; empty: nothing."""
        try:
            work()
        except (StorageError, OSError) as error:
            return str(error)
        except Exception as error:  # a mistake here is said, too, and training goes on
            return f"{type(error).__name__}: {error}"
        return ""

    def _round(self, *, everything: bool) -> None:
        """Send what is new, and take away what has gone.

        Raises:
            StorageError: the storage does not take it.
        """
        store = self._run.store
        here = set(store.steps())
        new = [step for step in sorted(here) if not self._is_sent(step)]
        due = everything or time.monotonic() - self._files_at_s >= FILES_EVERY_S
        if new or self._gone(here) or due or not self._is_tidy:
            self._require_claim()
        if not self._is_tidy:
            self._tidy(here)
        for step in reversed(new):  # the newest is worth most
            self._lead(step, new, here)
            try:
                with linked_checkpoint(self._run, step) as directory:
                    self._send_checkpoint(step, directory)
            except StorageError as error:
                raise StorageError(
                    f"the checkpoint of step {step} is not sent yet and stays in "
                    f"{store.path(step)}: {error}"
                ) from error
        self._lead(None, [step for step in new if step not in self._there], here)
        self._seen |= here
        gone = self._gone(here)
        if new:  # sending may have taken long enough for another to take over
            self._require_claim()
        if not here & self._there:  # what took the place of the old ones is not there yet
            gone -= self._there
        for step in sorted(gone):
            self._delete_checkpoint(step)
        if due or new:
            self._send_files(everything)
            self._files_at_s = time.monotonic()
        if new or gone or due:
            self._known.save()

    def _gone(self, here: set[int]) -> set[int]:
        return ((self._seen & self._there) | self._begun) - here

    def _require_claim(self, *, asks: bool = True) -> None:
        if asks and not self._claim.lost_to:  # else it is known since the claim was last renewed
            self._claim.check()
        if self._claim.lost_to:
            raise StorageError(
                f"{display_path(self._run.path)} was taken over by {self._claim.lost_to}: nothing "
                "more is written there"
            )

    def _is_sent(self, step: int) -> bool:
        return step in self._there and self._known.is_equal(self._metadata_name(step))

    def _metadata_name(self, step: int) -> str:
        return f"{checkpoint_name(self._run, step)}/{METADATA}"

    def _tidy(self, here: set[int]) -> None:
        """Once, when the run has begun: have at the url what lies there as it lies here.

        What the run has moved aside moves there, too; what it overwrites and halves of checkpoints
        go.
        """
        run = self._run
        if self._overwrites:
            first = [name for name in self._listing if name.endswith(f"/{METADATA}")]
            self._delete([*first, *(name for name in self._listing if not is_claim(name))])
            self._there = set()
        for step in sorted(self._there - here):
            name = checkpoint_name(run, step)
            if home := self._home(name):
                self._move(name, home)
                self._there.discard(step)
        final = f"{run.final.name}/"
        if not run.final.exists() and any(name.startswith(final) for name in self._listing):
            homes = sorted(
                run.backups.glob(f"*/{run.final.name}"), key=lambda p: int(p.parent.name)
            )
            if homes:
                self._move(run.final.name, homes[-1].relative_to(run.path).as_posix())
        inside = f"{run.store.directory.name}/"
        kept = {checkpoint_name(run, step) for step in self._there}
        halves = [
            name
            for name in self._listing
            if name.startswith(inside)
            and name.count("/") > 1
            and "/".join(name.split("/")[:2]) not in kept
        ]
        self._delete(halves)
        self._is_tidy = True

    def _home(self, name: str) -> str | None:
        """Where something was moved in set_aside, the last time; None: nowhere."""
        run = self._run
        numbers = (path.name for path in run.backups.glob("*") if path.name.isdecimal())
        homes = (run.backups / number / name for number in sorted(numbers, key=int, reverse=True))
        found = next((home for home in homes if home.exists()), None)
        return None if found is None else found.relative_to(run.path).as_posix()

    def _move(self, source: str, target: str) -> None:
        """Move objects inside the storage; what says that they are complete goes first there."""
        names = sorted(name for name in self._listing if name.startswith(f"{source}/"))
        last = [name for name in names if name == f"{source}/{METADATA}"]
        for name in [*(n for n in names if n not in last), *last]:
            self._objects.copy(name, f"{target}{name.removeprefix(source)}")
        self._delete([*last, *names])

    def _delete(self, names: list[str]) -> None:
        names = list(dict.fromkeys(names))
        self._objects.delete(names)
        for name in names:
            self._listing.pop(name, None)
            self._known.forget(name)

    def _send_checkpoint(self, step: int, directory: Path) -> None:
        """Send a checkpoint, or only its metadata if they alone have changed.

        Args:
            step: of the checkpoint.
            directory: with its files, which stay.
        """
        name = checkpoint_name(self._run, step)
        try:
            metadata = read_metadata(directory)
            content = (directory / METADATA).read_bytes()
        except (CheckpointError, OSError):  # deleted just now, or damaged: not to be spread
            return
        if step in self._there and not self._has_files_of(step, metadata):
            self._delete([f"{name}/{METADATA}"])
            self._there.discard(step)
        unsent = [
            file
            for file, entry in sorted(metadata.files.items(), key=lambda item: -item[1].size_bytes)
            if step not in self._there
            and (step, file, entry.sha256) not in self._sent
            and (self._others is None or (directory / file).exists())
        ]

        def send(file: str) -> None:
            self._require_claim(asks=False)
            self._objects.upload(directory / file, f"{name}/{file}")
            self._sent.add((step, file, metadata.files[file].sha256))

        self._begun.add(step)
        each(send, unsent, _FILES_AT_ONCE)
        if step not in self._there:
            elsewhere = {
                file: entry.sha256
                for file, entry in metadata.files.items()
                if (step, file, entry.sha256) not in self._sent
            }
            if elsewhere and not self._await_others(step, elsewhere):
                return
            self._send_files(everything=False)  # rows reach as far as the checkpoint
        # Whoever has taken over meanwhile has removed files of what was no checkpoint yet.
        self._require_claim()
        self._objects.write(f"{name}/{METADATA}", content)
        self._there.add(step)
        self._seen.add(step)
        with suppress(OSError):
            if (self._run.path / name / METADATA).read_bytes() == content:
                self._note(f"{name}/{METADATA}")
        for file, entry in metadata.files.items():
            self._sent.discard((step, file, entry.sha256))

    def _lead(self, current: int | None, kept: Iterable[int], here: Iterable[int]) -> None:
        if self._others is not None:
            self._others.lead(current, kept, max(here, default=0))

    def _await_others(self, step: int, elsewhere: Mapping[str, str]) -> bool:
        """Wait until other hosts have sent their files of a checkpoint; False: the run ends first.

        Raises:
            StorageError: they cannot send them now.
        """
        assert self._others is not None
        while not elsewhere.items() <= self._others.sent(step).items():
            if problem := self._others.gone() or self._others.problem():
                raise StorageError(problem)
            if self._insists_until_s is None and self._ends.is_set():
                return False
            if time.monotonic() > (self._insists_until_s or float("inf")):
                raise StorageError("other machines have not sent their shards")
            time.sleep(_POLL_S)
        return True

    def _has_files_of(self, step: int, metadata: Metadata) -> bool:
        """Whether the checkpoint at the url consists of the same files."""
        try:
            found = self._objects.read(self._metadata_name(step))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        with TemporaryDirectory() as name, suppress(CheckpointError):
            (Path(name) / METADATA).write_bytes(found)
            return read_metadata(Path(name)).files == metadata.files
        return False

    def _note(self, name: str) -> None:
        """An object was written just now."""
        if (entry := self._objects.entry(name)) is not None:
            self._known.note(name, entry.version)

    def _delete_checkpoint(self, step: int) -> None:
        """Take a checkpoint away; from the first moment on it is none."""
        name = checkpoint_name(self._run, step)
        names = [key for key in self._objects.listing() if key.startswith(f"{name}/")]
        self._delete([f"{name}/{METADATA}"])
        self._there.discard(step)
        self._delete(names)
        self._begun.discard(step)

    def _send_files(self, everything: bool) -> None:
        """Send what has changed of all other files; the result before the report."""
        files = [
            path
            for path in carried_files(self._run, everything)
            if not self._known.is_equal(self._name(path))
        ]
        for path in files:
            name = self._name(path)
            with suppress(FileNotFoundError):
                status = path.stat()
                entry = self._objects.upload(path, name)
                now = path.stat()
                if (now.st_size, now.st_mtime_ns) == (status.st_size, status.st_mtime_ns):
                    self._known.note(name, entry.version)
        if everything:
            gone = [
                name
                for name in self._known.names()
                if not name.startswith(f"{self._run.store.directory.name}/")
                and name in self._objects_known_whole()
                and not (self._run.path / name).exists()
            ]
            self._delete(gone)

    def _objects_known_whole(self) -> set[str]:
        """Files that are here whenever they are at the url."""
        return {path.name for path in (self._run.report, *self._run.rows)}

    def _name(self, path: Path) -> str:
        return path.relative_to(self._run.path).as_posix()

    def _tell(self, text: str) -> None:
        """Say something once: to the person, in the log and in the report."""
        if text in self._told:
            return
        self._told.add(text)
        print_line(f"ftkit: {text}")
        with suppress(OSError), self._run.log.open("a", encoding="utf-8") as log:
            log.write(f"{utc_now()} warning: {text}\n")
        with suppress(OSError), self._run.notices.open("a", encoding="utf-8") as notices:
            notices.write(f"{text}\n")
