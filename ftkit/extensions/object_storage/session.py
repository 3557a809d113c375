"""Sessions at a url: claimed, downloaded, mirrored while the run is running, and released."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ftkit.checkpoint.store import step_of
from ftkit.errors import Completed
from ftkit.extensions.object_storage.claim import RemoteClaim
from ftkit.extensions.object_storage.download import (
    checkpoint_name,
    committed_steps,
    delete_checkpoint,
    fetch_killed,
    fetch_run,
    run_around,
)
from ftkit.extensions.object_storage.mirror import Mirror
from ftkit.extensions.object_storage.objects import Objects
from ftkit.extensions.object_storage.replica import Replica
from ftkit.runs.directory import RunDirectory
from ftkit.utils.url_files import StorageError, unreachable


@contextmanager
def mirrored(
    run: RunDirectory,
    on_message: Callable[[str], None],
    received: Sequence[object],
    *,
    goes_on: bool,
    several: bool = False,
) -> Iterator[Mirror]:
    """Mirror a run at a url, which is claimed inside the block. See `ftkit.runs.url_runs`."""
    try:
        objects = Objects.of(run.path)
        claim = RemoteClaim(objects)
        claim.take(on_message)
    except StorageError as error:
        raise unreachable(error) from error
    try:
        if not claim.is_certain:
            on_message(
                f"warning: {objects.url} does not support conditional writes: nothing prevents a "
                "second run that starts there at the same moment"
            )
        try:
            # Only now that it is claimed: nobody changes the url from here on.
            listing = fetch_run(run) if goes_on else objects.listing()
            if goes_on:
                # The claim was renewed until its holder ended: this is the time of its end.
                heard_at = None if claim.former is None else claim.former.renewed_at
                fetch_killed(run, listing, heard_at=heard_at)
            mirror = Mirror(run, claim, listing)
            # Other hosts see only the url: the checkpoint to continue from has to be there.
            if goes_on and several:
                mirror.send_unsent()
        except StorageError as error:
            raise unreachable(error) from error
        try:
            yield mirror
        except Completed:
            # A complete run may have left files here that its last upload did not reach.
            mirror.finish(received)
            raise
        except BaseException:
            # Nobody waits for uploads under way: the end of a failed run must not hang.
            mirror.stop(lambda: True)
            raise
        mirror.finish(received)
    finally:
        claim.release()


def require_unclaimed(out_dir: Path, on_message: Callable[[str], None]) -> None:
    """Refuse a new run at a url where another one is running. See `ftkit.runs.url_runs`."""
    try:
        claim = RemoteClaim(Objects.of(out_dir))
        claim.take(on_message)
        # Only a look: `mirrored` claims the url again, once the run has its directory.
        claim.release()
    except StorageError as error:
        raise unreachable(error) from error


class UrlCheckpoints:
    """Checkpoints of a run at a url; see `ftkit.runs.url_runs.UrlCheckpoints`."""

    def __init__(self, run: RunDirectory, replica: Replica) -> None:
        self._run, self._replica = run, replica
        self._listing = replica.objects.listing()

    def delete(self, step: int) -> None:
        self._delete(checkpoint_name(self._run, step))

    def incomplete(self) -> dict[str, int]:
        complete = committed_steps(self._listing)
        found: dict[str, int] = {}
        for name, entry in self._listing.items():
            top, _, rest = name.partition("/")
            directory = rest.partition("/")[0]
            is_inside = top == self._run.store.directory.name and "/" in rest
            # Metadata is uploaded last, so without it the checkpoint is not complete.
            if is_inside and (step := step_of(directory)) is not None and step not in complete:
                found[directory] = found.get(directory, 0) + entry.size_bytes
        return found

    def delete_incomplete(self, directory: str) -> None:
        self._delete(f"{self._run.store.directory.name}/{directory}")

    def _delete(self, name: str) -> None:
        for deleted in delete_checkpoint(self._replica, name, self._listing):
            self._listing.pop(deleted)
        self._replica.save()


@contextmanager
def url_checkpoints(
    path: Path, on_message: Callable[[str], None], *, hold: bool
) -> Iterator[UrlCheckpoints]:
    """The checkpoints of a run at a url. See `ftkit.runs.url_runs`."""
    run = run_around(path)
    try:
        replica = Replica.of(run.path)
        claim = RemoteClaim(replica.objects)
        # Where it is not taken, the release below deletes nothing.
        if hold:
            claim.take(on_message)
        try:
            yield UrlCheckpoints(run, replica)
        finally:
            claim.release()
    except StorageError as error:
        raise unreachable(error) from error
