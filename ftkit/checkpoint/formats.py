"""File formats of a checkpoint: whether a file is what its name says.

Checksums protect against damage, not against somebody who recomputes them. Nothing here is ever
unpickled; what is no JSON, safetensors or text is refused before anything else looks at it.
"""

import json
from pathlib import Path

from ftkit.checkpoint.metadata import FileEntry
from ftkit.utils.remote.objects import StorageError
from ftkit.utils.remote.ranges import DamagedObject, RangedSafetensors, lies_elsewhere

_PICKLES = (*(bytes([0x80, protocol]) for protocol in range(2, 6)), b"PK\x03\x04")
"""How a pickle begins, and the archive that torch.save packs one in."""
_LENGTH_BYTES = 8


def format_problem(path: Path, entry: FileEntry) -> str | None:
    """What is wrong with a file, by its name and format; None: nothing.

    Args:
        path: of the file, here or where it would lie here.
        entry: what the file must be.
    """
    try:
        if lies_elsewhere(path):
            RangedSafetensors(path, entry.blocks)  # only shards do
            is_sound = True
        elif path.suffix == ".safetensors":
            is_sound = _is_safetensors(path)
        elif path.suffix == ".json":
            is_sound = isinstance(json.loads(path.read_bytes()), dict | list)
        else:
            with path.open("rb") as file:
                is_sound = not file.read(4).startswith(_PICKLES)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})."
    except (DamagedObject, StorageError) as error:
        return f"{error}."
    except (ValueError, RecursionError):
        is_sound = False
    if is_sound:
        return None
    kind = path.suffix.removeprefix(".") or "such"
    return f"{path} is no {kind} file: it was not written by ftkit."


def _is_safetensors(path: Path) -> bool:
    """Whether header and size go together; see the description of the format."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES + length:
            return False
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        return False
    ends = [0]
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            ends.append(int(entry["data_offsets"][1]))
        except (TypeError, KeyError, IndexError):
            return False
    return size == _LENGTH_BYTES + length + max(ends)
