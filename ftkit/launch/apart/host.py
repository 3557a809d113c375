"""A host of a run on hosts that share no disk, other than that of rank 0.

It has a directory of its own that stands for the url. Its ranks find in it the job and what they
fetch of the checkpoint, and leave in it what they would leave in that of rank 0; the supervisor of
its first rank passes that on, sends their shards, and tells them when a rank elsewhere has failed.
"""

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ftkit.checkpoint.metadata import BASE, METADATA, step_of_receipt
from ftkit.errors import UserError
from ftkit.launch.apart.lead import HostIndex, JobAnnouncement, Lead
from ftkit.launch.apart.outgoing import Outgoing
from ftkit.launch.apart.texts import (
    JOB_TEXT,
    LEAD,
    POLL_S,
    STORE_GONE,
    SharedTexts,
    end_of_text,
    file_of,
    index_of,
    over,
    ready,
)
from ftkit.launch.environment import ExternalRanks
from ftkit.models.pretrained.hub import find_or_download
from ftkit.runs.directory import RankDirectory, RunDirectory
from ftkit.runs.fetching import fetch_companions, fetch_run, refresh
from ftkit.runs.job import Job, RankError
from ftkit.runs.lock import LOST_S, claim
from ftkit.utils.files import make_reserve
from ftkit.utils.process import launcher_starts_again
from ftkit.utils.remote.fetch import unreachable
from ftkit.utils.remote.objects import StorageError
from ftkit.utils.remote.urls import display_path, local_path, url_of

_HEARD_S = 10.0
"""Nothing is sent for a host of rank 0 that was not heard of for longer: the run may have gone on
elsewhere."""
_LONGEST_WAIT_S = 15.0
"""Between two attempts to send."""
_ENDING_S = 10.0
"""How long the ranks of one host may end after each other."""
_RECEIPTS = 8
"""How many of a rank may be on their way; a rank is two saves ahead of rank 0 at most."""


@contextmanager
def job_here(
    placed: ExternalRanks, store: Any, job_file: Path, received: Sequence[object]
) -> Iterator[Job]:
    """The job of a rank other than 0, as this host has it.

    Args:
        placed: which rank this is.
        store: of the supervisors.
        job_file: the job's file where rank 0 runs.
        received: signals so far; one more ends what is done after the run.

    Raises:
        UserError: this host lacks something; rank 0 knows it.
    """
    texts = SharedTexts(store)
    text = texts.get(JOB_TEXT)
    told = JobAnnouncement(**json.loads(text)) if text is not None else None
    if told is None:  # in a directory of a disk that all share
        yield Job.read(job_file)
        return
    run = RunDirectory(local_path(told.url))
    if _content(run.job) == told.text:  # the directory that stands for the url is shared
        yield Job.read(run.job)
        return
    ranks = _ranks_here(placed)
    if placed.rank > ranks[0]:
        while (found := texts.get(ready(ranks[0]))) is None:
            time.sleep(POLL_S)
        if not found:
            raise UserError("this host cannot take part")
        yield Job.read(Path(found))
        return
    try:
        with claim(run.path, "go_on", patience_s=LOST_S if launcher_starts_again() else 0.0):
            job = _prepared(run, told)
            texts.put(ready(ranks[0]), str(run.job))
            with HostRelay(texts, run, ranks, received):
                yield job
    except UserError as error:
        texts.put(ready(ranks[0]), "")
        message = f"{socket.gethostname()}: {error}"
        failed = RankError(kind="user", message=message, happened_at_s=time.time())
        _put_file(texts, ranks[0], RankDirectory(run, ranks[0]).error.name, failed.to_text())
        key = file_of(ranks[0], RankDirectory(run, ranks[0]).error.name)
        index = HostIndex(host=socket.gethostname(), versions={key: 1})
        texts.put(index_of(ranks[0]), index.to_text())
        raise


def _ranks_here(placed: ExternalRanks) -> range:
    first = placed.rank - placed.rank % placed.local_world_size
    return range(first, first + placed.local_world_size)


