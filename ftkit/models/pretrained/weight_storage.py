"""How weight files hold the parameters of a model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import HEAD, Architecture
from ftkit.models.architectures.naming import Naming
from ftkit.models.pretrained.weight_files import WeightTensor

Tensors = Iterable[tuple[str, Tensor]]
"""(our name, tensor) for each of `parameter_shapes`, in any order and number format. The model is
tied if, and only if, lm_head.weight is not among them."""

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
    """How the files of one layout store models of one architecture."""

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
            directory: where they lie, for messages.
            tied: whether embedding and head are one; a file may still contain the head.

        Raises:
            UserError: a tensor is missing, unexpected or of another shape.
        """

    def is_kept(self, name: str) -> bool:
        """Whether a stored tensor is outside the language model and is copied unchanged."""
        return False

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
    missing.pop(HEAD, None)
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
    """Whether a stored tensor is a buffer of old checkpoints that is not needed."""
    return name.endswith(_BUFFERS)


class NamedStorage(WeightStorage):
    """Tensors with names of their own, some of them several of our parameters in one."""

    def __init__(self, architecture: Architecture, naming: Naming) -> None:
        """Know what files call the parameters.

        Args:
            architecture: of the model.
            naming: of the layout.
        """
        self._architecture, self._naming = architecture, naming

    def holders(self, stored: Mapping[str, WeightTensor]) -> dict[str, HeldParameter]:
        found = {}
        for ours in self._architecture.parameter_shapes(tied=False):
            theirs, _ = self._naming.stored_in(ours)
            if theirs in stored:
                tensor = stored[theirs]
                found[ours] = HeldParameter((theirs,), tensor.dtype, self._reader(ours, tensor))
        return found

    def _reader(self, ours: str, tensor: WeightTensor) -> Callable[[], Tensor]:
        _, fused = self._naming.stored_in(ours)
        if fused is None:
            return tensor.read
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
            if all(part in parts for part in names):
                yield theirs, self._architecture.fuse([parts.pop(part) for part in names], fused)

    def written_name(self, ours: str) -> str:
        return self._naming.stored_in(ours)[0]
