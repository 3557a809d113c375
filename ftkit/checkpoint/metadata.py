"""Checkpoint metadata: the names of a checkpoint's files, and ``metadata.json``, which lists them.

metadata.json holds the size and checksum of every other file of the checkpoint, and a checksum of
itself: over its own values as JSON with sorted keys and no spaces. Its keys are the names of the
fields of `Metadata`.
"""

import dataclasses
import hashlib
import json
import math
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from ftkit.utils.files import write_durably
from ftkit.utils.json_values import from_json
from ftkit.utils.url_files import BlockChecksums

# Raised when this version would misread older checkpoints.
FORMAT_VERSION = 1
METADATA = "metadata.json"
"""Written last: a checkpoint without it is not complete."""
RECIPE = "recipe.yaml"
"""Recipe of the run."""
PLUGIN = "plugin.py"
"""Plugin of the run, if it has one."""
ADAPTER = "adapter"
"""Directory of a LoRA run: the adapter, ready for use."""
BASE = "base"
"""Directory of a full fine-tune: the base model's files, except for its weights."""
REFERENCE = "reference.safetensors"
"""Log-probabilities under the reference model, if it is not there in training."""
SeedNames = Literal["model", "implementation"]
"""Whose names of layers seed random numbers: transformers' model's, or those of the body's code."""
_SHARD = "shard-"
_RECEIPT = re.compile(r"saved-([0-9]+)\.json")
_CHECKSUM = "checksum"


def shard_name(rank: int, world_size: int) -> str:
    """File name of a rank's shard."""
    # Padded with zeros, so that the names sort by rank.
    return f"{_SHARD}{rank:05d}-of-{world_size:05d}.safetensors"


def is_shard(name: str) -> bool:
    """Return whether a file holds training state, by its name."""
    return name.startswith(_SHARD)


def receipt_name(step: int) -> str:
    """Name of the file with which a rank tells rank 0 that its part of a checkpoint is written."""
    return f"saved-{step}.json"


def step_of_receipt(name: str) -> int:
    """Step of a receipt, from its name."""
    found = _RECEIPT.fullmatch(name)
    assert found is not None, name
    return int(found[1])


class CheckpointError(Exception):
    """A checkpoint is damaged or cannot be read; the message names the file and the problem."""


