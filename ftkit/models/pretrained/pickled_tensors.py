"""Files of torch.save that hold tensors alone, read without running what they name.

PyTorch's restricted loader runs no foreign code, but it builds whatever a pickle describes: a
`bytearray` of any length, and tensors of compressed records, of which it maps the compressed bytes.
So a pickle is only loaded if it holds tensors as torch.save stores them.
"""

import pickletools
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ftkit.errors import UserError
from ftkit.utils.damaged_files import reading

# Names that pickles of tensors need, as pickletools shows them: module, space, name.
_MAPS = frozenset(("collections OrderedDict", "torch.nn.parameter Parameter", "torch Size"))
_REBUILDERS = frozenset(
    f"torch._utils _rebuild_{kind}"
    for kind in ("tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state")
)
_STORAGES = ("torch ", "torch.storage ")
"""Modules in which a pickle may name number formats, and classes whose names end with Storage."""
_OLD_FORMAT_PICKLES = 4
"""Pickles of a file before PyTorch 1.6: magic number, version, facts of the machine, content."""


def load_pickled(file: Path) -> Any:
    """Load a file of torch.save: mapped into memory, or read if older than PyTorch 1.6.

    Raises:
        UserError: the file is damaged, holds more than tensors, or is packed.
    """
    with reading(file, "weights that torch.save has written", advice="Download it again."):
        is_zip = zipfile.is_zipfile(file)
        records = _records(file) if is_zip else None
        if not is_zip:
            # Before torch opens it: the restricted loader would build whatever the pickle
            # describes.
            with file.open("rb") as stream:
                _require_tensors_alone(file, stream, _OLD_FORMAT_PICKLES)
        # Mapped, so that nothing is read before it is needed; the old format cannot be mapped.
        content = torch.load(file, map_location="cpu", mmap=is_zip, weights_only=True)
        # torch maps a tensor at its record without comparing lengths.
        if records is not None and (missing := _storages(content) - records):
            raise ValueError(f"no record has the {min(missing):,} bytes of one of its tensors")
    return content


def _records(file: Path) -> Counter[int]:
    """Count the records of a zip file by size; refuse compressed ones."""
    with zipfile.ZipFile(file) as archive:
        sizes = record_sizes(archive, file.stat().st_size)
        # Exactly one, or this raises: torch might load another one than is checked.
        (content,) = (m for m in archive.infolist() if m.filename.endswith("/data.pkl"))
        with archive.open(content) as stream:
            _require_tensors_alone(file, stream, 1)
    return sizes


def record_sizes(archive: zipfile.ZipFile, size_bytes: int) -> Counter[int]:
    """Count the tensor records of a zip file from torch.save, by size.

    Args:
        archive: the file.
        size_bytes: of the whole file.

    Raises:
        ValueError: a record is packed, which torch.save never does and torch maps as it is, or the
            records are longer than the file.
    """
    members = archive.infolist()
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ValueError(f"it is packed: torch.save stores {member.filename} as it is")
    # Records that overlap may claim many times the size of the file.
    if (total := sum(member.file_size for member in members)) > size_bytes:
        raise ValueError(f"its records have {total:,} bytes, but the file has {size_bytes:,}")
    return Counter(m.file_size for m in members if "/data/" in m.filename and m.file_size)


def _require_tensors_alone(file: Path, stream: IO[bytes], pickles: int) -> None:
    """Refuse pickles that name any class or function that tensors do not need."""
    for _ in range(pickles):
        for operation, argument, _ in pickletools.genops(stream):
            # STACK_GLOBAL takes the name from the stack, where it cannot be read. torch.save writes
            # protocol 2, which does not have this operation.
            if operation.name == "STACK_GLOBAL" or (
                operation.name in ("GLOBAL", "INST") and not _is_of_tensors(str(argument))
            ):
                raise UserError(
                    f"{file} holds more than weights ({argument}), and loading it could run "
                    "foreign code. Use a copy of the model in safetensors."
                )


def _is_of_tensors(name: str) -> bool:
    """Return whether a pickle of tensors needs this class or function."""
    if name in _MAPS or name in _REBUILDERS:
        return True
    last = name.rpartition(" ")[2]
    is_dtype = isinstance(getattr(torch, last, None), torch.dtype)
    return name.startswith(_STORAGES) and (last.endswith("Storage") or is_dtype)


def _storages(content: Any) -> Counter[int]:
    """Count the storages of all tensors by size; views share one."""
    sizes = {}
    for tensor in _tensors(content):
        storage = tensor.untyped_storage()
        # By address: views of one storage are one record.
        if storage.nbytes():
            sizes[storage.data_ptr()] = storage.nbytes()
    return Counter(sizes.values())


def _tensors(content: Any) -> Iterable[Tensor]:
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            if value is not content:
                yield from _tensors(value)
