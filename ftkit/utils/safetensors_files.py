"""Safetensors files: written with their metadata in a fixed order."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

_DTYPE_NAMES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
"""Names in headers, in the order by which the library sorts dtypes."""
_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPE_NAMES)}


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file with the permissions that other files get.

    The same tensors and metadata give the same bytes.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    # A new file shows the permissions that the umask grants.
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"} | metadata)
    path.chmod(mode)  # save_file makes it readable only for its owner
    if metadata:
        _sort_metadata(path)


def save_in_portions(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str], portion_bytes: int
) -> None:
    """Write the same file as `save_tensors`, with only a portion of it in host memory at a time.

    Args:
        tensors: contiguous, on any device.
        path: of the file.
        metadata: at least one entry.
        portion_bytes: most bytes that are copied to the host at a time.

    Raises:
        OSError: it cannot be written.
    """
    # The order of the library: wide numbers first, so that each tensor begins at a multiple of
    # its width, and by name; seen in safetensors 0.8.
    names = sorted(tensors, key=lambda name: (-_RANKS[tensors[name].dtype], name))
    header: dict[str, object] = {
        "__metadata__": dict(sorted(({"format": "pt"} | metadata).items()))
    }
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # Padded to a multiple of 8 bytes, as the library does, so that tensors begin at one.
    text = text.ljust(-(-len(text) // 8) * 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            flat = tensors[name].reshape(-1)
            numbers = max(1, portion_bytes // flat.itemsize)
            for start in range(0, flat.numel(), numbers):
                part = flat[start : start + numbers].cpu().contiguous()
                # As bytes, because numpy has no bfloat16.
                file.write(part.view(torch.uint8).numpy().data)


def _sort_metadata(path: Path) -> None:
    """Sort the metadata, whose order save_file leaves to chance."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) > size:
            raise SafetensorError(f"{path}: its header cannot be written in the space it has")
        # In place: sorting keeps the length, and spaces may follow the JSON.
        file.seek(8)
        file.write(text.ljust(size))
