"""What ftkit asks of a kind of url, in one place: the functions that its row names."""

from pathlib import Path

from ftkit.extensions.object_storage.download import (
    UrlCopies,
    UrlCopy,
    fetch_result,
    fetch_run,
    fetch_without_shards,
    refresh,
)
from ftkit.extensions.object_storage.mirror import CheckpointUploads
from ftkit.extensions.object_storage.objects import Objects
from ftkit.extensions.object_storage.providers import require_provider
from ftkit.extensions.object_storage.ranges import (
    RangedSafetensors,
    blocks,
    size_bytes,
)
from ftkit.extensions.object_storage.replica import fetch_missing, fetch_whole
from ftkit.extensions.object_storage.session import mirrored, require_unclaimed, url_checkpoints
from ftkit.runs.directory import RunDirectory
from ftkit.utils.url_files import BlockChecksums

__all__ = [
    "blocks",
    "fetch_missing",
    "fetch_result",
    "fetch_run",
    "fetch_whole",
    "fetch_without_shards",
    "mirrored",
    "objects",
    "refresh",
    "require_provider",
    "require_unclaimed",
    "run_copies",
    "run_copy",
    "size_bytes",
    "tensors",
    "uploads",
    "url_checkpoints",
]


def objects(directory: Path) -> Objects:
    """The objects below the url that a directory stands for."""
    return Objects.of(directory)


def tensors(path: Path, checksums: BlockChecksums | None) -> RangedSafetensors:
    """Read the header of a safetensors file."""
    return RangedSafetensors(path, checksums)


def uploads(run: RunDirectory) -> CheckpointUploads:
    """Uploads of the checkpoints of a run."""
    return CheckpointUploads(run, Objects.of(run.path))


def run_copy(path: Path, place: Path) -> UrlCopy:
    """A copy of a run, of which nothing is downloaded yet."""
    return UrlCopy(path, place)


def run_copies(path: Path, place: Path) -> UrlCopies:
    """Copies of the runs below a path; nothing is downloaded yet."""
    return UrlCopies(path, place)
