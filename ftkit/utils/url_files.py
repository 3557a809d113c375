"""Files at urls, as those who read them see them, whatever kind of url it is.

A file at a url is named by the path that stands for it (`ftkit.utils.urls`). Each kind of url names
a module that has the functions of `UrlFiles`.
"""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from ftkit.errors import UserError
from ftkit.utils.urls import URL_KINDS, url_of

BLOCK_BYTES = 8 * 2**20
"""Size of a block, which is fetched and verified as a whole."""
# Hexadecimal digits of an XXH3-64.
_DIGITS = 16


class StorageError(Exception):
    """A request to the storage of a url failed; says which, and why."""


@dataclass(frozen=True, kw_only=True)
class BlockChecksums:
    """Checksums of the blocks of a file, so that a part can be verified without the rest.

    XXH3 with 64 bits finds damage, such as swapped or lost parts and flipped bits, in a twentieth
    of the time of the SHA-256 of the whole file, which is stored as well.
    """

    block_bytes: int
    """Length of every block except the last."""
    xxh3_64: str
    """16 hexadecimal digits for each block, concatenated."""

    def problem(self, size_bytes: int) -> str | None:
        """Return why these are not checksums of a file of this length; None: they may be."""
        digits = len(self.xxh3_64)
        if self.block_bytes <= 0 or not set(self.xxh3_64) <= set("0123456789abcdef"):
            return "the checksums of its blocks cannot be read"
        if digits != _DIGITS * -(-size_bytes // self.block_bytes):
            return f"it has {digits} digits of checksums for its {size_bytes:,} bytes"
        return None

    def matches(self, number: int, content: bytes | memoryview) -> bool:
        """Return whether a block has its checksum.

        Args:
            number: of the block, from 0 on.
            content: all of the block.
        """
        import xxhash  # slow to import, and most commands read no checkpoint

        return self.xxh3_64[number * _DIGITS :][:_DIGITS] == xxhash.xxh3_64_hexdigest(content)


class DamagedObject(Exception):
    """A file at a url differs from its checkpoint's metadata; names the url and the part."""


class UrlTensors(Protocol):
    """A safetensors file at a url, of which the ranges that are needed are read."""

    metadata: dict[str, str]
    entries: dict[str, dict[str, Any]]
    """`dtype`, `shape` and `data_offsets` of each tensor, as the file has them."""

    def read(self, key: str, start: int, stop: int) -> bytearray:
        """Read the bytes [start, stop) of a tensor.

        Raises:
            StorageError: they cannot be read.
            DamagedObject: a block that they touch has another checksum.
        """


class StoredObject(Protocol):
    """An object, as its storage describes it."""

    @property
    def size_bytes(self) -> int:
        """Length of the object."""

    @property
    def version(self) -> str:
        """Changes whenever the content does."""


class UrlObjects(Protocol):
    """The objects below a url, by names relative to it, which are read in parts.

    Every method raises StorageError if it still fails after some retries.
    """

    def listing(self) -> Mapping[str, StoredObject]:
        """List all objects, by name."""

    def entry(self, name: str) -> StoredObject | None:
        """Look up an object; None: it does not exist."""

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Read the bytes [start, stop) of an object, which has as many."""

    def download(self, name: str, path: Path) -> None:
        """Download an object; the file is either complete or unchanged."""


class UrlFiles(Protocol):
    """What a kind of url does with files."""

    def objects(self, directory: Path) -> UrlObjects:
        """The objects below the url that a directory stands for; no request is sent yet.

        Raises:
            UserError: the library or the account for such urls is missing.
        """

    def size_bytes(self, path: Path) -> int | None:
        """Length of a file; None: it does not exist.

        Raises:
            StorageError: the storage does not answer.
        """

    def blocks(self, path: Path, size_bytes: int) -> Iterator[bytes]:
        """Read a file, block by block.

        Raises:
            StorageError: it cannot be read.
        """

    def tensors(self, path: Path, checksums: BlockChecksums | None) -> UrlTensors:
        """Read the header of a safetensors file.

        Args:
            path: where the file would lie on this machine.
            checksums: of its blocks; None: there are none, and nothing is verified.

        Raises:
            StorageError: it cannot be read.
            DamagedObject: its length or a block differs from what was written.
            ValueError: it is not a safetensors file.
        """

    def fetch_whole(self, directory: Path) -> None:
        """Download all of a directory, such as a model.

        Raises:
            UserError: it cannot be read.
        """

    def fetch_missing(self, directory: Path, names: Iterable[str]) -> None:
        """Download the files that a directory lacks.

        Raises:
            UserError: they cannot be read.
        """


def url_files(path: Path) -> UrlFiles:
    """What reads the files at the url that a path stands for."""
    return cast(UrlFiles, module_of(path))


def module_of(path: Path) -> Any:
    """The module of the kind of url that a path stands for."""
    url = url_of(path)
    kind = None if url is None else URL_KINDS.get(url.partition(":")[0])
    assert kind is not None, path
    return importlib.import_module(kind.module)


def lies_elsewhere(path: Path) -> bool:
    """Return whether a file of a checkpoint is only at its url and not on this machine."""
    return not path.exists() and url_of(path) is not None


def unreachable(error: StorageError) -> UserError:
    """Turn a failed request into an error for the user, before anything has started."""
    text = str(error)
    which = next((f": {kind.credentials}" for kind in URL_KINDS if f"{kind.name}://" in text), "")
    return UserError(
        f"{text}. Check the url, the network and the credentials in the environment{which}."
    )
