"""Hosts that share no disk, and work on one run whose directory is a url.

The directory of the run is on the host of rank 0. Every other host has a directory of its own that
stands for the url: its ranks find the job there, and what they download of the checkpoint, and
leave there what they would leave in that of rank 0. The supervisor of its first rank passes these
files on (`HostRelay`) and uploads the shards. The one of rank 0 (`LeadRelay`) puts the files where
a rank would have left them, so that whoever reads them (the saver receipts, the report those of all
ranks) need not know of hosts, and decides which checkpoint is uploaded: it is complete at the url
when the shards of all hosts are there.

Small files travel through torch's store of the supervisors, which delivers them at once; a url
would not, and may not answer at all.
"""

import dataclasses
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ftkit.checkpoint.metadata import BASE, METADATA, step_of_receipt
from ftkit.errors import UserError
from ftkit.extensions.hosts.heartbeats import ended_key
from ftkit.models.pretrained.places import find_or_download
from ftkit.runs.directory import RankDirectory, RunDirectory
from ftkit.runs.job import Job, RankError
from ftkit.runs.launchers import ExternalRanks
from ftkit.runs.lock import LOST_S, claim
from ftkit.runs.url_runs import fetch_without_shards, refresh, url_runs
from ftkit.utils.files import make_reserve
from ftkit.utils.process import launcher_starts_again
from ftkit.utils.url_files import StorageError, unreachable
from ftkit.utils.urls import display_path, local_path, url_of

JOB_TEXT = "job-text"
"""Key: the job of a run at a url, for hosts that do not see its file (`JobAnnouncement`)."""
_LEAD = "lead"
"""Key: the state that the host of rank 0 announces (`LeadState`)."""
_STORE_GONE = dist.DistError
"""Raised by the store when rank 0's supervisor, which holds it, is gone."""
# Seconds between two looks at the store, of each host.
_POLL_S = 0.25
# Seconds for one request.
_STORE_TIMEOUT_S = 60.0
_MAX_CHARACTERS = 2**20
"""Longest text; the store takes no more than 8 MiB."""
# 10 s, at _POLL_S.
_SILENT_LOOKS = 40
"""Looks in a row without a sign of a host, after which its uploads are not waited for."""
_LEAVING_S = 10.0
"""Seconds that others have to see that all is uploaded, before the store ends."""
_HEARD_S = 10.0
"""A host uploads nothing while rank 0 has been silent for longer: the run may have been
continued elsewhere."""
_LONGEST_WAIT_S = 15.0
"""Longest pause between two attempts to upload."""
_ENDING_S = 10.0
"""Seconds that the ranks of one host may take to end after each other."""
_RECEIPTS = 8
"""Receipts of a rank that may wait to be read; it is at most two saves ahead of rank 0."""


# --- Messages between hosts -----------------------------------------------------------------------


class SharedTexts:
    """Short texts by name that all supervisors see; usable from several threads."""

    def __init__(self, store: Any) -> None:
        """Connect.

        Args:
            store: a TCPStore; calls on one connection wait for each other, so this opens another.
        """
        self._store = type(store)(
            store.host, store.port, is_master=False, timeout=timedelta(seconds=_STORE_TIMEOUT_S)
        )

    def put(self, name: str, text: str) -> None:
        """Set a text."""
        self._store.set(name, text)

    def get(self, name: str) -> str | None:
        """Return a text; None: there is none of that name."""
        if not self._store.check([name]):
            return None
        found: str = self._store.get(name).decode()
        return found

    def put_file(self, rank: int, name: str, text: str, key: str | None = None) -> None:
        """Put a file that a rank has left, or the end of one that is too long."""
        content = {"rank": rank, "name": name, "text": text[-_MAX_CHARACTERS:]}
        self.put(_file_key(rank, key or name), json.dumps(content))


def over_key(rank: int) -> str:
    """Key: a rank has ended, and all that it left is visible."""
    return f"over-{rank}"


def _index_key(first: int) -> str:
    """Key: the `HostIndex` of a host, by the first of its ranks."""
    return f"host-{first}"


def _file_key(rank: int, name: str) -> str:
    """Key: a file that a rank has left."""
    return f"file-{rank}-{name}"


def _ready_key(first: int) -> str:
    """Key: path of the job file on a host; empty: the host cannot take part."""
    return f"ready-{first}"


