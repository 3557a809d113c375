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
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ftkit.errors import UserError
from ftkit.pretrained.weights.files import WeightTensor


class Inert:
    """In the place of an object of another program: holds what it is given, and does nothing."""

    def __new__(cls, *arguments: Any) -> "Inert":
        """As pickles make objects."""
        made = super().__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    def __init__(self, *arguments: Any) -> None:
        """As they call classes; what is given is held already."""
        self.arguments: tuple[Any, ...] = arguments
        """Of its constructor."""
        self.state: Any = {}
        """What it held: its attributes by name, or what its class has made of them."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)  # they are keys before they have their state

    def __eq__(self, other: object) -> bool:
        return self is other

    def __getitem__(self, name: str) -> Any:
        """One of its attributes, by name; None: it has none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


IN_DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "numpy.ndarray",
    "numpy.dtype",
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
"""What `.metadata` may name besides; the classes among them do nothing but hold values."""
_NAMED = re.compile(r"(?:GLOBAL |[Uu]nsupported (?:global|class|operand)[^\w]*)([\w.]+\.[\w.]+)")


def load_torch_file(file: Path, stand_ins: tuple[str, ...] = ()) -> Any:
    """What torch.save wrote: tensors, mapped into memory, in containers of plain values.

    Args:
        file: it.
        stand_ins: full names of classes whose objects become `Inert`.

    Raises:
        UserError: missing, damaged, or it holds an object of another class.
    """
    try:
        is_mappable = zipfile.is_zipfile(file)
    except OSError as error:
        raise _unreadable(file, error) from None
    return _loaded(file, file, stand_ins, is_mappable)


def load_torch_bytes(content: bytes, file: Path) -> Any:
    """The same of a part of a file, without stand-ins."""
    return _loaded(io.BytesIO(content), file, (), False)


def _loaded(source: Any, file: Path, stand_ins: tuple[str, ...], is_mappable: bool) -> Any:
    known: list[Any] = [(Inert, name) for name in stand_ins]
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(source, map_location="cpu", mmap=is_mappable, weights_only=True)
    except pickle.UnpicklingError as error:
        found = _NAMED.search(str(error))
        raise _refused(file, found[1] if found else "something else than tensors") from None
    except FileNotFoundError:
        raise UserError(f"{file} is missing. Copy the whole checkpoint.") from None
    except Exception as error:  # of zip files, of old formats, of pickles that make no sense
        raise _unreadable(file, error) from None


class _MetadataUnpickler(pickle.Unpickler):
    """Of `.metadata`: every name is looked up in two fixed lists, and nowhere else."""

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for."""
        full = f"{module}.{name}"
        if full in _IN_METADATA:
            return Inert
        if full in _VALUES:
            return _VALUES[full]
        raise _NotListed(full)

    def persistent_load(self, pid: Any) -> Any:
        """Of objects outside the file, of which there are none."""
        raise _NotListed(f"persistent object {pid!r}"[:100])


class _NotListed(Exception):
    """A name that is in none of the lists."""


def load_metadata(file: Path) -> Inert:
    """What `.metadata` of torch.distributed.checkpoint holds.

    Raises:
        UserError: missing, damaged, or it names what such files do not.
    """
    try:
        with file.open("rb") as stream:
            found = _MetadataUnpickler(stream).load()
    except _NotListed as error:
        raise _refused(file, str(error)) from None
    except FileNotFoundError:
        raise UserError(f"{file} is missing. Copy the whole checkpoint.") from None
    except Exception as error:  # whatever a damaged pickle comes to
        raise _unreadable(file, error) from None
    if not isinstance(found, Inert):
        raise _unreadable(file, ValueError(f"it holds a {type(found).__name__}"))
    return found


def held(tensor: Tensor) -> WeightTensor:
    """A tensor that is there, as those in files are."""
    return WeightTensor(tensor.shape, tensor.dtype, lambda: tensor)


def mapping_in(content: Any, key: str, file: Path) -> dict[Any, Any]:
    """A mapping of a file's content.

    Raises:
        UserError: there is none.
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
        f"{file} holds {name}, which is none of the classes that such files hold; to load it could "
        "run foreign code, so nothing of it was. Give a checkpoint as its program has written it."
    )


def _unreadable(file: Path, error: Exception) -> UserError:
    text = " ".join(str(error).split())[:200] or type(error).__name__
    return UserError(f"{file} is damaged or no checkpoint ({text}). Copy the checkpoint again.")
