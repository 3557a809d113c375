"""A run at a url, from its claim to the last file that is sent there."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ftkit.remote.fetch import unreachable
from ftkit.remote.objects import Objects, StorageError
from ftkit.remote.urls import url_of
from ftkit.runs.directory import RunDirectory
from ftkit.runs.fetching import fetch_killed, fetch_run
from ftkit.runs.mirror import Mirror
from ftkit.runs.remote_claim import RemoteClaim
from ftkit.runs.resume import Completed


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
        NotCarried: something could not be sent.
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
            if goes_on and claim.former is not None:
                fetch_killed(run, listing, heard_at=claim.former.renewed_at)
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
