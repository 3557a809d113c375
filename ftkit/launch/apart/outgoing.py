"""Shards on a host that has not the directory of rank 0: held until they are at the run's url."""

import json
import shutil
from collections.abc import Callable

from ftkit.launch.apart.lead import Lead
from ftkit.runs.directory import RunDirectory
from ftkit.runs.fetching import checkpoint_name
from ftkit.utils.remote.objects import Objects


class Outgoing:
    """The shards of one host, by step; a thread that holds them and one that sends them."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._directory = run, run.state / "outgoing"
        self._objects = Objects.of(run.path)
        self._checksums: dict[int, dict[str, str]] = {}
        self.sent: dict[int, dict[str, str]] = {}
        """Checksums of files that are at the url, by step and name."""

    def hold(self, step: int, receipt: str) -> None:
        """Take over what a rank has written for a checkpoint.

        Args:
            step: of the checkpoint.
            receipt: of the rank, as `ftkit.checkpoint.saver` leaves it.
        """
        files = json.loads(receipt)["files"] if receipt else {}
        home = self._directory / str(step)
        home.mkdir(parents=True, exist_ok=True)
        for name in files:
            (self._run.store.partial(step) / name).replace(home / name)
        known = {name: entry["sha256"] for name, entry in files.items()}
        self._checksums[step] = self._checksums.get(step, {}) | known

    def follow(self, lead: Lead, is_heard: Callable[[], bool]) -> None:
        """Send what is wanted now, and drop what nobody wants any more.

        Args:
            lead: what is wanted.
            is_heard: whether it still is, as far as can be known; no other file is begun if not.

        Raises:
            StorageError: the url does not take it.
        """
        wanted = {lead.current, *lead.kept}
        for old in [s for s in list(self._checksums) if s not in wanted and s <= lead.newest]:
            shutil.rmtree(self._directory / str(old), ignore_errors=True)
            self._checksums.pop(old)
            self.sent.pop(old, None)
        if lead.current is None or lead.current not in self._checksums:
            return
        step = lead.current
        for name, checksum in list(self._checksums[step].items()):
            if self.sent.get(step, {}).get(name) != checksum and is_heard():
                prefix = checkpoint_name(self._run, step)
                self._objects.upload(self._directory / str(step) / name, f"{prefix}/{name}")
                self.sent[step] = self.sent.get(step, {}) | {name: checksum}
