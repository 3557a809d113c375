"""A run at a url as other machines see it: a copy of the files that tell how it is."""

import time
from contextlib import suppress
from pathlib import Path

from ftkit.checkpoint.files import METADATA
from ftkit.checkpoint.store import step_of
from ftkit.remote.objects import ObjectEntry, Objects, StorageError
from ftkit.runs.carrying.files import is_state
from ftkit.runs.directory import RunDirectory
from ftkit.runs.remote_claim import ClaimWatch
from ftkit.utils.files import remove

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
            listing = self._objects.listing()
            claimed, alive = self._claim.look(listing)
            self._bring(listing, with_state=claimed)
            self._at_work = alive
        except StorageError:
            if self._looked_s is None:
                raise
        self._looked_s = now_s
        return self._at_work

    def _bring(self, listing: dict[str, ObjectEntry], *, with_state: bool) -> None:
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
