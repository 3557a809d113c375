"""Unpickling of foreign checkpoints: tensors and plain values, and nothing that could run.

Files of torch.save go through torch's own restricted loader, `.metadata` of
torch.distributed.checkpoint through one of ours. What objects of other programs are called is a
fixed list; in their place stand inert ones, which hold what they are given and do nothing. Any
other name is refused before it is looked up.
"""

import io
import pickle
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ftkit.errors import UserError
from ftkit.models.pretrained.pickled_tensors import record_sizes
from ftkit.models.pretrained.weight_files import WeightTensor
from ftkit.utils.damaged_files import reading


class Inert:
    """Stand-in for an object of another program: holds what it is given, and does nothing."""

    def __new__(cls, *arguments: Any) -> "Inert":
        """Make an object as pickles do."""
        made = super().__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    def __init__(self, *arguments: Any) -> None:
        """Keep the arguments; `__new__` has stored them already."""
        self.arguments: tuple[Any, ...] = arguments
        """Arguments of its constructor."""
        self.state: Any = {}
        """Its attributes by name, or the state that its class stored instead."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)  # they are keys before they have their state

    def __eq__(self, other: object) -> bool:
        return self is other

    __iter__ = None
    """Without this, `tuple(inert)` would call `__getitem__` with 0, 1, 2, ... without end."""
    __contains__ = None

    def __getitem__(self, name: str) -> Any:
        """Return an attribute by its name; None: there is none of that name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


IN_DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "numpy.ndarray",
    "numpy.dtype",
    # numpy 1 and numpy 2 have this function in different modules.
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "_codecs.encode",
)
"""Classes whose objects DeepSpeed's files hold; the last ones are of GPT-NeoX, which has them hold
the states of random generators."""
IN_LIGHTNING = (
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "pathlib.PosixPath",
    # Python 3.13 pickles paths by this name.
    "pathlib._local.PosixPath",
)
"""Classes whose objects Lightning's files hold; the last two of hyper-parameters."""
_IN_METADATA = tuple(
    f"torch.distributed.checkpoint.{name}"
    for name in (
        "metadata.BytesStorageMetadata",
        "metadata.ChunkStorageMetadata",
        "metadata.Metadata",
        "metadata.MetadataIndex",
        "metadata.StorageMeta",
        "metadata.TensorProperties",
        "metadata.TensorStorageMetadata",
        "metadata._MEM_FORMAT_ENCODING",
        "filesystem._StorageInfo",
        "filesystem._StoragePrefix",
    )
)
_VALUES: Mapping[str, Any] = MappingProxyType(
    {
        "torch.Size": torch.Size,
        "collections.OrderedDict": OrderedDict,
        "builtins.set": set,
        "torch.serialization._get_layout": Inert,
        "pathlib.PosixPath": Inert,
        "pathlib._local.PosixPath": Inert,
        **{str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)},
    }
)
"""Other names allowed in `.metadata`; the classes among them only hold values."""
_WRITTEN = "a file as torch.save has written it since torch 1.6"
_BLOCK_BYTES = 2**20
_METADATA = "the .metadata of torch.distributed.checkpoint"
# How the messages of torch's restricted loader name what it refuses.
_NAMED = re.compile(r"(?:GLOBAL |[Uu]nsupported (?:global|class|operand)[^\w]*)([\w.]+\.[\w.]+)")


def load_torch_file(file: Path, stand_ins: tuple[str, ...] = ()) -> Any:
    """Load a file of torch.save: tensors, mapped into memory, in containers of plain values.

    Args:
        file: to load.
        stand_ins: full names of classes whose objects become `Inert`.

    Raises:
        UserError: missing, damaged, of torch before 1.6, or it holds an object of another class, or
            tensors that the file does not hold whole.
    """
    with reading(file, _WRITTEN, advice="Copy the whole checkpoint again."):
        # torch.save has written zip archives since 1.6; what is none fails here, before torch sees
        # it.
        with zipfile.ZipFile(file) as members:
            stored = _verified_sizes(members, file.stat().st_size)
        return _loaded(file, file, stored, stand_ins, is_mapped=True)


def load_torch_bytes(content: bytes, file: Path) -> Any:
    """Load a part of a file that torch.save wrote, without stand-ins."""
    with reading(file, _WRITTEN, advice="Copy the whole checkpoint again."):
        with zipfile.ZipFile(io.BytesIO(content)) as members:
            stored = _verified_sizes(members, len(content))
        return _loaded(io.BytesIO(content), file, stored, (), is_mapped=False)


