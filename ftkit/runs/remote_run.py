"""A run at a url, from its claim to the last file that is sent or deleted there."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ftkit.checkpoint.metadata import METADATA
from ftkit.checkpoint.store import step_of
from ftkit.runs.directory import RunDirectory
from ftkit.runs.fetching import (
    checkpoint_name,
    committed_steps,
    fetch_killed,
    fetch_run,
    run_around,
)
from ftkit.runs.mirror import Mirror
from ftkit.runs.remote_claim import RemoteClaim
from ftkit.runs.resume import Completed
from ftkit.utils.remote.fetch import Known, unreachable
from ftkit.utils.remote.objects import Objects, StorageError
from ftkit.utils.remote.urls import url_of


@contextmanager
def mirrored(
    run: RunDirectory,
    on_message: Callable[[str], None],
    received: Sequence[object],
    *,
    goes_on: bool,
    several: bool = False,
) -> Iterator[Mirror | None]:
    """The mirror of a run whose directory stands for a url; None: of another, which needs none.

    The url is claimed, and what lies there is here. At the end of the block what is left is sent,
    unless it ends with a mistake of the user's: then the url is as it was.

    Args:
        run: its directory, locked.
        on_message: told what takes long.
        received: signals so far; one more ends what is done at the end.
        goes_on: whether the run there is to go on; its files are fetched then.
        several: whether other machines take part, which see of it what is at the url.

    Raises:
        UserError: another run holds the url, or it cannot be reached.
        UploadFailed: something could not be sent.
    """
    if url_of(run.path) is None:
        yield None
        return
    try:
        objects = Objects.of(run.path)
        claim = RemoteClaim(objects)
        claim.take(on_message)
    except StorageError as error:
        raise unreachable(error) from error
    try:
        if not claim.is_certain:
            on_message(
                f"warning: {objects.url} knows no conditional writes: nothing keeps a second run "
                "from it that begins at the same moment"
            )
        try:
            listing = fetch_run(run) if goes_on else objects.listing()
            if goes_on:
                heard_at = None if claim.former is None else claim.former.renewed_at
                fetch_killed(run, listing, heard_at=heard_at)
            mirror = Mirror(run, claim, listing)
            if goes_on and several:
                mirror.send_unsent()
        except StorageError as error:
            raise unreachable(error) from error
        try:
            yield mirror
        except Completed:
            mirror.finish(received)
            raise
        except BaseException:
            mirror.stop(lambda: True)
            raise
        mirror.finish(received)
    finally:
        claim.release()


def require_unclaimed(out_dir: Path, on_message: Callable[[str], None]) -> None:
    """Refuse a new run at a url where another is at work; nothing is asked of other paths.

    Raises:
        UserError: one is, or the url cannot be reached.
    """
    if url_of(out_dir) is None:
        return
    try:
        claim = RemoteClaim(Objects.of(out_dir))
        claim.take(on_message)
        claim.release()
    except StorageError as error:
        raise unreachable(error) from error


class UrlCheckpoints:
    """The checkpoints of a run at a url, to be deleted; nobody is at work there meanwhile."""

    def __init__(self, run: RunDirectory, objects: Objects) -> None:
        self._run, self._objects, self._known = run, objects, Known(run.path)
        self._listing = objects.listing()

    def delete(self, step: int) -> None:
        """Delete the checkpoint of a step; from the first moment on it is none.

        Raises:
            StorageError: the storage does not do it.
        """
        prefix = f"{checkpoint_name(self._run, step)}/"
        self._delete(prefix)

    def halves(self) -> dict[str, int]:
        """What was sent of checkpoints that are none: bytes by the names of their directories."""
        complete = committed_steps(self._listing)
        found: dict[str, int] = {}
        for name, entry in self._listing.items():
            top, _, rest = name.partition("/")
            directory = rest.partition("/")[0]
            is_inside = top == self._run.store.directory.name and "/" in rest
            if is_inside and (step := step_of(directory)) is not None and step not in complete:
                found[directory] = found.get(directory, 0) + entry.size_bytes
        return found

    def delete_half(self, directory: str) -> None:
        """Delete one of them.

        Raises:
            StorageError: the storage does not do it.
        """
        self._delete(f"{self._run.store.directory.name}/{directory}/")

    def _delete(self, prefix: str) -> None:
        names = [name for name in self._listing if name.startswith(prefix)]
        first = [name for name in names if name == f"{prefix}{METADATA}"]
        self._objects.delete([*first, *(name for name in names if name not in first)])
        for name in names:
            self._known.forget(name)
            self._listing.pop(name)
        self._known.save()


@contextmanager
def url_checkpoints(
    path: Path, on_message: Callable[[str], None], *, hold: bool
) -> Iterator[UrlCheckpoints | None]:
    """The checkpoints at the url of a run; None: it lies in a directory.

    Args:
        path: of the run, or of the checkpoints in it.
        on_message: told what takes long.
        hold: claim the url meanwhile; otherwise nothing is written.

    Raises:
        UserError: a run is at work there, or the url cannot be used.
    """
    if url_of(path) is None:
        yield None
        return
    run = run_around(path)
    try:
        claim = RemoteClaim(Objects.of(run.path))
        if hold:
            claim.take(on_message)
        try:
            yield UrlCheckpoints(run, Objects.of(run.path))
        finally:
            claim.release()
    except StorageError as error:
        raise unreachable(error) from error
