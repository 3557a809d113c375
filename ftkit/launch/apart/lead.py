"""The host of rank 0 of a run on hosts that share no disk: it collects what ranks elsewhere leave.

What they leave is put where they would have left it here, so that whoever looks for it (the saver
for receipts, the report for those of all ranks) need not know of hosts. It leads their sending,
too: a checkpoint is committed at the url when the shards of all hosts are there.
"""

import dataclasses
import json
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftkit.launch.apart.texts import LEAD, POLL_S, STORE_GONE, SharedTexts, index_of
from ftkit.launch.heartbeats import ended_key
from ftkit.runs.job import Job
from ftkit.utils.remote.urls import display_path, url_of

_SILENT_LOOKS = 40
"""In a row, without a new word of a host, after which nothing is waited for that it should send."""
_LEAVING_S = 10.0
"""How long others have to see that all is sent, before the store ends."""


@dataclass(frozen=True, kw_only=True)
class Lead:
    """What the host of rank 0 tells the others."""

    current: int | None = None
    """The step whose checkpoint is sent now."""
    kept: tuple[int, ...] = ()
    """Steps whose checkpoints are still to be sent."""
    newest: int = 0
    """The newest step that is committed on the host of rank 0."""
    errors: dict[str, str] = field(default_factory=dict)
    """What ranks have said of how they failed, by rank."""
    done: bool = False
    """Whether nothing more is to be sent."""

    def to_text(self) -> str:
        """For the store."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str) -> "Lead":
        """What `to_text` made."""
        values = json.loads(text)
        return cls(**values | {"kept": tuple(values["kept"])})


@dataclass(frozen=True, kw_only=True)
class HostIndex:
    """What a host tells that of rank 0."""

    host: str
    """Its name."""
    versions: dict[str, int] = field(default_factory=dict)
    """Of the files of its ranks, by key."""
    sent: dict[str, dict[str, str]] = field(default_factory=dict)
    """Checksums of the files of its ranks that are at the url, by step and name."""
    problem: str = ""
    """Why it cannot send; empty: it can."""
    beats: int = 0
    """How often it has told this."""

    def to_text(self) -> str:
        """For the store."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class JobAnnouncement:
    """A job as other hosts are told of it."""

    url: str
    """Of its directory."""
    text: str
    """The job file on the host of rank 0."""
    start: str | None
    """The checkpoint that it goes on from: a path or url."""
    in_place: bool
    """Whether that belongs to the run."""
    has_base: bool
    """Whether that has all that is needed of the base model."""

    @classmethod
    def of(cls, job: Job) -> "JobAnnouncement":
        """A job of this host."""
        run = job.directory
        url = url_of(run.path)
        assert url is not None
        start = None if job.start is None else Path(job.start)
        return cls(
            url=url,
            text=run.job.read_text(encoding="utf-8"),
            start=None if start is None else display_path(start),
            in_place=start is not None and start.parent == run.store.directory,
            has_base=job.base == str(run.base),
        )

    def to_text(self) -> str:
        """For the store."""
        return json.dumps(dataclasses.asdict(self))


class LeadRelay:
    """Sees to the other hosts while a run is at work; its `Others` for the mirror."""

    def __init__(self, store: Any, world_size: int, local_world_size: int) -> None:
        """Prepare.

        Args:
            store: of the supervisors.
            world_size: ranks in all.
            local_world_size: ranks on each host.
        """
        self._store, self._texts = store, SharedTexts(store)
        self._world_size, self._of_host = world_size, local_world_size
        self._indices: dict[int, HostIndex] = {}
        self._silent: dict[int, int] = {}
        self._seen: dict[str, int] = {}
        self._lead = Lead()
        self._told = ""
        self._job: Job | None = None
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "LeadRelay":
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        if self._thread is None:
            return
        self._thread.join()
        with suppress(STORE_GONE):
            self._tell(done=True)
            deadline_s = time.monotonic() + _LEAVING_S
            ranks = [
                rank for first in self._indices for rank in range(first, first + self._of_host)
            ]
            while time.monotonic() < deadline_s:
                if all(self._store.check([ended_key(rank)]) for rank in ranks):
                    return
                time.sleep(POLL_S)

    def begin(self, job: Job) -> None:
        """Collect from now on."""
        self._job = job
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def collect(self) -> None:
        """Bring here what ranks elsewhere have left, and tell the others what they must know.

        Raises:
            DistError: the store is gone.
        """
        if self._job is None:
            return
        with self._lock:
            for first in range(self._of_host, self._world_size, self._of_host):
                text = self._texts.get(index_of(first))
                if text is None:  # it has not begun, or sees the directory of this host
                    continue
                index = HostIndex(**json.loads(text))
                for key, version in index.versions.items():
                    if self._seen.get(key) != version:
                        self._take(key)
                        self._seen[key] = version
                before = self._indices.get(first)
                is_new = before is None or index.beats != before.beats
                self._silent[first] = 0 if is_new else self._silent[first] + 1
                self._indices[first] = index
        self._tell()

    def lead(self, current: int | None, kept: Iterable[int], newest: int) -> None:
        """Say which checkpoints are to be sent.

        Args:
            current: the step of the one that is sent now.
            kept: steps of those that are to be sent later.
            newest: the step of the newest there is.
        """
        self._lead = dataclasses.replace(
            self._lead, current=current, kept=tuple(kept), newest=newest
        )

    def sent(self, step: int) -> dict[str, str]:
        """Checksums, by name, of the files of a checkpoint that other hosts have sent."""
        with self._lock:
            found: dict[str, str] = {}
            for index in self._indices.values():
                found |= index.sent.get(str(step), {})
            return found

    def problem(self) -> str:
        """Why another host cannot send; empty: all can."""
        with self._lock:
            found = [f"{i.host}: {i.problem}" for i in self._indices.values() if i.problem]
        return "; ".join(found)

    def gone(self) -> str:
        """Which other host will send nothing any more; empty: none."""
        with self._lock:
            found = [
                self._indices[f].host for f, looks in self._silent.items() if looks > _SILENT_LOOKS
            ]
        return f"nothing is heard of {', '.join(found)}" if found else ""

    def _collect(self) -> None:
        while not self._ends.wait(POLL_S):
            with suppress(STORE_GONE, OSError):  # heartbeats tell of hosts that are gone
                self.collect()

    def _take(self, key: str) -> None:
        assert self._job is not None
        text = self._texts.get(key)
        if text is None:
            return
        values = json.loads(text)
        directory = self._job.directory.rank(values["rank"])
        directory.path.mkdir(exist_ok=True)
        path = directory.path / Path(values["name"]).name
        partial = path.with_name(f".{path.name}.taken")
        partial.write_text(values["text"], encoding="utf-8")
        partial.replace(path)

    def _tell(self, *, done: bool = False) -> None:
        errors = {}
        if self._job is not None:
            for rank in range(self._world_size):
                with suppress(OSError):
                    file = self._job.directory.rank(rank).error
                    errors[str(rank)] = file.read_text(encoding="utf-8")
        text = dataclasses.replace(self._lead, errors=errors, done=done).to_text()
        if text != self._told:
            self._texts.put(LEAD, text)
            self._told = text
