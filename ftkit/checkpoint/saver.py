"""The asynchronous saver: a host copy of the state at once, the checkpoint's files in a thread.

Every rank writes its own shard. Rank 0 also writes the files that all ranks share, waits for the
shards, and commits the checkpoint.
"""

import dataclasses
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ftkit.checkpoint.file_checks import describe_file
from ftkit.checkpoint.host_copies import HostCopies
from ftkit.checkpoint.metadata import FileEntry, Metadata, receipt_name, shard_name
from ftkit.checkpoint.shards import Piece, write_shard, write_shard_in_portions
from ftkit.checkpoint.store import KeepEvery, Store
from ftkit.utils.files import sync, write_json
from ftkit.utils.json_values import from_json

# The disks of other hosts may be slower than that of rank 0.
_PATIENCE_S = 600.0
"""Rank 0 waits this long for the shards of the others once its own files are written."""
# Receipts are files, so rank 0 has to look for them.
_POLL_S = 0.02
_PORTION_BYTES = 2**20
"""Host memory for a save that training waits for; the least that max_staged_bytes may allow."""
MOST_FAILURES = 3
"""Training stops after so many failed saves in a row."""


class SavingFailed(Exception):
    """Several checkpoints in a row could not be written."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Outcome of a save."""

    step: int
    """Optimizer steps done."""
    path: Path
    """Directory of the checkpoint."""
    stall_s: float
    """Time for which training waited."""
    write_s: float
    """Time from the request to the commit."""
    size_bytes: int
    """Size of all files."""
    error: str | None
    """Why it failed; None: the checkpoint is complete."""
    note: str | None
    """Problem after the commit."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Rules for keeping checkpoints; see `Store.kept`."""

    keep_last: int
    keep_every: KeepEvery
    keep_best: int


