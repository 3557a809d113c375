"""Tokenised pieces on disk: what was read once is not tokenised again, up to a bound of bytes.

A piece is a file with a checksum, and what is damaged is made again. Beside them stands a digest of
the documents of every piece that was ever read: it shows whether a file has changed since.
"""

import contextlib
import hashlib
import mmap
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from filelock import FileLock

_DIGESTS = "digests"
_DIGEST_BYTES = 8
_CHECKSUM_BYTES = 32
_LOCKS = 16
_FOLDERS_OF = 1000
"""Pieces of a folder."""
_BETWEEN_LOOKS_BYTES = 2**26
"""What is written between two looks at how large everything is."""


class Tokens(NamedTuple):
    """The documents of a piece, one behind the other."""

    ids: npt.NDArray[np.int32]
    """[tokens of all documents]."""
    ends: npt.NDArray[np.int64]
    """[documents], where each ends."""


class TokenCache:
    """Tokenised pieces of a corpus by number; where nothing can be written, nothing is kept."""

    def __init__(self, root: Path, address: str, pieces: int, most_bytes: int) -> None:
        """Open a cache.

        Args:
            root: directory of those of all corpora, whose sizes count together.
            address: of what decides the tokens.
            pieces: of the corpus.
            most_bytes: of all files; 0: none are kept.
        """
        self.directory = root / address
        """Of what is kept of this corpus."""
        self._root = root
        self._most_bytes, self._pieces = most_bytes, pieces
        self._written_bytes = _BETWEEN_LOOKS_BYTES  # the first look comes with the first piece
        self._digests: npt.NDArray[np.uint64] | defaultdict[int, int] = defaultdict(int)
        with contextlib.suppress(OSError):
            self._digests = self._opened_digests()

    def find(self, number: int) -> Tokens | None:
        """A piece that is kept; None: there is none, or it is damaged."""
        if not self._most_bytes:
            return None
        file = self._file(number)
        try:
            content = file.read_bytes()
            os.utime(file)  # the oldest are removed first
        except OSError:
            return None
        checksum, rest = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
        if hashlib.blake2b(rest, digest_size=_CHECKSUM_BYTES).digest() != checksum:
            return None
        documents = int.from_bytes(rest[:8], "little")
        ends = np.frombuffer(rest, dtype="<i8", count=documents, offset=8)
        return Tokens(np.frombuffer(rest, dtype="<i4", offset=8 + 8 * documents), ends)

    def keep(self, number: int, tokens: Tokens) -> None:
        """Keep a piece, and remove the oldest ones where all become too large."""
        if not self._most_bytes:
            return
        rest = len(tokens.ends).to_bytes(8, "little")
        rest += tokens.ends.astype("<i8").tobytes() + tokens.ids.astype("<i4").tobytes()
        checksum = hashlib.blake2b(rest, digest_size=_CHECKSUM_BYTES).digest()
        file = self._file(number)
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(checksum + rest)
            partial.replace(file)
            self._written_bytes += len(rest)
        if self._written_bytes >= _BETWEEN_LOOKS_BYTES:
            self._written_bytes = 0
            self._shrink()

    def is_as_known(self, number: int, digest: int) -> bool:
        """Note the digest of a piece; returns whether it had this one whenever it was read."""
        known = int(self._digests[number])
        if not known:
            self._digests[number] = digest
        return known in (0, digest)

    @contextlib.contextmanager
    def turn(self, window: int) -> Iterator[None]:
        """Hold a lock: one process tokenises a window while others wait for its pieces."""
        with contextlib.ExitStack() as stack:
            # NotImplementedError: filelock 3.16 raises it on file systems without flock.
            with contextlib.suppress(OSError, NotImplementedError):
                if self._most_bytes:
                    self.directory.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(FileLock(self.directory / f"{window % _LOCKS}.lock"))
            yield

    def _file(self, number: int) -> Path:
        return self.directory / f"{number // _FOLDERS_OF}" / f"{number}.tokens"

    def _opened_digests(self) -> npt.NDArray[np.uint64]:
        """[pieces], digests in a file that all processes share; 0: of a piece nobody has read."""
        self.directory.mkdir(parents=True, exist_ok=True)
        size = self._pieces * _DIGEST_BYTES
        descriptor = os.open(self.directory / _DIGESTS, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, size)  # a hole, which takes no space until it is written
            return np.frombuffer(mmap.mmap(descriptor, size), dtype="<u8")
        finally:
            os.close(descriptor)

    def _shrink(self) -> None:
        """Remove the pieces that were not used for longest, of any corpus."""
        found = []
        for file in self._root.rglob("*.tokens"):
            with contextlib.suppress(OSError):
                stat = file.stat()
                found.append((stat.st_mtime, stat.st_size, file))
        total = sum(size for _, size, _ in found)
        if total <= self._most_bytes:
            return
        for _, size, file in sorted(found):
            with contextlib.suppress(OSError):
                file.unlink()
                total -= size
            if total <= 0.9 * self._most_bytes:
                break