@dataclass(frozen=True, kw_only=True)
class JobAnnouncement:
    """A job as the host of rank 0 announces it to other hosts."""

    url: str
    """Url of its directory."""
    text: str
    """The job file on the host of rank 0."""
    start: str | None
    """The checkpoint to continue from: a path or url."""
    in_place: bool
    """True if that belongs to the run."""
    has_base: bool
    """True if the checkpoint has all that is needed of the base model."""

    @classmethod
    def of(cls, run: RunDirectory, start: Path | None, base: str) -> "JobAnnouncement":
        """The announcement of a job of this host.

        Args:
            run: its directory, with the job file.
            start: the checkpoint to continue from.
            base: the base model, as in the job.
        """
        url = url_of(run.path)
        assert url is not None
        return cls(
            url=url,
            text=run.job.read_text(encoding="utf-8"),
            start=None if start is None else display_path(start),
            in_place=start is not None and start.parent == run.store.directory,
            has_base=base == str(run.base),
        )

    def to_text(self) -> str:
        """Text for the store."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class LeadState:
    """State of the run that the host of rank 0 announces to the others."""

    current: int | None = None
    """Step of the checkpoint that is uploaded now."""
    kept: tuple[int, ...] = ()
    """Steps of checkpoints that are uploaded later."""
    newest: int = 0
    """Newest step that is complete on the host of rank 0."""
    errors: dict[str, str] = field(default_factory=dict)
    """Error files of ranks that failed, by rank."""
    done: bool = False
    """True once nothing more is to be uploaded."""

    def to_text(self) -> str:
        """Text for the store."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str) -> "LeadState":
        """The inverse of `to_text`."""
        values = json.loads(text)
        return cls(**values | {"kept": tuple(values["kept"])})


@dataclass(frozen=True, kw_only=True)
class HostIndex:
    """State of a host, for that of rank 0."""

    host: str
    """Its name."""
    versions: dict[str, int] = field(default_factory=dict)
    """Versions of the files of its ranks, by key."""
    sent: dict[str, dict[str, str]] = field(default_factory=dict)
    """Checksums of the files of its ranks that are at the url, by step and name."""
    problem: str = ""
    """Error of its last upload; empty: none."""
    beats: int = 0
    """Number of times that it has sent this state: its heartbeat."""

    def to_text(self) -> str:
        """Text for the store."""
        return json.dumps(dataclasses.asdict(self))


# --- On the host of rank 0 ------------------------------------------------------------------------


