"""Runs at urls, as commands see them, whatever kind of url it is.

A run at a url has a directory here that stands for it (`ftkit.utils.urls`); a local path has
nothing to fetch or to send. Each kind of url names a module that has the functions of `UrlRuns`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, cast

from ftkit.runs.directory import RunDirectory
from ftkit.utils.url_files import module_of
from ftkit.utils.urls import local_path, url_of


class UploadFailed(Exception):
    """A run ended before all of it was at its url; says why, and where all of it is."""


class OtherHosts(Protocol):
    """Hosts whose ranks write to directories of their own, and that upload their shards."""

    def announce(self, current: int | None, kept: Iterable[int], newest: int) -> None:
        """Announce which checkpoint is uploaded now, which ones later, and the newest step."""

    def sent(self, step: int) -> Mapping[str, str]:
        """Checksums, by name, of the files of a checkpoint that they have uploaded."""

    def problem(self) -> str:
        """Errors of their last uploads; empty: none."""

    def gone(self) -> str:
        """Return which of them will upload nothing more, in words; empty: none."""


class Uploads(Protocol):
    """Uploads of files of checkpoints. Every host of a run has one, for what its ranks write."""

    def upload(
        self, step: int, directory: Path, files: Mapping[str, str], allowed: Callable[[], bool]
    ) -> None:
        """Upload files of a checkpoint, in this order, except those that were uploaded before.

        Args:
            step: of the checkpoint.
            directory: holds the files.
            files: checksums by name.
            allowed: whether another file may be started; called in threads.

        Raises:
            StorageError: the storage does not take one.
        """

    def sent(self, step: int) -> dict[str, str]:
        """Checksums, by name, of the files of a checkpoint that were uploaded."""

    def forget(self, step: int) -> None:
        """Forget a checkpoint that is complete at the url, or no longer wanted."""


class Mirror(Protocol):
    """Uploads one run to its url."""

    def begin(
        self,
        has_begun: Callable[[], bool],
        *,
        overwrites: bool = False,
        others: OtherHosts | None = None,
    ) -> None:
        """Upload in a thread from now on.

        Args:
            has_begun: whether the run has done anything; until then the url stays as it is.
            overwrites: whether what lies at the url is deleted then.
            others: upload what is not here.
        """


class UrlCheckpoints(Protocol):
    """Checkpoints of a run at a url, to be deleted while no run is active there."""

    def delete(self, step: int) -> None:
        """Delete the checkpoint of a step.

        Raises:
            StorageError: the storage does not do it.
        """

    def incomplete(self) -> Mapping[str, int]:
        """Bytes of incomplete checkpoints, by the names of their directories."""

    def delete_incomplete(self, directory: str) -> None:
        """Delete an incomplete checkpoint.

        Raises:
            StorageError: the storage does not do it.
        """


class RunCopy(Protocol):
    """A copy of the files that show the state of a run, in a directory of its own.

    The directory that stands for the url is left alone: another process may be using it.
    """

    path: Path
    """The directory that stands for the url."""

    @property
    def directory(self) -> Path:
        """Directory of the copy."""

    def look(self) -> bool:
        """Bring the copy up to date; return whether the run is running.

        Raises:
            StorageError: the url has never answered.
        """

    def settle(self) -> None:
        """Look until it is certain whether the run is running; one look is not always enough."""


class RunCopies(Protocol):
    """Copies of all runs below a url, or of the run that is there."""

    def look(self) -> Sequence[RunCopy]:
        """Bring the copies up to date; they are ordered by name.

        Raises:
            StorageError: the url has never answered.
        """


class UrlRuns(Protocol):
    """What a kind of url does with runs."""

    def refresh(self, path: Path) -> None:
        """See `refresh` below."""

    def fetch_run(self, run: RunDirectory) -> object:
        """Download the small files of a run, whether it is running or not.

        Raises:
            StorageError: the url cannot be read.
        """

    def fetch_without_shards(self, checkpoint: Path) -> None:
        """See `fetch_without_shards` below."""

    def fetch_result(self, path: Path) -> None:
        """See `fetch_result` below."""

    def run_copy(self, path: Path, place: Path) -> RunCopy:
        """A copy of a run in an empty directory, of which nothing is downloaded yet."""

    def run_copies(self, path: Path, place: Path) -> RunCopies:
        """Copies of the runs below a path, in an empty directory; nothing is downloaded yet."""

    def uploads(self, run: RunDirectory) -> Uploads:
        """Uploads of the checkpoints of a run."""

    def require_provider(self, scheme: str) -> None:
        """See `require_provider` below."""

    def mirrored(
        self,
        run: RunDirectory,
        on_message: Callable[[str], None],
        received: Sequence[object],
        *,
        goes_on: bool,
        several: bool = False,
    ) -> AbstractContextManager[Mirror]:
        """See `mirrored` below."""

    def require_unclaimed(self, out_dir: Path, on_message: Callable[[str], None]) -> None:
        """See `require_unclaimed` below."""

    def url_checkpoints(
        self, path: Path, on_message: Callable[[str], None], *, hold: bool
    ) -> AbstractContextManager[UrlCheckpoints]:
        """See `url_checkpoints` below."""


def url_runs(path: Path) -> UrlRuns:
    """What reads and writes the runs at the url that a path stands for."""
    return cast(UrlRuns, module_of(path))


def require_provider(path: Path) -> None:
    """Refuse a url whose library or account is missing; a local path needs none.

    Raises:
        UserError: it is not installed, or no account is set; says what to do.
    """
    if (url := url_of(path)) is not None:
        url_runs(path).require_provider(url.partition(":")[0])


def refresh(path: Path) -> None:
    """Download the small files of the run that a path belongs to, if it lies at a url.

    Nothing happens for local paths, and while this machine itself is running on the run.

    Raises:
        UserError: the url cannot be read.
    """
    if url_of(path) is not None:
        url_runs(path).refresh(path)


def fetch_without_shards(checkpoint: Path) -> None:
    """Download all files of a checkpoint at a url except its shards.

    Raises:
        UserError: they cannot be read.
    """
    if url_of(checkpoint) is not None:
        url_runs(checkpoint).fetch_without_shards(checkpoint)


def fetch_result(url: str) -> Path:
    """Download what is needed to use a result at a url; return its local path.

    Args:
        url: of a run, of its checkpoints or one of them, of a result, an adapter or a model.

    Raises:
        UserError: it cannot be read.
    """
    path = local_path(url)
    url_runs(path).fetch_result(path)
    return path


@contextmanager
def mirrored(
    run: RunDirectory,
    on_message: Callable[[str], None],
    received: Sequence[object],
    *,
    goes_on: bool,
    several: bool = False,
) -> Iterator[Mirror | None]:
    """Mirror a run at a url, which is claimed inside the block; None: it is local.

    The end of the block uploads the rest. If it ends with an error, the url is left as it was.

    Args:
        run: its directory, locked.
        on_message: called with what the user should know.
        received: signals so far; another one ends the upload of the rest.
        goes_on: whether the run there is continued; then its files are downloaded.
        several: whether other machines take part, which see only what is at the url.

    Raises:
        UserError: another run holds the url, or it cannot be reached.
        UploadFailed: something could not be uploaded.
    """
    if url_of(run.path) is None:
        yield None
        return
    at_url = url_runs(run.path)
    with at_url.mirrored(run, on_message, received, goes_on=goes_on, several=several) as mirror:
        yield mirror


def require_unclaimed(out_dir: Path, on_message: Callable[[str], None]) -> None:
    """Refuse a new run at a url where another one is running; local paths are not checked.

    Raises:
        UserError: one is, or the url cannot be reached.
    """
    if url_of(out_dir) is not None:
        url_runs(out_dir).require_unclaimed(out_dir, on_message)


@contextmanager
def url_checkpoints(
    path: Path, on_message: Callable[[str], None], *, hold: bool
) -> Iterator[UrlCheckpoints | None]:
    """The checkpoints of a run at a url; None: it is local.

    Args:
        path: of the run, or of the checkpoints in it.
        on_message: called with what the user should know.
        hold: claim the url inside the block; otherwise nothing is written.

    Raises:
        UserError: a run is running there, or the url cannot be used.
    """
    if url_of(path) is None:
        yield None
        return
    with url_runs(path).url_checkpoints(path, on_message, hold=hold) as checkpoints:
        yield checkpoints