def _verified_sizes(archive: zipfile.ZipFile, size_bytes: int) -> Counter[int]:
    """Count the records of a file by size, after verifying their checksums.

    torch maps records without that look; an import reads all of them once anyway.
    """
    sizes = record_sizes(archive, size_bytes)
    for record in archive.infolist():
        if record.CRC:  # torch.save leaves it out if requested
            with archive.open(record) as stream:
                while stream.read(_BLOCK_BYTES):
                    pass
    return sizes


def _loaded(
    source: Any, file: Path, stored: Counter[int], stand_ins: tuple[str, ...], *, is_mapped: bool
) -> Any:
    known: list[Any] = [(Inert, name) for name in stand_ins]
    try:
        # The classes are registered under their names, but what is made is Inert: their own code is
        # never imported.
        with torch.serialization.safe_globals(known):
            content = torch.load(source, map_location="cpu", mmap=is_mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        # The name that was refused stands in the text of the exception alone.
        found = _NAMED.search(str(error))
        raise _refused(file, found[1] if found else "something else than tensors") from None
    _check_tensors(content, stored)
    return content


def _check_tensors(content: Any, stored: Counter[int]) -> None:
    """Refuse tensors that claim more numbers than their storages hold, or storages of other sizes.

    torch maps as many bytes as the pickle says, from the start of the storage on: what is beyond
    its end are bytes of its neighbour.
    """
    seen: set[int] = set()
    storages: dict[int, int] = {}
    left = [content]
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            # A sparse or quantised tensor keeps further tensors inside, which are not checked here.
            if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
                raise ValueError(f"a tensor is {value.layout} on {value.device}")
            storage = value.untyped_storage()
            if value.numel() * value.element_size() > storage.nbytes():
                raise ValueError(
                    f"a tensor of shape {list(value.shape)} has {storage.nbytes():,} bytes"
                )
            if storage.nbytes():
                # By address, because tensors may share a storage.
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict | list | tuple | set | Inert) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, dict):
                left += [*value.keys(), *value.values()]
            # What its class would have held may contain tensors, too.
            elif isinstance(value, Inert):
                left += [value.arguments, value.state]
            else:
                left += value
    if other := Counter(storages.values()) - stored:
        raise ValueError(f"a storage has {next(iter(other)):,} bytes only in its pickle")


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler of `.metadata`: every name is looked up in two fixed lists, and nowhere else."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up a name in the two lists."""
        full = f"{module}.{name}"
        # Nothing is imported: an attribute of an allowed module could be a function that runs.
        if full in _IN_METADATA:
            return Inert
        if full in _VALUES:
            return _VALUES[full]
        raise _NotListed(full)

    def persistent_load(self, pid: Any) -> Any:
        """Refuse objects outside the file, of which there are none."""
        raise _NotListed(f"persistent object {pid!r}"[:100])


class _NotListed(Exception):
    """A name is in neither of the lists."""


def load_metadata(file: Path) -> Inert:
    """Load `.metadata` of torch.distributed.checkpoint.

    Raises:
        UserError: missing, damaged, or it names what such files do not.
    """
    with reading(file, _METADATA, advice="Copy the whole checkpoint again."):
        try:
            with file.open("rb") as stream:
                found = _MetadataUnpickler(stream).load()
        except _NotListed as error:
            raise _refused(file, str(error)) from None
        if not isinstance(found, Inert):
            raise ValueError(f"it holds a {type(found).__name__}")
        return found


def held(tensor: Tensor) -> WeightTensor:
    """Wrap a tensor in memory like those in files."""
    return WeightTensor(tensor.shape, tensor.dtype, lambda: tensor)


def mapping_in(content: Any, key: str, file: Path) -> dict[Any, Any]:
    """A mapping of a file's content.

    Raises:
        UserError: it has no such mapping.
    """
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise UserError(
            f"{file} has no {key}, which is a part of such files. Give a checkpoint as its "
            "program has written it."
        )
    return found


def _refused(file: Path, name: str) -> UserError:
    return UserError(
        f"{file} holds {name}, which is not a class of such files. Loading it could execute code, "
        "so nothing was loaded. Give a checkpoint as its program wrote it."
    )
