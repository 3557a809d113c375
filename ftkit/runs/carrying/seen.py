"""Runs at a url as other machines see them: copies of the files that tell how they are."""

import math
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from ftkit.checkpoint.metadata import METADATA
from ftkit.checkpoint.store import step_of
from ftkit.runs.carrying.files import is_state
from ftkit.runs.directory import RunDirectory
from ftkit.runs.remote_claim import EXPIRES_S, ClaimWatch
from ftkit.utils.files import remove
from ftkit.utils.progress import print_notice
from ftkit.utils.remote.fetch import Listing
from ftkit.utils.remote.objects import Objects, StorageError

_LOOKS_EVERY_S = 5.0
"""Rows come to a url every half a minute; more requests would show nothing more."""


class UrlCopy:
    """The copy, which is a directory of its own: that of the run may be used by others."""

    def __init__(self, path: Path, copy: Path) -> None:
        """Prepare.

        Args:
            path: the directory that stands for the url.
            copy: an empty directory.
        """
        self.path, self._run = path, RunDirectory(copy)
        self._objects = Objects.of(path)
        self._claim = ClaimWatch(self._objects)
        self._versions: dict[str, str] = {}
        self._looked_s: float | None = None
        self._at_work = False

    @property
    def directory(self) -> Path:
        """The copy."""
        return self._run.path

    def look(self) -> bool:
        """Bring the copy up to date; whether the run is at work.

        Raises:
            StorageError: the url has never answered.
        """
        now_s = time.monotonic()
        if self._looked_s is not None and now_s - self._looked_s < _LOOKS_EVERY_S:
            return self._at_work
        try:
            self.take(self._objects.listing())
        except StorageError:
            if self._looked_s is None:
                raise
        self._looked_s = now_s
        return self._at_work

    def settle(self) -> None:
        """Look until it is known whether the run is at work, which one look cannot always tell."""
        with suppress(StorageError):  # the next look says so
            self.look()
        if self._claim.is_in_doubt:
            print_notice(
                f"{self._objects.url} seems to have been left long ago: watching for up to "
                f"{EXPIRES_S:g} s whether its run is still at work"
            )
        for _ in range(math.ceil(EXPIRES_S / _LOOKS_EVERY_S) + 1):
            if not self._claim.is_in_doubt:
                return
            time.sleep(_LOOKS_EVERY_S)
            self.look()

    def take(self, listing: Listing) -> None:
        """Bring the copy to what a listing of the run has.

        Raises:
            StorageError: the url does not answer.
        """
        claimed, alive = self._claim.look(listing)
        self._bring(listing, with_state=claimed)
        self._at_work = alive
        self._looked_s = time.monotonic()

    def _bring(self, listing: Listing, *, with_state: bool) -> None:
        """Fetch what has changed, and remove what has gone.

        Args:
            listing: what lies at the url.
            with_state: also what a run at work leaves; one that has ended may have left it behind.
        """
        run = self._run
        told = {run.report.name, run.recipe.name, *(path.name for path in run.rows)}
        wanted = [name for name in listing if name in told or (with_state and is_state(run, name))]
        ends = f"/{METADATA}"
        steps = [
            (step, name)
            for name in listing
            if name.endswith(ends) and name.startswith(f"{run.store.directory.name}/")
            if (step := step_of(name.split("/")[1])) is not None
        ]
        wanted += [name for _, name in sorted(steps)[-1:]]
        for name in set(self._versions) - set(wanted):
            parts = Path(name).parts
            remove(run.path.joinpath(*parts[:2]))
            self._versions.pop(name)
        for name in wanted:
            if self._versions.get(name) != listing[name].version:
                with suppress(FileNotFoundError):
                    self._objects.download(name, run.path / name)
                    self._versions[name] = listing[name].version


class UrlCopies:
    """Copies of all runs below a url, or of the run that it is, with one listing for all."""

    def __init__(self, path: Path, place: Path) -> None:
        """Prepare.

        Args:
            path: the directory that stands for the url.
            place: an empty directory.
        """
        self._path, self._place = path, place
        self._objects = Objects.of(path)
        self._copies: dict[str, UrlCopy] = {}
        self._numbers = count()
        self._looked_s: float | None = None

    def look(self) -> list[UrlCopy]:
        """Bring them up to date; in the order of their names.

        Raises:
            StorageError: the url has never answered.
        """
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
            with suppress(StorageError):  # whoever looks at this copy is told
                self._copies[name].take(part)


def _by_run(listing: Listing) -> dict[str, Listing]:
    """What lies in each run, by the path of its directory; no run lies in another."""
    run = RunDirectory(Path())
    signs = {run.report.name, run.recipe.name, run.state.name}
    directories = set()
    for name in listing:
        parts = name.split("/")
        for depth, part in enumerate(parts):
            if part in signs:
                directories.add("/".join(parts[:depth]))
            if part.startswith("."):
                break
    found: dict[str, Listing] = {}
    for name, entry in listing.items():
        parts = name.split("/")
        above = ("/".join(parts[:depth]) for depth in range(len(parts)))
        directory = next((path for path in above if path in directories), None)
        if directory is not None:
            inside = name[len(directory) + 1 :] if directory else name
            found.setdefault(directory, {})[inside] = entry
    return found
