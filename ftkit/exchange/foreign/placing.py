"""Placing of foreign tensors: each goes to the parameter of ours that it belongs to."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ftkit.checkpoint.state import stored_name
from ftkit.errors import UserError
from ftkit.exchange.foreign.state import ForeignState, ForeignTensors
from ftkit.models.architectures.architecture import ModelLayout
from ftkit.models.language_model import LanguageModel
from ftkit.models.load_weights import kept_parameters
from ftkit.models.lora.load import adapter_tensors
from ftkit.models.lora.targets import our_name
from ftkit.models.pretrained.base_model import BaseModel, storage_of
from ftkit.strategies.state import PARAMETER
from ftkit.utils.damaged_files import reading


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of our checkpoint."""

    name: str
    """Name in checkpoints: parameter/NAME, exp_avg/NAME, ..."""
    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """Returns a tensor of this shape, or raises UserError."""


def placed_tensors(
    state: ForeignState,
    model: LanguageModel,
    base: BaseModel,
    adapter: Path | None,
    source: Path,
    begun: Iterable[str] = (),
) -> list[PlacedTensor]:
    """All tensors of our checkpoint, taken from a foreign one; each is read when needed.

    Args:
        state: of the foreign run.
        model: outlined, adapted as the recipe says.
        base: that it is made of.
        adapter: directory of PEFT's settings, where an adapter is trained.
        source: the foreign checkpoint, for messages.
        begun: kinds of optimizer state that begin at zero.

    Raises:
        UserError: a tensor is missing, or of another shape or another model.
    """
    kept = {our_name(name): parameter for name, parameter in kept_parameters(model).items()}
    trained = {name: p for name, p in kept.items() if p.requires_grad}
    placed = []
    dtypes: dict[str, torch.dtype] = {}
    for kind, tensors in {PARAMETER: state.parameters, **(state.moments or {})}.items():
        wanted = kept if kind == PARAMETER else trained
        if state.layout == "ftkit":
            found = {name: (tensor.dtype, tensor.read) for name, tensor in tensors.items()}
        elif adapter is None:
            found = _of_model(tensors, base, state.layout)
        else:
            found = _of_adapter(tensors, base, adapter)
        for ours, parameter in wanted.items():
            if ours not in found:
                what = "weights" if kind == PARAMETER else f"optimizer state ({kind})"
                raise UserError(
                    f"{source} has no {what} for {ours}, which the recipe trains. Give the base "
                    "model, the method and the adapter's settings of this very run."
                )
            dtype, read = found[ours]
            dtypes.setdefault(ours, dtype)
            name = stored_name(kind, ours)
            placed.append(
                PlacedTensor(name, parameter.shape, dtype, _checked(read, name, parameter, source))
            )
    for kind in begun:
        for ours, parameter in trained.items():
            shape, dtype = parameter.shape, dtypes[ours]
            zeros = partial(torch.zeros, shape, dtype=dtype)
            placed.append(PlacedTensor(stored_name(kind, ours), shape, dtype, zeros))
    return placed


def _of_model(
    tensors: ForeignTensors, base: BaseModel, layout: ModelLayout
) -> dict[str, tuple[torch.dtype, Callable[[], Tensor]]]:
    """Tensors by our names; the layout's own rules split and join matrices."""
    holders = storage_of(base.architecture, layout).holders(tensors)
    return {name: (holder.dtype, holder.read) for name, holder in holders.items()}


def _of_adapter(
    tensors: ForeignTensors, base: BaseModel, adapter: Path
) -> dict[str, tuple[torch.dtype, Callable[[], Tensor]]]:
    """Tensors of an adapter by our names."""
    read = {name: tensor.read() for name, tensor in tensors.items()}
    found = adapter_tensors(read, adapter, base)
    if len(found) > len(read):
        raise UserError(
            f"The adapter in {adapter} is of layers that hold several of ours ({base.name} joins "
            "query, key and value), which ftkit trains apart: its optimizer state is of other "
            "matrices. Start a new run from its weights with --adapter."
        )
    return {name: (tensor.dtype, _itself(tensor)) for name, tensor in found.items()}


def _itself(tensor: Tensor) -> Callable[[], Tensor]:
    # A function of its own: a lambda in the loop would return the last tensor.
    return lambda: tensor


def _checked(
    read: Callable[[], Tensor], name: str, parameter: Tensor, source: Path
) -> Callable[[], Tensor]:
    def checked() -> Tensor:
        with reading(source, f"{name} of {list(parameter.shape)} numbers", key=name):
            tensor = read()
        if tensor.shape != parameter.shape:
            raise UserError(
                f"{source}: {name} has shape {list(tensor.shape)}, but the model's is "
                f"{list(parameter.shape)}. Give the base model and the recipe of this very run."
            )
        return tensor

    return checked