class LeadRelay:
    """Connects the run on this host with other hosts: the `OtherHosts` of its mirror."""

    def __init__(self, store: Any, world_size: int, local_world_size: int) -> None:
        """Connect to the store; `begin` starts to collect.

        Args:
            store: of the supervisors.
            world_size: ranks in all.
            local_world_size: ranks on each host.
        """
        self._store, self._texts = store, SharedTexts(store)
        self._world_size, self._local_world_size = world_size, local_world_size
        self._indices: dict[int, HostIndex] = {}
        self._silent: dict[int, int] = {}
        self._seen: dict[str, int] = {}
        self._state = LeadState()
        self._announced = ""
        self._run: RunDirectory | None = None
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "LeadRelay":
        return self

    def __exit__(self, *_: object) -> None:
        """Announce the end, and give other hosts time to see it before the store ends."""
        self._ends.set()
        if self._thread is None:
            return
        # First of all: nothing is announced after `done`.
        self._thread.join()
        with suppress(_STORE_GONE):
            self._put_state(done=True)
            deadline_s = time.monotonic() + _LEAVING_S
            keys = [
                ended_key(rank)
                for first in self._indices
                for rank in range(first, first + self._local_world_size)
            ]
            while time.monotonic() < deadline_s:
                if all(self._store.check([key]) for key in keys):
                    return
                time.sleep(_POLL_S)

    def begin(self, run: RunDirectory) -> None:
        """Collect the files of other hosts into a run's directory from now on."""
        self._run = run
        self._thread = threading.Thread(target=self._collect_repeatedly, daemon=True)
        self._thread.start()

    def collect(self) -> None:
        """Collect what ranks on other hosts have left, and announce the state of the run.

        Raises:
            DistError: the store is gone.
        """
        if self._run is None:
            return
        with self._lock:
            for first in range(self._local_world_size, self._world_size, self._local_world_size):
                text = self._texts.get(_index_key(first))
                if text is None:  # not started yet, or it sees the directory of this host
                    continue
                # The index is put after its files, so each version in it can be read.
                index = HostIndex(**json.loads(text))
                for key, version in index.versions.items():
                    if self._seen.get(key) != version:
                        self._write_file(self._run, key)
                        self._seen[key] = version
                before = self._indices.get(first)
                is_new = before is None or index.beats != before.beats
                self._silent[first] = 0 if is_new else self._silent[first] + 1
                self._indices[first] = index
        self._put_state()

    def announce(self, current: int | None, kept: Iterable[int], newest: int) -> None:
        """Announce which checkpoints are to be uploaded.

        Args:
            current: the step of the one that is uploaded now.
            kept: steps of those that are uploaded later.
            newest: the newest step there is.
        """
        self._state = dataclasses.replace(
            self._state, current=current, kept=tuple(kept), newest=newest
        )

    def sent(self, step: int) -> dict[str, str]:
        """Checksums, by name, of the files of a checkpoint that other hosts have uploaded."""
        with self._lock:
            found: dict[str, str] = {}
            for index in self._indices.values():
                found |= index.sent.get(str(step), {})
            return found

    def problem(self) -> str:
        """Errors of the last uploads of other hosts; empty: none."""
        with self._lock:
            found = [f"{i.host}: {i.problem}" for i in self._indices.values() if i.problem]
        return "; ".join(found)

    def gone(self) -> str:
        """Return which other hosts will upload nothing more, in words; empty: none."""
        with self._lock:
            found = [
                self._indices[f].host for f, looks in self._silent.items() if looks > _SILENT_LOOKS
            ]
        return f"no heartbeat from {', '.join(found)}" if found else ""

    def _collect_repeatedly(self) -> None:
        while not self._ends.wait(_POLL_S):
            with suppress(_STORE_GONE, OSError):  # heartbeats report hosts that are gone
                self.collect()

    def _write_file(self, run: RunDirectory, key: str) -> None:
        text = self._texts.get(key)
        if text is None:
            return
        values = json.loads(text)
        directory = run.rank(values["rank"])
        directory.path.mkdir(exist_ok=True)
        path = directory.path / Path(values["name"]).name  # a name alone leads nowhere else
        partial = path.with_name(f".{path.name}.taken")
        partial.write_text(values["text"], encoding="utf-8")
        # Readers poll for the file, and must not see a part of it.
        partial.replace(path)

    def _put_state(self, *, done: bool = False) -> None:
        errors = {}
        if self._run is not None:
            for rank in range(self._world_size):
                with suppress(OSError):
                    errors[str(rank)] = self._run.rank(rank).error.read_text(encoding="utf-8")
        text = dataclasses.replace(self._state, errors=errors, done=done).to_text()
        # An unchanged state is not sent again: any answer of the store shows others that rank 0 is
        # there.
        if text != self._announced:
            self._texts.put(_LEAD, text)
            self._announced = text


# --- On any other host ----------------------------------------------------------------------------


@contextmanager
def announced_job(
    placed: ExternalRanks,
    store: Any,
    job_file: Path,
    received: Sequence[object],
    *,
    token: str | None,
) -> Iterator[Job]:
    """The job of a rank other than 0, with everything that it needs on this host.

    Args:
        placed: this rank.
        store: of the supervisors.
        job_file: the job's file on the host of rank 0.
        received: signals so far; another one ends the uploads after the run.
        token: of the hub, for models that this host has to download.

    Raises:
        UserError: this host lacks something; rank 0 reports it.
    """
    texts = SharedTexts(store)
    text = texts.get(JOB_TEXT)
    announcement = None if text is None else JobAnnouncement(**json.loads(text))
    if announcement is None:  # the run is in a directory on a disk that all share
        yield Job.read(job_file)
        return
    run = RunDirectory(local_path(announcement.url))
    if _content(run.job) == announcement.text:  # the directory that stands for the url is shared
        yield Job.read(run.job)
        return
    # The first rank of a host prepares its directory; the others wait for its job file.
    first = placed.rank - placed.rank % placed.local_world_size
    ranks = range(first, first + placed.local_world_size)
    if placed.rank > first:
        while (path := texts.get(_ready_key(first))) is None:
            time.sleep(_POLL_S)
        if not path:
            raise UserError("this host cannot take part")
        yield Job.read(Path(path))
        return
    try:
        with claim(run.path, "go_on", patience_s=LOST_S if launcher_starts_again() else 0.0):
            job = _prepare_job(run, announcement, token)
            texts.put(_ready_key(first), str(run.job))
            with HostRelay(texts, run, ranks, received):
                yield job
    except UserError as error:
        # Without a path, so that the other ranks of this host stop waiting.
        texts.put(_ready_key(first), "")
        message = f"{socket.gethostname()}: {error}"
        # As if the rank had left an error file: the relay of rank 0 writes it there, and the run
        # ends.
        failed = RankError(kind="user", message=message, happened_at_s=time.time())
        name = RankDirectory(run, first).error.name
        texts.put_file(first, name, failed.to_text())
        index = HostIndex(host=socket.gethostname(), versions={_file_key(first, name): 1})
        texts.put(_index_key(first), index.to_text())
        raise