class DamagedPart(CheckpointError):
    """A part of a file turned out to be damaged while it was read."""

    def __init__(self, file: Path, message: str) -> None:
        super().__init__(message)
        self.file = file


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and checksums of a file."""

    size_bytes: int
    sha256: str
    """64 hexadecimal digits."""
    # Size and SHA-256 identify a file, so entries with and without block checksums are equal.
    blocks: BlockChecksums | None = field(default=None, compare=False)
    """For reading a part of the file; None: an earlier version wrote it."""


@dataclass(frozen=True, kw_only=True)
class BaseIdentity:
    """The base model, independent of where it is stored."""

    name: str
    """Name in the recipe."""
    fingerprint: str
    """Equal for all copies of the model."""


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """The training data, independent of where they are stored."""

    fingerprint: str
    """Equal for all copies of the data."""
    train_samples: int
    """Samples of an epoch; 0: nobody knows."""


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
    precision: str
    micro_batch_size: int
    """Most sequences per forward pass on one rank."""
    accelerator: str
    """Kind of device, by torch's name: cpu, cuda, ..."""
    micro_batch_tokens: int | None = None
    """Most tokens per forward pass on one rank; None: not limited."""


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Everything about a checkpoint except for its tensors."""

    format_version: int = FORMAT_VERSION
    """Version of these definitions."""
    method: str
    """full or lora."""
    step: int
    """Optimizer steps done."""
    samples: int
    """Data position: samples consumed since the run began."""
    tokens: int
    """Tokens trained on over all sessions, without padding."""
    epochs: float
    """Passes over the training data."""
    training_s: float
    """Seconds of training over all sessions."""
    total_steps: int
    """Steps of the whole run, as planned."""
    learning_rate: float
    """Learning rate of the next step."""
    schedule: dict[str, float]
    """total_steps, warmup_steps, final_share, decay_steps."""
    lr_schedule: str = "cosine"
    """Kind of schedule, as in train.lr_schedule."""
    loss: float | None
    """Loss of the newest step; None: it was not finite."""
    validation_loss: float | None
    """Measured at exactly this step; None: there was no validation at it."""
    max_seq_length: int
    """Tokens that sequences are cut to."""
    optimizer: str
    """Class path."""
    optimizer_scalars: dict[str, float]
    """Optimizer state that is not per parameter, such as step and loss_scale."""
    rng: dict[str, Any]
    """The seed, and the rule by which every step derives its own."""
    seed_names: SeedNames = "implementation"
    """Names by which the masks of dropout are seeded; earlier versions did not write it."""
    base: BaseIdentity
    """The model that is fine-tuned."""
    data: DataIdentity
    """The training data."""
    stream: list[dict[str, int]] | None = None
    """Where data without a known length go on, of each source; None: samples says it alone."""
    beside: BaseIdentity | None = None
    """The frozen model that is held beside the trained one: a teacher, or a reference; None: there
    is none."""
    layout: Layout
    """The hardware that the checkpoint was written on."""
    versions: dict[str, str]
    """Versions of Python and of the packages that matter for results."""
    saved_at: str
    """ISO 8601, UTC."""
    changes: list[str] = field(default_factory=list)
    """Changes of the recipe on resume, one line each."""
    loggers: dict[str, str] = field(default_factory=dict)
    """The id by which each logger continues its run."""
    carried: dict[str, Any] = field(default_factory=dict)
    """Sections of the report that cover all sessions."""
    files: dict[str, FileEntry] = field(default_factory=dict)
    """The other files of the checkpoint, by path relative to its directory."""


def write_metadata(metadata: Metadata, directory: Path) -> None:
    """Write ``directory/metadata.json`` and wait until it is on the disk.

    A loss or a carried value that is not finite becomes null: JSON cannot hold it.

    Raises:
        OSError: it cannot be written.
        ValueError: another number is not finite, or a file lies outside the directory.
    """
    # Refused while writing, because a reader would refuse the whole checkpoint.
    for name in metadata.files:
        _check_path(name)
    values = dataclasses.asdict(metadata)
    for key in ("loss", "validation_loss", "carried"):
        values[key] = _finite(values[key])
    # Of the values, not of the bytes: the file may be formatted for people.
    values[_CHECKSUM] = _checksum_of(values)
    text = json.dumps(values, indent=2, allow_nan=False) + "\n"
    write_durably(directory / METADATA, text)


def read_metadata(directory: Path) -> Metadata:
    """Read and check ``directory/metadata.json``; unknown keys are ignored.

    Raises:
        CheckpointError: it is missing, damaged, or has another format version.
    """
    file = directory / METADATA
    try:
        # A link could lead out of the checkpoint, and opening a pipe would block.
        if not stat.S_ISREG(file.lstat().st_mode):
            raise CheckpointError(f"{file} is not a regular file.")
        values = json.loads(
            file.read_text(encoding="utf-8"),
            # Python's json would take the last of two equal keys, and NaN, which is not JSON.
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
    # Not isinstance: True is an int in Python.
    if type(version) is not int:
        raise CheckpointError(f"{file} is damaged: it has no format_version.")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{file} has format_version {version}, but this ftkit reads version {FORMAT_VERSION}. "
            "Read it with the ftkit that wrote it (see its versions.ftkit)."
        )
    # The version is checked before the checksum: another version may compute it in another way.
    if values.pop(_CHECKSUM, None) != _checksum_of(values):
        raise CheckpointError(f"{file} is damaged: its content does not match its checksum.")
    if "teacher" in values:
        # Its name before a reference could be held beside the trained model too.
        values["beside"] = values.pop("teacher")
    try:
        metadata = from_json(Metadata, values)
        for name, entry in metadata.files.items():
            _check_path(name)
            _check_entry(name, entry)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{file} is not the metadata of a checkpoint: {error}") from None
    assert isinstance(metadata, Metadata)
    return metadata


def _checksum_of(values: dict[str, Any]) -> str:
    # One canonical text, whatever the order of keys and the white space of the file.
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
    # One file has one name: "a/./b" would be a second name of "a/b".
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or "\0" in name:
        raise ValueError(f"the file {name!r} lies outside the checkpoint's directory.")
    if name in (".", METADATA):
        raise ValueError(f"{name!r} cannot be one of its files.")


def _check_entry(name: str, entry: FileEntry) -> None:
    if entry.size_bytes < 0 or not re.fullmatch("[0-9a-f]{64}", entry.sha256):
        raise ValueError(f"{name!r} has an invalid size or checksum.")
    if entry.blocks is not None and (problem := entry.blocks.problem(entry.size_bytes)):
        raise ValueError(f"{name!r}: {problem}.")
