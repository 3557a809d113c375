"""Conversion of a GGUF file into a Hugging Face directory, which is made once and reused.

transformers reads GGUF too (`gguf_file`, seen in 5.24), but holds the whole dequantised model in
memory, where this module holds some rows of one tensor. It reads no Gemma 1, no biases of Llama, no
head size of Qwen3 and no scaled positions, and ignores tensors that it does not know.

The result is in ``checkpoints/gguf/KEY/NAME``, beside downloads.
"""

import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ftkit.errors import UserError
from ftkit.extensions.gguf.header import GgufHeader, read_header
from ftkit.extensions.gguf.model import (
    ConvertedTensor,
    config_of,
    converted_tensors,
    settings_of,
)
from ftkit.extensions.gguf.tokenizer import tokenizer_files
from ftkit.models.pretrained.single_file import Conversion
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import bytes_text
from ftkit.utils.files import free_disk_bytes, new_directory
from ftkit.utils.progress import OnProgress

DIRECTORY = "gguf"
"""Directory of all conversions, beside the downloads."""

_VERSION = 1
"""Version of the written content; another version has another key."""
_KEY_BYTES = 2**20
# The size of shards that save_pretrained wrote for years.
_MAX_SHARD_BYTES = 5 * 10**9
_SPARE_BYTES = 2**26
"""Room for tokenizer, settings and the file system's own use."""
_LOOK_S = 0.5
"""Seconds between two checks whether another process has finished its conversion."""


def planned_conversion(file: Path, root: Path) -> Conversion:
    """Plan the conversion of a file; see `SingleFile.planned_conversion`."""
    place = conversion_place(file, root)
    if place.is_dir():
        size_bytes = sum(part.stat().st_size for part in place.glob("*.safetensors"))
        return Conversion(place=place, disk_bytes=size_bytes, memory_bytes=0, is_made=True)
    header = read_header(file)
    tensors = converted_tensors(header, settings_of(header))
    return Conversion(
        place=place,
        disk_bytes=_bytes_of(tensors),
        memory_bytes=max(tensor.memory_bytes for tensor in tensors),
        is_made=False,
    )


def conversion_place(file: Path, root: Path) -> Path:
    """Return the directory of a converted model; see `SingleFile.conversion_place`."""
    try:
        status = file.stat()
        with file.open("rb") as stream:
            beginning = stream.read(_KEY_BYTES)
    except OSError as error:
        raise UserError(
            f"checkpoint_dir {file} cannot be read ({error.strerror}). Check the file."
        ) from error
    # Not a digest of the content: 40 GB would take half a minute at every start. A replaced file is
    # converted again, and so is a copy with another modification time.
    facts = (_VERSION, file.stem, status.st_size, status.st_mtime_ns)
    digest = hashlib.sha256(json.dumps(facts).encode() + beginning)
    # The file's own name last, because reports and prompt styles take the model's from it.
    return root / DIRECTORY / digest.hexdigest()[:16] / file.stem


def convert(file: Path, root: Path, licences: Mapping[str, bytes]) -> Path:
    """Convert a file, unless it is converted already; see `SingleFile.convert`.

    Memory holds some rows of one tensor at a time. Quantised weights become float16, others keep
    their format. The directory appears complete or not at all; one of several processes converts,
    and the others wait.
    """
    place = conversion_place(file, root)
    if place.is_dir():
        return place
    header = read_header(file)
    found = settings_of(header)
    tensors = converted_tensors(header, found)
    total_bytes = _bytes_of(tensors)
    # Tokenizer and sizes are checked before anything is written.
    others = tokenizer_files(header)
    vocabulary = len(header.texts("tokenizer.ggml.tokens"))
    # Fewer tokens than rows are usual, because rows are padded.
    if vocabulary > found["vocab_size"]:
        rows = found["vocab_size"]
        raise header.error(f"it has {vocabulary:,} tokens, but {rows:,} embeddings")
    _require_space(file, place, total_bytes)
    with (
        Display(None, stream=sys.stderr) as display,
        display.phase(f"converting {file} into {place} ({bytes_text(total_bytes)})") as phase,
        _made_once(place) as partial,
    ):
        if partial is not None:
            others["config.json"] = (json.dumps(config_of(found), indent=2) + "\n").encode()
            for name, content in {**licences, **others}.items():
                (partial / name).write_bytes(content)
            with file.open("rb") as stream:
                _write_weights(header, stream, tensors, partial, phase.advance)
    return place


