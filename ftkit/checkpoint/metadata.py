"""Checkpoint metadata: what a checkpoint says about itself, as ``metadata.json``.

The file holds the size and checksum of every other file of the checkpoint, and a checksum of
itself: over its own values as JSON with sorted keys and no spaces. The keys of the file are the
names of the fields below.
"""

import dataclasses
import hashlib
import json
import math
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ftkit.checkpoint.files import METADATA
from ftkit.utils.files import write_durably
from ftkit.utils.json_values import from_json
from ftkit.utils.remote.block_checksums import BlockChecksums

FORMAT_VERSION = 1
_CHECKSUM = "checksum"


class CheckpointError(Exception):
    """A checkpoint that is damaged or cannot be read; names the file and what is wrong."""


class DamagedPart(CheckpointError):
    """A part of a file is not what it was, as it turned out when it was read."""

    def __init__(self, file: Path, message: str) -> None:
        super().__init__(message)
        self.file = file


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What a file must be."""

    size_bytes: int
    """Its length."""
    sha256: str
    """64 hexadecimal digits."""
    blocks: BlockChecksums | None = field(default=None, compare=False)
    """For whoever reads a part; None: an earlier version wrote the file. The two above say all
    that it must be, so that entries with and without these are equal."""


@dataclass(frozen=True, kw_only=True)
class BaseIdentity:
    """The base model, however it is named and wherever it lies."""

    name: str
    """As the recipe names it."""
    fingerprint: str
    """The same for every copy of the model."""


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """The training data, wherever they lie."""

    fingerprint: str
    """The same for every copy of the data."""
    train_samples: int
    """Samples of an epoch."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The hardware that the checkpoint was written on; any other may continue from it."""

    strategy: str
    """single, ddp, fsdp or deepspeed."""
    world_size: int
    """Ranks over all nodes."""
    devices: int
    """Devices per node."""
    num_nodes: int
    """Machines."""
    precision: str
    """Number format of training."""
    micro_batch_size: int
    """Sequences per forward pass on one rank."""
    accelerator: str
    """Kind of device, as torch calls it: cpu, cuda, ..."""


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Everything about a checkpoint but its tensors."""

    format_version: int = FORMAT_VERSION
    """Version of these definitions."""
    method: str
    """full or lora."""
    step: int
    """Optimizer steps done."""
    samples: int
    """Data position: samples consumed since the run began."""
    tokens: int
    """Real tokens trained on, in all sessions."""
    epochs: float
    """Passes over the training data."""
    training_s: float
    """Seconds of training, in all sessions."""
    total_steps: int
    """Steps of the run as it was planned."""
    learning_rate: float
    """Of the next step."""
    schedule: dict[str, float]
    """total_steps, warmup_steps, final_share, decay_steps."""
    lr_schedule: str = "cosine"
    """Which curve these are of, as train.lr_schedule."""
    loss: float | None
    """Of the newest step; None: it was no finite number."""
    validation_loss: float | None
    """Measured at this very step; None: there was no validation here."""
    max_seq_length: int
    """Tokens that sequences are cut to."""
    optimizer: str
    """Class path."""
    optimizer_scalars: dict[str, float]
    """State of the optimizer that belongs to no parameter, such as step and loss_scale."""
    rng: dict[str, Any]
    """The seed, and the rule by which every step derives its own."""
    base: BaseIdentity
    """The model that was adapted."""
    data: DataIdentity
    """What it was trained on."""
    layout: Layout
    """The hardware at the time."""
    versions: dict[str, str]
    """Versions of Python and of the packages that count."""
    saved_at: str
    """ISO 8601, UTC."""
    changes: list[str] = field(default_factory=list)
    """Tunable fields of the recipe that were changed on the way, one line each."""
    loggers: dict[str, str] = field(default_factory=dict)
    """What a logger needs to go on, such as the id of a W&B run."""
    carried: dict[str, Any] = field(default_factory=dict)
    """Sections of the report that cover all sessions."""
    files: dict[str, FileEntry] = field(default_factory=dict)
    """The other files of the checkpoint, by path relative to its directory."""


def write_metadata(metadata: Metadata, directory: Path) -> None:
    """Write ``directory/metadata.json`` and wait until it is on the disk.

    A loss or a carried value that is not finite becomes null, since JSON has no word for it.

    Raises:
        OSError: it cannot be written.
        ValueError: another number is not finite, or a file lies outside the directory.
    """
    for name in metadata.files:
        _check_path(name)
    values = dataclasses.asdict(metadata)
    for key in ("loss", "validation_loss", "carried"):
        values[key] = _finite(values[key])
    values[_CHECKSUM] = _checksum_of(values)
    text = json.dumps(values, indent=2, allow_nan=False) + "\n"
    write_durably(directory / METADATA, text)


def read_metadata(directory: Path) -> Metadata:
    """What the checkpoint in a directory says about itself; unknown keys are passed over.

    Raises:
        CheckpointError: it says nothing, is damaged, or follows other definitions.
    """
    file = directory / METADATA
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            raise CheckpointError(f"{file} is not a regular file.")
        values = json.loads(
            file.read_text(encoding="utf-8"),
            object_pairs_hook=_without_repetition,
            parse_constant=_refuse_constant,
        )
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: it is not valid JSON ({error}).") from None
    version = values.get("format_version") if isinstance(values, dict) else None
    if type(version) is not int:
        raise CheckpointError(f"{file} is damaged: it has no format_version.")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{file} has format_version {version}, but this ftkit reads version {FORMAT_VERSION}. "
            "Read it with the ftkit that wrote it (see its versions.ftkit)."
        )
    if values.pop(_CHECKSUM, None) != _checksum_of(values):
        raise CheckpointError(f"{file} is damaged: its content does not match its checksum.")
    try:
        metadata = from_json(Metadata, values)
        for name, entry in metadata.files.items():
            _check_path(name)
            _check_entry(name, entry)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{file} is not that of a checkpoint: {error}") from None
    assert isinstance(metadata, Metadata)
    return metadata


def _checksum_of(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [key for key, _ in pairs]
        repeated = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"the key {repeated!r} appears twice")
    return values


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not a number of JSON")


def _check_path(name: str) -> None:
    """A path that leads nowhere but into the directory, and has one spelling."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or "\0" in name:
        raise ValueError(f"the file {name!r} lies outside the checkpoint's directory.")
    if name in (".", METADATA):
        raise ValueError(f"{name!r} cannot be one of its files.")


def _check_entry(name: str, entry: FileEntry) -> None:
    if entry.size_bytes < 0 or not re.fullmatch("[0-9a-f]{64}", entry.sha256):
        raise ValueError(f"the size or checksum of {name!r} is none.")
    if entry.blocks is not None and (problem := entry.blocks.problem(entry.size_bytes)):
        raise ValueError(f"{name!r}: {problem}.")