def _content(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None


def _prepared(run: RunDirectory, told: JobAnnouncement) -> Job:
    """The job with all that it needs on this host.

    Raises:
        UserError: something is missing.
    """
    run.store.remove_leftovers()
    values = json.loads(told.text)
    try:
        if told.start is not None:
            start = _fetched_start(run, told, told.start)
            values["start"] = str(start)
            if told.has_base:
                shutil.copytree(start / BASE, run.base)
                values["base"] = str(run.base)
    except StorageError as error:
        raise unreachable(error) from error
    base = values["recipe"]["checkpoint_dir"]
    if not told.has_base and not base.startswith("random:"):
        values["base"] = str(find_or_download(base).resolve())
    make_reserve(run.reserve)
    partial = run.job.with_name(".job.here")
    partial.write_text(json.dumps(values), encoding="utf-8")
    partial.replace(run.job)
    return Job.read(run.job)


def _fetched_start(run: RunDirectory, told: JobAnnouncement, named: str) -> Path:
    start = local_path(named)
    if told.in_place:
        fetch_run(run)
    elif url_of(start) is not None:
        refresh(start)
    if not (start / METADATA).exists():
        raise UserError(
            f"resume is {display_path(start)}, which this machine does not have. Try the url of a "
            "checkpoint, or a path where every machine has it."
        )
    fetch_companions(start)
    return start


def _put_file(texts: SharedTexts, rank: int, name: str, text: str, key: str | None = None) -> None:
    content = {"rank": rank, "name": name, "text": end_of_text(text)}
    texts.put(file_of(rank, key or name), json.dumps(content))


class HostRelay:
    """Passes on what the ranks of a host leave, and sends their shards."""

    def __init__(
        self, texts: SharedTexts, run: RunDirectory, ranks: range, received: Sequence[object]
    ) -> None:
        """Prepare.

        Args:
            texts: that all supervisors see.
            run: the directory of this host.
            ranks: of this host.
            received: signals so far; one more ends what is done after the run.
        """
        self._texts, self._run, self._ranks, self._received = texts, run, ranks, received
        self._outgoing = Outgoing(run)
        self._versions: dict[str, int] = {}
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._lead = Lead()
        self._heard_s = time.monotonic()
        self._problem = self._told = ""
        self._beats = 0
        self._receipts: dict[int, int] = {}
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._talk, self._send)
        ]

    def __enter__(self) -> "HostRelay":
        self._pass_on()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Pass on the last words, and stay until nothing of this host is to be sent any more."""
        before = len(self._received)
        try:
            deadline_s = time.monotonic() + _ENDING_S
            while time.monotonic() < deadline_s and not all(
                self._texts.get(over(rank)) is not None for rank in self._ranks[1:]
            ):
                time.sleep(POLL_S)
            self._pass_on()
            self._texts.put(over(self._ranks[0]), "")
            while not self._lead.done and len(self._received) == before and self._is_heard():
                time.sleep(POLL_S)
        except STORE_GONE:
            pass  # with rank 0
        finally:
            self._ends.set()
            for thread in self._threads:
                thread.join(timeout=POLL_S)  # it may be sending, for which nobody waits any more

    @property
    def is_done(self) -> bool:
        """Whether the host of rank 0 has said that it needs nothing more."""
        return self._lead.done

    def _is_heard(self) -> bool:
        return time.monotonic() - self._heard_s < _HEARD_S

    def _talk(self) -> None:
        """The thread that listens to the host of rank 0 and tells it what there is."""
        with suppress(STORE_GONE):
            while not self._ends.wait(POLL_S):
                self._listen()
                with suppress(OSError):
                    self._pass_on()

    def _send(self) -> None:
        """The thread that sends: at once, and in ever longer intervals while that fails."""
        wait_s = POLL_S
        while not self._ends.wait(wait_s):
            if not self._is_heard():
                continue
            try:
                self._outgoing.follow(self._lead, self._is_heard)
                self._problem, wait_s = "", POLL_S
            except (StorageError, OSError) as error:
                self._problem, wait_s = str(error), min(2 * wait_s, _LONGEST_WAIT_S)

    def _listen(self) -> None:
        text = self._texts.get(LEAD)
        self._heard_s = time.monotonic()
        if text is None or text == self._told:
            return
        self._told, self._lead = text, Lead.parse(text)
        for rank, error in self._lead.errors.items():
            directory = self._run.rank(int(rank))
            if int(rank) not in self._ranks and not directory.error.exists():
                directory.path.mkdir(exist_ok=True)
                partial = directory.error.with_name(".error")
                partial.write_text(error, encoding="utf-8")
                partial.replace(directory.error)

    def _pass_on(self) -> None:
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
                sent={str(step): files for step, files in dict(self._outgoing.sent).items()},
                problem=self._problem,
                beats=self._beats,
            )
            self._beats += 1
            self._texts.put(index_of(self._ranks[0]), index.to_text())

    def _pass_on_file(self, rank: int, file: Path) -> None:
        try:
            status = file.stat()
            stamp = status.st_mtime_ns, status.st_size
            if self._stamps.get(file) == stamp:
                return
            text = file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        self._count(rank, file.name, lambda: _put_file(self._texts, rank, file.name, text))
        self._stamps[file] = stamp

    def _pass_on_receipt(self, rank: int, receipt: Path) -> None:
        """After its shards have left the directory in which the next ones will be written."""
        text = receipt.read_text(encoding="utf-8")
        self._outgoing.hold(step_of_receipt(receipt.name), text)
        # A rank may have left the next one before this one is taken: each has a place of its own.
        number = self._receipts.get(rank, 0)
        self._receipts[rank] = number + 1
        key = f"receipt-{number % _RECEIPTS}"
        self._count(rank, key, lambda: _put_file(self._texts, rank, receipt.name, text, key))
        receipt.unlink()

    def _count(self, rank: int, name: str, put: Callable[[], None]) -> None:
        put()
        key = file_of(rank, name)
        self._versions[key] = self._versions.get(key, 0) + 1