class Saver:
    """Writes the checkpoints of one rank, at most one at a time.

    Args:
        store: of the checkpoints; all ranks see the same directory.
        receipts: for each rank, the directory in which it reports that its shard is written.
        rank: this rank.
        retention: which checkpoints rank 0 keeps.
        asynchronous: write in a thread, from a copy; otherwise training waits.
        max_staged_bytes: largest size of that copy; None: unlimited.
    """

    def __init__(
        self,
        store: Store,
        receipts: list[Path],
        rank: int,
        retention: Retention,
        *,
        asynchronous: bool,
        max_staged_bytes: int | None = None,
    ) -> None:
        self.store = store
        self._receipts, self._rank, self._retention = receipts, rank, retention
        self._asynchronous = asynchronous
        self._max_staged_bytes = max_staged_bytes
        self.unstaged_bytes = 0
        """Size that the copy would have had, if it was too large."""
        self._thread: threading.Thread | None = None
        # Filled by the thread while training takes from it.
        self._finished: SimpleQueue[Saved] = SimpleQueue()
        self._failures: list[str] = []
        self.copies = HostCopies()

    @property
    def busy(self) -> bool:
        """True while files are being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        metadata: Metadata,
        pieces: Iterable[Piece],
        companions: Callable[[Path], list[Path]] | None,
        *,
        wait: bool,
        started: float,
    ) -> None:
        """Save a checkpoint; returns as soon as training may continue.

        Args:
            metadata: without files.
            pieces: of this rank; their memory may change once this returns and, on a device,
                once `copies.before_update` has returned.
            companions: on rank 0, writes the other files into the given directory and returns
                their paths.
            wait: return only when the checkpoint is committed.
            started: when training began to wait, by `time.perf_counter`.
        """
        self.wait()  # one save at a time: the copies are in one block of memory
        asynchronous = self._asynchronous and not wait
        most = self._max_staged_bytes
        if most is not None:
            # The pieces are views: their size is known before anything is copied.
            pieces = list(pieces)
            needed = sum(piece.size_bytes for piece in pieces)
            if needed > most:
                self.unstaged_bytes = needed
                # It is written in portions from the trained tensors, so training has to wait.
                asynchronous = False
        if asynchronous:
            held = self.copies.take(pieces)
        else:
            # The thread reads the state itself: the device must have finished the update.
            self.copies.settle()
            held = list(pieces)
        work = threading.Thread(
            target=self._write,
            args=(metadata, held, companions, started, asynchronous, wait),
            # A rank that fails ends at once: a partial checkpoint does no harm.
            daemon=True,
        )
        # None: training waits until the commit, and the thread measures when that is.
        self._stall_s = None if not asynchronous else time.perf_counter() - started
        self._thread = work
        work.start()
        if not asynchronous:
            work.join()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def release(self) -> None:
        """Free the memory of the copies, once nothing is being written."""
        self.wait()
        self.copies.release()

    def finished(self) -> list[Saved]:
        """Saves that ended since the last call, on rank 0."""
        found: list[Saved] = []
        with suppress(Empty):
            while True:
                found.append(self._finished.get_nowait())
        for saved in found:
            # Only failures in a row count: one success shows that the disk works again.
            self._failures = [*self._failures, saved.error] if saved.error else []
        return found

    def require_success(self) -> None:
        """Check that the saves that `finished` has returned did not fail too often.

        Raises:
            SavingFailed: too many in a row failed.
        """
        if len(self._failures) >= MOST_FAILURES:
            raise SavingFailed(
                f"{len(self._failures)} checkpoints in a row could not be saved, the last one "
                f"because: {self._failures[-1]}. Earlier checkpoints are untouched. Make sure that "
                f"{self.store.directory} can be written and has space, then continue with "
                "--resume auto."
            )

    def _write(
        self,
        metadata: Metadata,
        pieces: list[Piece],
        companions: Callable[[Path], list[Path]] | None,
        started: float,
        asynchronous: bool,
        ends: bool,
    ) -> None:
        """Write this rank's files and, on rank 0, commit; runs in the thread."""
        step = metadata.step
        partial = self.store.partial(step)
        error = None
        # Not when the newest one was complete: the loss that its weights give might have been
        # infinite or NaN. Now a step has been computed from it.
        note = self._prune() if self._rank == 0 else None
        files: dict[str, FileEntry] = {}
        try:
            # Here and not in `save`: the device still copies while training continues.
            self.copies.wait()
            partial.mkdir(parents=True, exist_ok=True)
            shard = partial / shard_name(self._rank, len(self._receipts))
            if asynchronous:
                write_shard(shard, pieces)
            else:
                # Never a second copy: the memory of the copies is held until the run ends.
                write_shard_in_portions(shard, pieces, _PORTION_BYTES)
            # Only our own files: other ranks are writing into the same directory.
            written = [shard, *(companions(partial) if companions is not None else [])]
            for path in written:
                # Synced before the commit: a rename may reach the disk before the content of the
                # files.
                sync(path)
                files[path.relative_to(partial).as_posix()] = describe_file(path)
        # A failed save must not end training: it is reported, and the next one may succeed.
        except Exception as failure:
            error = _describe_error(failure)
        if self._rank > 0:
            # A file, not a message: collectives in a thread would need their own process group.
            _leave_receipt(self._receipts[self._rank], step, files, error)
            return
        entries: dict[str, FileEntry] = {}
        try:
            error, entries = self._collect(step, files, error)
            if error is None:
                self.store.commit(dataclasses.replace(metadata, files=entries))
                # No further save of this session will do it. Without a validation, whether the
                # weights give a finite loss shows in the next session, before its first save.
                if ends and metadata.validation_loss is not None:
                    note = self._prune()
        except Exception as failure:
            error = _describe_error(failure)
        ended = time.perf_counter()
        if error is not None:
            with suppress(OSError):  # the next start removes it
                self.store.discard_partial(step)
        # Only rank 0 gets here: it reports for all ranks.
        self._finished.put(
            Saved(
                step=step,
                path=self.store.path(step),
                stall_s=ended - started if self._stall_s is None else self._stall_s,
                write_s=ended - started,
                size_bytes=sum(entry.size_bytes for entry in entries.values()),
                error=error,
                note=note,
            )
        )

    def _prune(self) -> str | None:
        """Delete older checkpoints, and return the problem if that fails."""
        try:
            self.store.prune(**dataclasses.asdict(self._retention))
        except OSError as failure:
            return f"older checkpoints cannot be deleted: {_describe_error(failure)}"
        return None

    def _collect(
        self, step: int, own: Mapping[str, FileEntry], error: str | None
    ) -> tuple[str | None, dict[str, FileEntry]]:
        """Wait for the receipts of all ranks; returns an error, if any, and all their files."""
        entries = dict(own)
        deadline = time.monotonic() + _PATIENCE_S
        # All receipts are taken, also after a rank's error, so that none is left for a later save.
        for rank, directory in enumerate(self._receipts[1:], start=1):
            receipt = _receipt(directory, step)
            while not receipt.exists():
                if time.monotonic() > deadline:
                    return (
                        f"rank {rank} did not write its shard; {self.store.directory} must be on a "
                        "disk that all machines share, or out_dir a url"
                    ), {}
                time.sleep(_POLL_S)
            # A receipt appears by a rename, so one that exists is complete.
            content = _take_receipt(directory, step)
            if content["error"] is not None:
                error = error or f"rank {rank}: {content['error']}"
            entries |= from_json(dict[str, FileEntry], content["files"])
        return error, entries


def _receipt(directory: Path, step: int) -> Path:
    return directory / receipt_name(step)


def _leave_receipt(
    directory: Path, step: int, files: Mapping[str, FileEntry], error: str | None
) -> None:
    entries = {name: dataclasses.asdict(entry) for name, entry in files.items()}
    receipt = _receipt(directory, step)
    try:
        write_json(receipt, {"files": entries, "error": error})
    except OSError:  # the disk is full; an empty file needs no space
        receipt.touch()


def _take_receipt(directory: Path, step: int) -> dict[str, Any]:
    receipt = _receipt(directory, step)
    text = receipt.read_text(encoding="utf-8")
    receipt.unlink()
    # Empty: the rank had no space for its receipt, see `_leave_receipt`.
    content: dict[str, Any] = json.loads(text or '{"files": {}, "error": "the disk is full"}')
    return content


def _describe_error(failure: Exception) -> str:
    if isinstance(failure, OSError) and failure.errno:
        return os.strerror(failure.errno)
    # safetensors wraps errors of the system in one of its own, with their text.
    if found := re.search(r"I/O error: (.+) \(os error", str(failure)):  # of safetensors
        return found[1]
    return f"{type(failure).__name__}: {failure}"
