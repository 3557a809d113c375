"""Mirror of a run: uploads its directory to its url while it is running.

The supervisor uploads, so the processes that train spend nothing on it. A complete checkpoint is
uploaded file by file, its metadata last. What cannot be uploaded is reported, stays here like every
checkpoint, and is tried again until newer ones have replaced it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ftkit.checkpoint.metadata import METADATA, CheckpointError, Metadata, read_metadata
from ftkit.checkpoint.store import LATEST
from ftkit.extensions.object_storage.background import begun, each, ends, pause
from ftkit.extensions.object_storage.claim import RemoteClaim, is_claim
from ftkit.extensions.object_storage.download import (
    checkpoint_name,
    committed_steps,
    delete_checkpoint,
    is_state_file,
)
from ftkit.extensions.object_storage.objects import Objects
from ftkit.extensions.object_storage.replica import Listing, Replica
from ftkit.recipe.loggers import LOGGERS
from ftkit.runs.directory import RunDirectory
from ftkit.runs.url_runs import OtherHosts, UploadFailed
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import utc_now
from ftkit.utils.files import remove
from ftkit.utils.process import print_line
from ftkit.utils.url_files import StorageError
from ftkit.utils.urls import display_path

LOOKS_EVERY_S = 1.0
"""Interval at which the mirror looks for new checkpoints."""
FILES_EVERY_S = 30.0
"""Interval at which rows, logs and the like are uploaded."""
LONGEST_WAIT_S = 60.0
"""Longest pause between two attempts while the storage accepts nothing."""
LAST_ATTEMPTS_S = 120.0
"""Seconds that the end of a run retries a storage that accepts nothing."""
_FILES_AT_ONCE = 4
_POLL_S = 0.1


class CheckpointUploads:
    """Uploads several files at a time; see `ftkit.runs.url_runs.Uploads`."""

    def __init__(self, run: RunDirectory, objects: Objects) -> None:
        self._run, self._objects = run, objects
        self._sent: dict[int, dict[str, str]] = {}
        self._lock = threading.Lock()

    def upload(
        self, step: int, directory: Path, files: Mapping[str, str], allowed: Callable[[], bool]
    ) -> None:
        def send(name: str) -> None:
            if allowed():
                self._objects.upload(directory / name, f"{checkpoint_name(self._run, step)}/{name}")
                with self._lock:
                    self._sent.setdefault(step, {})[name] = files[name]

        sent = self.sent(step)
        each(send, [n for n, checksum in files.items() if sent.get(n) != checksum], _FILES_AT_ONCE)

    def sent(self, step: int) -> dict[str, str]:
        with self._lock:
            return dict(self._sent.get(step, {}))

    def forget(self, step: int) -> None:
        with self._lock:
            self._sent.pop(step, None)


class Mirror:
    """Uploads one run to its url; see `ftkit.runs.url_runs.Mirror`."""

    def __init__(self, run: RunDirectory, claim: RemoteClaim, listing: Listing) -> None:
        """Start nothing yet; see `begin`.

        Args:
            run: its directory, which this process holds.
            claim: on the url, held by this process.
            listing: what lies there.
        """
        self._run, self._claim, self._listing = run, claim, dict(listing)
        self._replica = Replica.of(run.path)
        self._objects = self._replica.objects
        self._uploads = CheckpointUploads(run, self._objects)
        self._committed = committed_steps(listing)
        self._seen = set(self._committed)
        """Steps that were both here and there: when they go here, they go there, too. Retention
        may delete a checkpoint here before the mirror has seen it, so the listing counts."""
        self._started: set[int] = set()
        """Steps of which something may be at the url."""
        self._overwrites = False
        self._is_tidy = False
        # The first round uploads the files, whatever the clock says.
        self._files_at_s = -FILES_EVERY_S
        self._reported: set[str] = set()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_begun: Callable[[], bool] = lambda: True
        self._others: OtherHosts | None = None
        self._deadline_s: float | None = None
        """When the last attempts end, once the run has ended."""

    def begin(
        self,
        has_begun: Callable[[], bool],
        *,
        overwrites: bool = False,
        others: OtherHosts | None = None,
    ) -> None:
        self._has_begun, self._overwrites, self._others = has_begun, overwrites, others
        self._thread = begun(self._run_thread)

    def send_unsent(self) -> None:
        """Upload checkpoints of earlier sessions, before other hosts continue from one of them.

        Raises:
            StorageError: the storage does not take it.
        """
        for step in self._run.store.steps():
            if step not in self._committed:
                self._send_checkpoint(step, self._run.store.path(step))
        self._replica.save()

    def stop(self, unless: Callable[[], bool]) -> bool:
        """Start no more uploads; return whether those under way have ended.

        Args:
            unless: ends the waiting for them.
        """
        self._ends.set()
        return self._thread is None or ends(self._thread, unless)

    def finish(self, received: Sequence[object] = ()) -> None:
        """Upload the rest, once no process writes to the directory.

        Args:
            received: signals so far; another one ends this.

        Raises:
            UploadFailed: something could not be uploaded.
        """
        before = len(received)
        self._deadline_s, wait_s = time.monotonic() + LAST_ATTEMPTS_S, 1.0

        def interrupted() -> bool:
            return len(received) > before

        title = f"uploading the rest to {display_path(self._run.path)} (Ctrl+C leaves it here)"
        with Display(None) as display, display.phase(title, brief=True) as phase:
            problem = "it was interrupted"
            has_stopped = self.stop(interrupted)
            while has_stopped and not interrupted():
                found: list[str] = []

                # Bound now: a thread that outlives its round must not write to a later list.
                def work(found: list[str] = found) -> None:
                    found.append(self._problem_of_round(everything=True))

                if not ends(begun(work), interrupted, lambda: phase.advance(0, 0)):
                    break
                (problem,) = found
                # No further attempt can help.
                is_over = self._claim.lost_to or (self._others and self._others.gone())
                if not problem or is_over or time.monotonic() > self._deadline_s:
                    break
                self._report(problem)
                pause(wait_s, interrupted)
                wait_s = min(2 * wait_s, 10.0)
        if not problem:
            ends(begun(self._remove_state), interrupted)
            return
        remedy = f"All of it is in {self._run.path}; --resume auto on this machine uploads it."
        if self._others is not None:  # no machine has all of it
            remedy = "--resume auto continues from the newest checkpoint that it has."
        raise UploadFailed(
            f"{display_path(self._run.path)} does not have all of this run: {problem}. {remedy}"
        )

    def _remove_state(self) -> None:
        with suppress(StorageError):  # the next session removes it
            listing = self._objects.listing()
            self._delete(name for name in listing if is_state_file(self._run, name))
            self._replica.save()

    def _run_thread(self) -> None:
        """Look and upload, with ever longer pauses while that fails."""
        wait_s = LOOKS_EVERY_S
        while not self._ends.wait(wait_s):
            if not self._has_begun():
                continue
            problem = self._problem_of_round(everything=False)
            if problem:
                self._report(problem)
                if self._claim.lost_to:
                    return
            elif wait_s > LOOKS_EVERY_S:
                self._report(f"{display_path(self._run.path)} takes files again")
                # A problem that comes back is worth a new message.
                self._reported.clear()
            wait_s = min(2 * max(wait_s, 1.0), LONGEST_WAIT_S) if problem else LOOKS_EVERY_S

    def _problem_of_round(self, *, everything: bool) -> str:
        """Do a round; return the error that ended it, if any."""
        try:
            self._round(everything=everything)
        except (StorageError, OSError) as error:
            return str(error)
        except Exception as error:  # a bug here must not end the training
            return f"{type(error).__name__}: {error}"
        return ""

    def _round(self, *, everything: bool) -> None:
        """Upload what is new, and delete at the url what is gone here."""
        store = self._run.store
        here = set(store.steps())
        new = [step for step in sorted(here) if not self._is_current(step)]
        due = everything or time.monotonic() - self._files_at_s >= FILES_EVERY_S
        # Before anything is written; a look that finds no work sends no request.
        if new or self._gone(here) or due or not self._is_tidy:
            self._require_claim()
        if not self._is_tidy:
            self._tidy(here)
        for step in reversed(new):  # the newest is the most valuable
            self._announce(step, new, here)
            try:
                with linked_checkpoint(self._run, step) as directory:
                    self._send_checkpoint(step, directory)
            except StorageError as error:
                raise StorageError(
                    f"the checkpoint of step {step} is not sent yet and stays in "
                    f"{store.path(step)}: {error}"
                ) from error
        # Nothing is uploaded right now; other hosts keep the shards of these for the next round.
        self._announce(None, [step for step in new if step not in self._committed], here)
        self._seen |= here
        gone = self._gone(here)
        if new:  # the upload may have taken long enough for another run to take over
            self._require_claim()
        if not here & self._committed:  # their replacement is not at the url yet
            gone -= self._committed
        for step in sorted(gone):
            name = checkpoint_name(self._run, step)
            self._forget_listed(delete_checkpoint(self._replica, name, self._objects.listing()))
            self._committed.discard(step)
            self._started.discard(step)
        if due or new:
            self._send_files(everything)
            self._files_at_s = time.monotonic()
        if new or gone or due:
            self._replica.save()

    def _gone(self, here: set[int]) -> set[int]:
        return ((self._seen & self._committed) | self._started) - here

    def _require_claim(self, *, asks: bool = True) -> None:
        if asks and not self._claim.lost_to:  # otherwise as of the last renewal of the claim
            self._claim.check()
        if self._claim.lost_to:
            raise StorageError(
                f"{display_path(self._run.path)} was taken over by {self._claim.lost_to}: nothing "
                "more is written there"
            )

    def _is_current(self, step: int) -> bool:
        metadata = f"{checkpoint_name(self._run, step)}/{METADATA}"
        return step in self._committed and self._replica.is_equal(metadata)

    def _tidy(self, here: set[int]) -> None:
        """Once the run has begun: bring the url to the state of the directory.

        What the run has moved to set_aside is moved there, too; what it overwrites and parts of
        checkpoints are deleted.
        """
        run = self._run
        # What a new run overwrites goes only now: a mistake before the first step leaves it there.
        if self._overwrites:
            first = [name for name in self._listing if name.endswith(f"/{METADATA}")]
            # Metadata first: from then on no checkpoint of the old run counts.
            self._delete([*first, *(name for name in self._listing if not is_claim(name))])
            self._committed = set()
        # The run went back to an earlier step: what it set aside here moves at the url, too.
        for step in sorted(self._committed - here):
            name = checkpoint_name(run, step)
            if home := self._place_aside(name):
                self._move(name, home)
                self._committed.discard(step)
        has_final = any(name.startswith(f"{run.final.name}/") for name in self._listing)
        if has_final and not run.final.exists() and (home := self._place_aside(run.final.name)):
            self._move(run.final.name, home)
        # What remains of interrupted uploads.
        kept = {checkpoint_name(run, step) for step in self._committed}
        self._delete(
            name
            for name in list(self._listing)
            if name.startswith(f"{run.store.directory.name}/")
            # Not checkpoints/latest, which belongs to no checkpoint.
            and name.count("/") > 1
            and "/".join(name.split("/")[:2]) not in kept
        )
        self._is_tidy = True

    def _place_aside(self, name: str) -> str | None:
        """The newest place in set_aside that something was moved to; None: there is none."""
        run = self._run
        numbers = (path.name for path in run.backups.glob("*") if path.name.isdecimal())
        homes = (run.backups / number / name for number in sorted(numbers, key=int, reverse=True))
        found = next((home for home in homes if home.exists()), None)
        return None if found is None else found.relative_to(run.path).as_posix()

    def _move(self, source: str, target: str) -> None:
        """Move objects inside the storage; metadata, which makes a checkpoint complete, last."""
        names = sorted(name for name in self._listing if name.startswith(f"{source}/"))
        last = [name for name in names if name == f"{source}/{METADATA}"]
        for name in [*(n for n in names if n not in last), *last]:
            self._objects.copy(name, f"{target}{name.removeprefix(source)}")
        self._delete([*last, *names])

    def _delete(self, names: Iterable[str]) -> None:
        names = list(names)
        self._replica.delete(names)
        self._forget_listed(names)

    def _forget_listed(self, names: Iterable[str]) -> None:
        for name in names:
            self._listing.pop(name, None)

    def _send_checkpoint(self, step: int, directory: Path) -> None:
        """Upload a checkpoint from a directory, or its metadata if only that has changed."""
        name = checkpoint_name(self._run, step)
        try:
            metadata = read_metadata(directory)
            content = (directory / METADATA).read_bytes()
        except (CheckpointError, OSError):  # deleted just now, or damaged, which is not uploaded
            return
        if step in self._committed and not self._has_files_of(step, metadata):
            # A checkpoint that goes loses its metadata first: from then on it does not count.
            self._delete([f"{name}/{METADATA}"])
            self._committed.discard(step)
        self._started.add(step)
        if step not in self._committed:
            files = {
                file: entry.sha256
                # The largest first: several are sent at once, and none of them should be left for
                # the end.
                for file, entry in sorted(
                    metadata.files.items(), key=lambda item: -item[1].size_bytes
                )
            }
            here = {
                file: checksum
                for file, checksum in files.items()
                # With other hosts, only the shards of this one are here. Otherwise a missing file
                # is an error.
                if self._others is None or (directory / file).exists()
            }
            self._uploads.upload(step, directory, here, lambda: not self._claim.lost_to)
            self._require_claim(asks=False)
            elsewhere = dict(files.items() - self._uploads.sent(step).items())
            if elsewhere and not self._await_others(step, elsewhere):
                return
            self._send_files(everything=False)  # so that the rows reach as far as the checkpoint
        # A run that has taken over meanwhile has deleted files of this incomplete checkpoint.
        self._require_claim()
        metadata_name = f"{name}/{METADATA}"
        # Last, because objects cannot be renamed: from here on the checkpoint counts.
        self._objects.write(metadata_name, content)
        self._committed.add(step)
        self._seen.add(step)
        with suppress(OSError):
            # Noted as equal only while the file here is what was sent.
            if (self._run.path / metadata_name).read_bytes() == content and (
                entry := self._objects.entry(metadata_name)
            ) is not None:
                self._replica.note(metadata_name, entry.version)
        self._uploads.forget(step)

    def _announce(self, current: int | None, kept: Iterable[int], here: Iterable[int]) -> None:
        if self._others is not None:
            self._others.announce(current, kept, max(here, default=0))

    def _await_others(self, step: int, elsewhere: Mapping[str, str]) -> bool:
        """Wait until other hosts have uploaded their files; return False if the run ends before."""
        assert self._others is not None
        while not elsewhere.items() <= self._others.sent(step).items():
            if problem := self._others.gone() or self._others.problem():
                raise StorageError(problem)
            # The run has ended: `finish` tries again, with a deadline.
            if self._deadline_s is None and self._ends.is_set():
                return False
            if time.monotonic() > (self._deadline_s or float("inf")):
                raise StorageError("other machines have not uploaded their shards")
            time.sleep(_POLL_S)
        return True

    def _has_files_of(self, step: int, metadata: Metadata) -> bool:
        """Return whether the checkpoint at the url consists of the same files."""
        try:
            found = self._objects.read(f"{checkpoint_name(self._run, step)}/{METADATA}")
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        with TemporaryDirectory() as name, suppress(CheckpointError):
            # As a file, for read_metadata, which verifies the checksum of the metadata.
            (Path(name) / METADATA).write_bytes(found)
            return read_metadata(Path(name)).files == metadata.files
        return False

    def _send_files(self, everything: bool) -> None:
        """Upload all other files that have changed, the result before the report."""
        run = self._run
        for path in files_to_upload(run, everything):
            name = path.relative_to(run.path).as_posix()
            if not self._replica.is_equal(name):
                with suppress(FileNotFoundError):
                    self._replica.upload(name)
        if everything:
            # Other files may be at the url alone, because they were too large to download.
            always_here = (run.report, *run.rows)
            gone = {path.name for path in always_here if not path.exists()}
            self._delete(name for name in self._replica.names() if name in gone)

    def _report(self, text: str) -> None:
        """Show something once, and add it to the log and to the warnings of the report."""
        if text in self._reported:
            return
        self._reported.add(text)
        print_line(f"ftkit: {text}")
        with suppress(OSError), self._run.log.open("a", encoding="utf-8") as log:
            log.write(f"{utc_now()} warning: {text}\n")
        with suppress(OSError), self._run.notices.open("a", encoding="utf-8") as notices:
            notices.write(f"{text}\n")


def files_to_upload(run: RunDirectory, everything: bool) -> Iterator[Path]:
    """Iterate over all files but checkpoints and unfinished ones, settings of a result last.

    State files are among them: `ftkit watch` elsewhere shows them, and if the run is killed the
    next session learns from them how far it came.

    Args:
        run: its directory.
        everything: also the result, which the run writes only once, at its end.
    """
    state = [run.job, run.lock, *(rank.report for rank in run.ranks())]
    yield from (file for file in state if file.exists())
    with_service = (row.name for row in LOGGERS if row.has_service)
    left_out = {run.state.name, run.store.directory.name, *with_service}
    latest = run.store.directory / LATEST
    if latest.exists():
        yield latest
    # The report last: when it is at the url, so is the rest.
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
            # Settings after weights: a reader takes a result with settings for complete.
            yield from sorted(inside, key=lambda path: (path.suffix == ".json", path.name))


@contextmanager
def linked_checkpoint(run: RunDirectory, step: int) -> Iterator[Path]:
    """Hard links to the files of a checkpoint, which keep them while they are uploaded.

    A run that saves faster than it can upload would otherwise delete every checkpoint too early.
    """
    directory, held = run.store.path(step), run.state / "sending"
    remove(held)
    try:
        source = held
        try:
            for path in sorted(directory.rglob("*")):
                if path.is_file():
                    link = held / path.relative_to(directory)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    # Links take no space, and outlive the deletion of the checkpoint.
                    link.hardlink_to(path)
        except FileNotFoundError:  # deleted just now: newer ones have replaced it
            source = directory
        yield source if source.exists() else directory
    finally:
        remove(held)
