"""Safetensors files: saved with their metadata in a fixed order."""

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file with the permissions that other files get.

    The same tensors and metadata give the same bytes.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"} | metadata)
    path.chmod(mode)  # save_file makes it readable by the owner alone
    if metadata:
        _sort_metadata(path)


def _sort_metadata(path: Path) -> None:
    """Put the metadata in an order, which save_file leaves to chance."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) > size:
            raise SafetensorError(f"{path}: its header cannot be written in the space it has")
        file.seek(8)
        file.write(text.ljust(size))