def _content(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None


def _prepare_job(run: RunDirectory, announcement: JobAnnouncement, token: str | None) -> Job:
    """Bring the checkpoint and the models to this host, and write its job file."""
    run.store.remove_leftovers()
    values = json.loads(announcement.text)
    try:
        if announcement.start is not None:
            start = local_path(announcement.start)
            if announcement.in_place:
                # Not `refresh`, which skips a directory that this machine holds.
                url_runs(run.path).fetch_run(run)
            elif url_of(start) is not None:
                refresh(start)
            if not (start / METADATA).exists():
                raise UserError(
                    f"resume is {display_path(start)}, which this machine does not have. Try the "
                    "url of a checkpoint, or a path where every machine has it."
                )
            fetch_without_shards(start)
            values["start"] = str(start)
            if announcement.has_base:
                # A copy, because retention may delete the checkpoint while the run continues.
                shutil.copytree(start / BASE, run.base)
                values["base"] = str(run.base)
    except StorageError as error:
        raise unreachable(error) from error
    base = values["recipe"]["checkpoint_dir"]
    if not announcement.has_base and not base.startswith("random:"):
        values["base"] = str(find_or_download(base, token=token).resolve())
    if values["reference"] is not None:
        reference = values["recipe"]["reference"]
        values["reference"] = str(find_or_download(reference, token=token).resolve())
    if values["beside"] is not None:
        beside = values["recipe"]["teacher"] or values["recipe"]["reference"]
        if not beside.startswith("random:"):
            values["beside"] = str(find_or_download(beside, token=token).resolve())
    make_reserve(run.reserve)
    # Renamed into place: ranks of this host may read it at any time.
    partial = run.job.with_name(".job.here")
    partial.write_text(json.dumps(values), encoding="utf-8")
    partial.replace(run.job)
    return Job.read(run.job)


class HostRelay:
    """Passes on what the ranks of a host leave, and uploads their shards."""

    def __init__(
        self, texts: SharedTexts, run: RunDirectory, ranks: range, received: Sequence[object]
    ) -> None:
        """Start nothing yet; the block does.

        Args:
            texts: shared with all supervisors.
            run: the directory of this host.
            ranks: of this host.
            received: signals so far; another one ends the uploads after the run.
        """
        self._texts, self._run, self._ranks, self._received = texts, run, ranks, received
        self._shards = _HeldShards(run)
        self._versions: dict[str, int] = {}
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._lead = LeadState()
        self._heard_s = time.monotonic()
        self._problem = self._heard_text = ""
        self._beats = 0
        self._receipts: dict[int, int] = {}
        self._lock = threading.Lock()
        self._ends = threading.Event()
        # Two threads: an upload may wait for the storage, and must not delay the heartbeat.
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._talk, self._upload)
        ]

    def __enter__(self) -> "HostRelay":
        # Before the ranks start: rank 0 waits only for hosts whose state it has seen.
        self._pass_on()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Pass on the last files, and stay until nothing of this host is to be uploaded."""
        before = len(self._received)
        try:
            # The first rank has ended with this block; the others of this host take a moment
            # longer.
            deadline_s = time.monotonic() + _ENDING_S
            while time.monotonic() < deadline_s and not all(
                self._texts.get(over_key(rank)) is not None for rank in self._ranks[1:]
            ):
                time.sleep(_POLL_S)
            self._pass_on()
            self._texts.put(over_key(self._ranks[0]), "")
            # Shards may be needed until rank 0 has all of the run at the url, or is gone.
            while not self._lead.done and len(self._received) == before and self._is_heard():
                time.sleep(_POLL_S)
        except _STORE_GONE:
            pass  # with rank 0
        finally:
            self._ends.set()
            for thread in self._threads:
                thread.join(timeout=_POLL_S)  # nobody waits any more for an upload under way

    def _is_heard(self) -> bool:
        return time.monotonic() - self._heard_s < _HEARD_S

    def _talk(self) -> None:
        with suppress(_STORE_GONE):
            while not self._ends.wait(_POLL_S):
                self._listen()
                with suppress(OSError):
                    self._pass_on()

    def _upload(self) -> None:
        """Upload at once, and with ever longer pauses while that fails."""
        wait_s = _POLL_S
        while not self._ends.wait(wait_s):
            if not self._is_heard():
                continue
            try:
                self._shards.follow(self._lead, self._is_heard)
                self._problem, wait_s = "", _POLL_S
            except (StorageError, OSError) as error:
                self._problem, wait_s = str(error), min(2 * wait_s, _LONGEST_WAIT_S)

    def _listen(self) -> None:
        """Read the announced state; errors of other ranks go where the ranks here look."""
        text = self._texts.get(_LEAD)
        # The store is in the process of rank 0: its answer is a heartbeat.
        self._heard_s = time.monotonic()
        if text is None or text == self._heard_text:
            return
        self._heard_text, self._lead = text, LeadState.parse(text)
        for rank, error in self._lead.errors.items():
            directory = self._run.rank(int(rank))
            # The ranks of this host write their own.
            if int(rank) not in self._ranks and not directory.error.exists():
                directory.path.mkdir(exist_ok=True)
                partial = directory.error.with_name(".error")
                partial.write_text(error, encoding="utf-8")
                partial.replace(directory.error)

    def _pass_on(self) -> None:
        """Pass on files that have changed, and this host's heartbeat."""
        # Called by the thread and, at the end, by the main one: versions and receipts are counted.
        with self._lock:
            for rank in self._ranks:
                directory = self._run.rank(rank)
                for file in (directory.report, directory.error, directory.output):
                    self._pass_on_file(rank, file)
                for receipt in directory.path.glob("saved-*.json"):
                    self._pass_on_receipt(rank, receipt)
            index = HostIndex(
                host=socket.gethostname(),
                versions=dict(self._versions),
                sent=self._shards.sent(),
                problem=self._problem,
                beats=self._beats,
            )
            self._beats += 1
            self._texts.put(_index_key(self._ranks[0]), index.to_text())

    def _pass_on_file(self, rank: int, file: Path) -> None:
        try:
            status = file.stat()
            stamp = status.st_mtime_ns, status.st_size
            if self._stamps.get(file) == stamp:
                return
            text = file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        self._put(rank, file.name, text)
        # Noted last: what could not be put is put at the next look.
        self._stamps[file] = stamp

    def _pass_on_receipt(self, rank: int, receipt: Path) -> None:
        """Pass on a receipt, once its shards have left the directory that the next save uses."""
        text = receipt.read_text(encoding="utf-8")
        self._shards.hold(step_of_receipt(receipt.name), text)
        # A rank may leave the next one before this one is read: each has a key of its own.
        number = self._receipts.get(rank, 0)
        self._receipts[rank] = number + 1
        self._put(rank, receipt.name, text, f"receipt-{number % _RECEIPTS}")
        receipt.unlink()

    def _put(self, rank: int, name: str, text: str, key: str | None = None) -> None:
        """Put a file before its version: a reader that sees the version finds the file."""
        self._texts.put_file(rank, name, text, key)
        counted = _file_key(rank, key or name)
        self._versions[counted] = self._versions.get(counted, 0) + 1