def settings(file: Path) -> dict[str, Any]:
    """Build config.json from the header of a file; tokenizer and numbers are not checked."""
    header = read_header(file)
    found = settings_of(header)
    # For its checks: a plan refuses what a conversion would refuse.
    converted_tensors(header, found)
    return config_of(found)


@contextmanager
def _made_once(place: Path) -> Iterator[Path | None]:
    """Yield a directory to fill, or None if another process has made the conversion."""
    whole = place.parent
    # A conversion that fails leaves no empty directories.
    new = [directory for directory in (whole.parent, whole.parent.parent) if not directory.exists()]
    try:
        # Under the lock of `new_directory`, which the kernel drops if the process that has it dies.
        while not place.is_dir():
            try:
                with new_directory(whole) as partial:
                    # The directory named by the key appears at once, with the model's own in it.
                    inside = partial / place.name
                    inside.mkdir()
                    yield inside
                return
            except BlockingIOError:  # another process is converting
                time.sleep(_LOOK_S)
            except FileExistsError:  # another process has done it just now
                if not place.is_dir():
                    raise
        yield None
    except OSError as error:
        raise UserError(
            f"{whole} cannot be written ({error.strerror or error}). Free some space there, or "
            f"make {whole.parent.parent} a link to a larger disk."
        ) from error
    finally:
        for directory in new:
            with suppress(OSError):  # it is not empty: something was converted
                directory.rmdir()


def _require_space(file: Path, place: Path, needed_bytes: int) -> None:
    free_bytes = free_disk_bytes(place)
    if free_bytes < needed_bytes + _SPARE_BYTES:
        raise UserError(
            f"checkpoint_dir {file} needs {bytes_text(needed_bytes + _SPARE_BYTES)} in "
            f"{place.parent.parent} once converted, but the disk has {bytes_text(free_bytes)} "
            f"free. Free some, or make {place.parent.parent.parent} a link to a larger disk."
        )


def _write_weights(
    header: GgufHeader,
    stream: BinaryIO,
    tensors: Sequence[ConvertedTensor],
    directory: Path,
    progress: OnProgress,
) -> None:
    """Write model.safetensors, or its shards with their index."""
    shards = _shards(tensors)
    count, total_bytes, done_bytes = len(shards), _bytes_of(tensors), 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors"
        if count > 1:
            name = f"model-{number:05}-of-{count:05}.safetensors"
        with (directory / name).open("wb") as out:
            # Sizes are known before any number is converted, so the header is written first.
            out.write(_safetensors_header(shard))
            for tensor in shard:
                for chunk in tensor.chunks(header, stream):
                    out.write(chunk)
                    done_bytes += len(chunk)
                    progress(done_bytes, total_bytes)
                weight_map[tensor.name] = name
    if count > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        file = directory / "model.safetensors.index.json"
        file.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Sequence[ConvertedTensor]) -> list[list[ConvertedTensor]]:
    """Split tensors into shards, each with its widest numbers first so that all are aligned."""
    shards: list[list[ConvertedTensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and _bytes_of([*shards[-1], tensor]) > _MAX_SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    # Two widths only: 4 bytes, then 2.
    return [sorted(shard, key=lambda tensor: tensor.dtype != "F32") for shard in shards]


def _safetensors_header(tensors: Sequence[ConvertedTensor]) -> bytes:
    """Header of a file: length, JSON, spaces up to a multiple of 8; hf.co/docs/safetensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.source.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(math.ceil(len(text) / 8) * 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensors: Sequence[ConvertedTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
