"""Weight files: tensors mapped from them and written, and how they hold a model's parameters."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import HEAD, Architecture, Naming
from ftkit.utils.damaged_files import reading
from ftkit.utils.safetensors_files import save_tensors

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Safetensors' names of the number formats that weights may have."""

_ANY_DTYPES = DTYPES | {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""And those of tensors that are only copied, and of tables of whole numbers."""


@dataclass(frozen=True)
class WeightTensor:
    """A tensor in a weight file, known from the header."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """A view of the mapped file: its pages are read when touched and are free to be dropped."""

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return self.shape.numel() * self.dtype.itemsize


def stored_tensors(
    files: Iterable[Path], may_be_any: Callable[[str], bool] = lambda _: False
) -> dict[str, WeightTensor]:
    """List the tensors of .safetensors, .bin and .pth files by name; reads only headers.

    Pickles are read with PyTorch's restricted loader, which builds tensors and runs no code.

    Args:
        files: all of a model.
        may_be_any: whether a tensor of this name may have any number format.

    Raises:
        UserError: a file is damaged, holds something else than weights, or is unsafe.
    """
    tensors: dict[str, WeightTensor] = {}
    for file in files:
        is_safetensors = file.suffix == ".safetensors"
        tensors |= _safetensors(file, may_be_any) if is_safetensors else _pickled(file)
    return tensors


class ShardWriter:
    """Writes tensors to model.safetensors, or to shards with an index if they are too many.

    Holds the tensors of one shard until it is full.
    """

    def __init__(
        self, directory: Path, max_shard_bytes: int, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write to a directory that exists, in files of at most ``max_shard_bytes``.

        Args:
            directory: of the files.
            max_shard_bytes: see above.
            metadata: of each file.
        """
        self._metadata = dict(metadata or {})
        self.dtypes: dict[str, torch.dtype] = {}
        """Number format of every tensor added so far."""
        self._directory = directory
        self._max_shard_bytes = max_shard_bytes
        self._total_bytes = 0
        self._shard: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor; write the current shard first if the tensor does not fit."""
        # A tensor larger than a shard has a shard of its own.
        held_bytes = sum(held.nbytes for held in self._shard.values())
        if self._shard and held_bytes + tensor.nbytes > self._max_shard_bytes:
            self._write_shard()
        # Safetensors holds contiguous tensors only.
        self._shard[name] = tensor.detach().cpu().contiguous()
        self.dtypes[name] = tensor.dtype
        self._total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last shard and give the files the names that transformers looks for."""
        self._write_shard()
        # Names hold the number of shards, which is only known now.
        count = len(self._shards)
        if count == 1:
            self._path(0).rename(self._directory / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file_name = f"model-{number + 1:05}-of-{count:05}.safetensors"
            self._path(number).rename(self._directory / file_name)
            weight_map |= dict.fromkeys(names, file_name)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        write_settings(self._directory / "model.safetensors.index.json", index)

    def _write_shard(self) -> None:
        save_tensors(self._shard, self._path(len(self._shards)), self._metadata)
        self._shards.append(list(self._shard))
        self._shard = {}

    def _path(self, number: int) -> Path:
        return self._directory / f"shard-{number}"


def write_settings(file: Path, content: object) -> None:
    """Write a settings file as Hugging Face does."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _safetensors(file: Path, may_be_any: Callable[[str], bool]) -> dict[str, WeightTensor]:
    tensors = {}
    with reading(file, "weights as safetensors", advice="Download it again."):
        # Opening compares the header with the length of the file.
        handle = safe_open(file, "pt")
        for name in handle.keys():  # noqa: SIM118 (a handle is not a mapping)
            header = handle.get_slice(name)
            known = _ANY_DTYPES if may_be_any(name) else DTYPES
            dtype = known.get(header.get_dtype())
            if dtype is None:
                raise _unknown_format(file, name, header.get_dtype())
            tensors[name] = WeightTensor(
                torch.Size(header.get_shape()), dtype, partial(handle.get_tensor, name)
            )
    return tensors


def _pickled(file: Path) -> dict[str, WeightTensor]:
    from ftkit.models.pretrained.pickled_tensors import load_pickled

    content = load_pickled(file)
    # LitGPT's own checkpoints may have the weights below this key.
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]
    if not isinstance(content, dict):
        raise _unknown_format(file, "it", type(content).__name__)
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise _unknown_format(file, repr(name), type(tensor).__name__)
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise _unknown_format(file, name, f"{tensor.layout} on {tensor.device.type}")
    return {
        name: WeightTensor(tensor.shape, tensor.dtype, partial(_itself, tensor))
        for name, tensor in content.items()
    }


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _unknown_format(file: Path, name: str, kind: str) -> UserError:
    return UserError(
        f"{file}: {name} is of type {kind}; weights must be one of "
        f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES.values())}. "
        "Give the original model instead of a converted copy."
    )


Tensors = Iterable[tuple[str, Tensor]]
"""(our name, tensor) for each of `parameter_shapes`, in any order and number format. The model is
tied if, and only if, lm_head.weight is not among them."""


class Packing(Protocol):
    """A form in which some of a model's tensors are written as several."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata of each file of weights."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Keys of config.json that describe the form."""

    def parts(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are written for one, with their names in files."""


_BUFFERS = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias")
"""Ends of the names of buffers that old checkpoints hold beside parameters."""


@dataclass(frozen=True)
class HeldParameter:
    """The stored tensors that contain a parameter, and how to read it."""

    names: tuple[str, ...]
    """Names of the stored tensors."""
    dtype: torch.dtype
    """Number format of the first of them."""
    read: Callable[[], Tensor]
    """The parameter: a view of mapped files where one tensor is one parameter."""


class WeightStorage(ABC):
    """Rules by which the files of one layout store models of one architecture."""

    @abstractmethod
    def holders(self, stored: Mapping[str, WeightTensor]) -> dict[str, HeldParameter]:
        """Return the stored tensors of each parameter that is present."""

    @abstractmethod
    def require_complete(
        self, stored: Mapping[str, WeightTensor], directory: Path, *, tied: bool
    ) -> None:
        """Refuse files that do not hold exactly the parameters of the model.

        Args:
            stored: all tensors of the files.
            directory: of the files, for messages.
            tied: whether embedding and head are one; a file may still contain the head.

        Raises:
            UserError: a tensor is missing, unexpected or of another shape.
        """

    def is_kept(self, name: str) -> bool:
        """Return whether a stored tensor is outside the language model and is copied unchanged."""
        return False

    def may_be_any(self, name: str) -> bool:
        """Return whether a stored tensor may have any number format, unlike trained weights."""
        return self.is_kept(name)

    @abstractmethod
    def written(self, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors to write, by their names in files.

        Raises:
            ValueError: the given ones are not all of the model, or are of other shapes.
        """

    @abstractmethod
    def written_name(self, ours: str) -> str:
        """Return the name in files of a parameter that is stored as one tensor."""


def checked(architecture: Architecture, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors through; ValueError if they are not exactly those of the model."""
    missing = architecture.parameter_shapes(tied=False)
    for name, tensor in tensors:
        if missing.pop(name, None) != tensor.shape:
            raise ValueError(f"{name} {list(tensor.shape)} is twice, unknown or of another shape")
        yield name, tensor
    if not architecture.scores:
        missing.pop(HEAD, None)  # it may be the embedding
    if missing:
        raise ValueError(f"not given: {', '.join(missing)}")


def lacking(directory: Path, name: str) -> UserError:
    """Return the error for a missing tensor."""
    return UserError(f"The weights in {directory} lack {name}. Download them again.")


def misshapen(directory: Path, name: str, found: list[int], expected: list[int]) -> UserError:
    """Return the error for a tensor whose shape contradicts the settings."""
    return UserError(
        f"{name} in {directory} has shape {found}, but the model's settings say {expected}. Take "
        "both from the same model."
    )


def unexplained(directory: Path, name: str) -> UserError:
    """Return the error for a tensor that does not belong to the model."""
    return UserError(
        f"The weights in {directory} hold {name}, which its settings do not explain. "
        "Take both from the same model, and adapters and classifiers merged or removed."
    )


def is_old_buffer(name: str) -> bool:
    """Return whether a stored tensor is a buffer of old checkpoints that is not needed."""
    return name.endswith(_BUFFERS)


class NamedStorage(WeightStorage):
    """Files with one tensor for each parameter, or one for several that are fused."""

    def __init__(self, architecture: Architecture, naming: Naming) -> None:
        """Take the names of the parameters in files.

        Args:
            architecture: of the model.
            naming: of the layout.
        """
        self._architecture, self._naming = architecture, naming

    def holders(self, stored: Mapping[str, WeightTensor]) -> dict[str, HeldParameter]:
        found = {}
        for ours in self._architecture.parameter_shapes(tied=False):
            theirs, _ = self._naming.stored_in(ours)
            # Missing parameters are left to `require_complete`, which knows if the head may be
            # missing.
            if theirs in stored:
                tensor = stored[theirs]
                found[ours] = HeldParameter((theirs,), tensor.dtype, self._reader(ours, tensor))
        return found

    def _reader(self, ours: str, tensor: WeightTensor) -> Callable[[], Tensor]:
        _, fused = self._naming.stored_in(ours)
        if fused is None:
            return tensor.read
        # Read anew for each part; a view of the mapped file costs nothing.
        return lambda: self._architecture.part_of(tensor.read(), fused, ours)

    def require_complete(
        self, stored: Mapping[str, WeightTensor], directory: Path, *, tied: bool
    ) -> None:
        expected: dict[str, list[int]] = {}
        for ours, shape in self._architecture.parameter_shapes(tied=tied).items():
            name, _ = self._naming.stored_in(ours)
            if name in expected:
                # Rows of all parts of a fused tensor.
                expected[name][0] += shape[0]
            else:
                expected[name] = list(shape)
        for name, sizes in expected.items():
            if name not in stored:
                raise lacking(directory, name)
            if list(stored[name].shape) != sizes:
                raise misshapen(directory, name, list(stored[name].shape), sizes)
        # A tied model may still store its head.
        shared_head = {self._naming.stored_in(HEAD)[0]} if tied else set()
        for name in stored.keys() - expected.keys() - shared_head:
            if not is_old_buffer(name):
                raise unexplained(directory, name)

    def written(self, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
        parts: dict[str, Tensor] = {}
        for name, tensor in checked(self._architecture, tensors):
            theirs, fused = self._naming.stored_in(name)
            if fused is None:
                yield theirs, tensor
                continue
            parts[name] = tensor
            names = fused.parameters_beside(name)
            # Written as soon as the last part is here, so that few tensors are held.
            if all(part in parts for part in names):
                yield theirs, self._architecture.fuse([parts.pop(part) for part in names], fused)

    def written_name(self, ours: str) -> str:
        return self._naming.stored_in(ours)[0]