class _HeldShards:
    """Shards of this host, kept until they are at the url or no longer needed."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._directory = run, run.state / "outgoing"
        self._uploads = url_runs(run.path).uploads(run)
        self._checksums: dict[int, dict[str, str]] = {}

    def hold(self, step: int, receipt: str) -> None:
        """Move what a rank has written for a checkpoint, by the receipt that its saver left."""
        # A rank whose disk was full leaves an empty receipt.
        files = json.loads(receipt)["files"] if receipt else {}
        home = self._directory / str(step)
        home.mkdir(parents=True, exist_ok=True)
        for name in files:
            # Moved: the saver removes its directory, and the next save uses the same one.
            (self._run.store.partial(step) / name).replace(home / name)
        held = {name: entry["sha256"] for name, entry in files.items()}
        self._checksums[step] = self._checksums.get(step, {}) | held

    def follow(self, lead: LeadState, is_heard: Callable[[], bool]) -> None:
        """Upload the current checkpoint, and drop those that are no longer needed.

        Raises:
            StorageError: the url does not take it.
        """
        wanted = {lead.current, *lead.kept}
        # A later step is one that rank 0 has not announced yet: it may still be wanted.
        for old in [s for s in list(self._checksums) if s not in wanted and s <= lead.newest]:
            shutil.rmtree(self._directory / str(old), ignore_errors=True)
            self._checksums.pop(old)
            self._uploads.forget(old)
        if lead.current is not None and lead.current in self._checksums:
            files = self._checksums[lead.current]
            home = self._directory / str(lead.current)
            self._uploads.upload(lead.current, home, files, is_heard)

    def sent(self) -> dict[str, dict[str, str]]:
        """Checksums of the files at the url, by step and name."""
        return {str(step): self._uploads.sent(step) for step in list(self._checksums)}
