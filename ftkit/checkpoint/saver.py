"""The asynchronous saver: a host copy of the state now, the files of the checkpoint in a thread.

Every rank writes its own shard. Rank 0 writes what the ranks have in common, waits for the shards,
and commits; that is the only moment at which a checkpoint comes into being.
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
from typing import Any

from ftkit.checkpoint.checksums import describe_file
from ftkit.checkpoint.files import receipt_name, shard_name
from ftkit.checkpoint.host_copies import HostCopies, copied_to_host
from ftkit.checkpoint.metadata import FileEntry, Metadata
from ftkit.checkpoint.shards import Piece, write_shard, write_shard_in_portions
from ftkit.checkpoint.store import KeepEvery, Store
from ftkit.utils.files import sync, write_json
from ftkit.utils.json_values import from_json

_PATIENCE_S = 600.0
"""How long rank 0 waits for the shards of the others once its own files are written."""
_POLL_S = 0.02
MOST_FAILURES = 3
"""Saving may fail this often in a row before training stops."""


class SavingFailed(Exception):
    """Checkpoints cannot be written, time and again."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that was written, or could not be."""

    step: int
    """Optimizer steps done."""
    path: Path
    """Its directory."""
    stall_s: float
    """How long training stood still."""
    write_s: float
    """How long it took from then on until it was committed."""
    size_bytes: int
    """Of all files."""
    error: str | None
    """Why there is none."""
    note: str | None
    """What went wrong afterwards."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints are kept."""

    keep_last: int
    keep_every: KeepEvery
    keep_best: int


class Saver:
    """Writes the checkpoints of one rank, at most one at a time.

    Args:
        store: where they go; every rank sees the same directory.
        receipts: for each rank a directory in which it says that its shard is written.
        rank: this rank.
        retention: which ones rank 0 keeps.
        asynchronous: write in a thread, from a copy; else training waits.
        max_staged_bytes: how large that copy may be; None: as large as need be.
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
        """What the copy would take, once it was too large to be made."""
        self._thread: threading.Thread | None = None
        self._finished: list[Saved] = []
        self._failures: list[str] = []
        self.copies = HostCopies()

    @property
    def busy(self) -> bool:
        """Whether files are being written."""
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
        """Save; returns as soon as training may go on.

        Args:
            metadata: without files.
            pieces: of this rank; their memory may change once this returns and, on a device,
                once the `before_update` of `copies` has.
            companions: on rank 0 writes the other files into the directory it is given, and
                returns them.
            wait: until it is committed.
            started: when training came to a stand for this, by `time.perf_counter`.
        """
        self.wait()
        asynchronous = self._asynchronous and not wait
        most = self._max_staged_bytes
        if most is not None:
            pieces = list(pieces)
            needed = sum(piece.size_bytes for piece in pieces)
            if needed > most:
                self.unstaged_bytes = needed
                asynchronous = False
        if asynchronous:
            held = self.copies.take(pieces)
        elif most is not None:
            self.copies.settle()
            held = list(pieces)
        else:
            held = [copied_to_host(piece) for piece in pieces]
        work = threading.Thread(
            target=self._write,
            args=(metadata, held, companions, started, asynchronous),
            daemon=True,
        )
        self._stall_s = None if not asynchronous else time.perf_counter() - started
        self._thread = work
        work.start()
        if not asynchronous:
            work.join()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def release(self) -> None:
        """Give back the memory of the copies, once nothing is being written."""
        self.wait()
        self.copies.release()

    def finished(self) -> list[Saved]:
        """What came to an end since the last call, on rank 0."""
        found, self._finished = self._finished, []
        for saved in found:
            self._failures = [*self._failures, saved.error] if saved.error else []
        return found

    def require_success(self) -> None:
        """Give up if saving failed too often in a row, as far as `finished` has told.

        Raises:
            SavingFailed: it did.
        """
        if len(self._failures) >= MOST_FAILURES:
            raise SavingFailed(
                f"{len(self._failures)} checkpoints in a row could not be saved, the last one "
                f"because: {self._failures[-1]}. The ones before are untouched. Make sure that "
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
    ) -> None:
        """In the thread: this rank's files, and on rank 0 the commit."""
        step = metadata.step
        partial = self.store.partial(step)
        error = None
        files: dict[str, FileEntry] = {}
        try:
            self.copies.wait()
            partial.mkdir(parents=True, exist_ok=True)
            shard = partial / shard_name(self._rank, len(self._receipts))
            if asynchronous or self._max_staged_bytes is None:
                write_shard(shard, pieces)
            else:
                write_shard_in_portions(shard, pieces, self._max_staged_bytes)
            # Not what else is there: other ranks are at work in the same directory.
            written = [shard, *(companions(partial) if companions is not None else [])]
            for path in written:
                sync(path)
                files[path.relative_to(partial).as_posix()] = describe_file(path)
        except Exception as failure:
            error = _describe_error(failure)
        if self._rank > 0:
            _leave_receipt(self._receipts[self._rank], step, files, error)
            return
        entries: dict[str, FileEntry] = {}
        note = None
        try:
            error, entries = self._collect(step, files, error)
            if error is None:
                self.store.commit(dataclasses.replace(metadata, files=entries))
                note = self._prune()
        except Exception as failure:
            error = _describe_error(failure)
        ended = time.perf_counter()
        if error is not None:
            with suppress(OSError):  # the next start removes it
                self.store.discard_partial(step)
        self._finished.append(
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
        """Delete what need not be kept; why not, if that fails."""
        try:
            self.store.prune(**dataclasses.asdict(self._retention))
        except OSError as failure:
            return f"older checkpoints cannot be deleted: {_describe_error(failure)}"
        return None

    def _collect(
        self, step: int, own: Mapping[str, FileEntry], error: str | None
    ) -> tuple[str | None, dict[str, FileEntry]]:
        """The files of all ranks, once every rank has said that it is done."""
        entries = dict(own)
        deadline = time.monotonic() + _PATIENCE_S
        for rank, directory in enumerate(self._receipts[1:], start=1):
            receipt = _receipt(directory, step)
            while not receipt.exists():
                if time.monotonic() > deadline:
                    return (
                        f"rank {rank} has not written its shard; {self.store.directory} must be "
                        "on a disk that all machines share, or out_dir a url"
                    ), {}
                time.sleep(_POLL_S)
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
    except OSError:  # an empty file needs no space
        receipt.touch()


def _take_receipt(directory: Path, step: int) -> dict[str, Any]:
    receipt = _receipt(directory, step)
    text = receipt.read_text(encoding="utf-8")
    receipt.unlink()
    content: dict[str, Any] = json.loads(text or '{"files": {}, "error": "the disk is full"}')
    return content


def _describe_error(failure: Exception) -> str:
    if isinstance(failure, OSError) and failure.errno:
        return os.strerror(failure.errno)
    if found := re.search(r"I/O error: (.+) \(os error", str(failure)):  # of safetensors
        return found[1]
    return f"{type(failure).__name__}: {failure}"
