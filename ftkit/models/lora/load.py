"""Loading of LoRA adapters that PEFT or ftkit has saved."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import HEAD
from ftkit.models.architectures.naming import Fused
from ftkit.models.bodies.experts import PAIRS
from ftkit.models.lora.experts import from_peft, parameters_adapted
from ftkit.models.lora.save import PREFIX
from ftkit.models.lora.targets import TRAINED, head_names, our_name
from ftkit.models.pretrained.base_model import BaseModel, parameter_shapes, weights
from ftkit.models.pretrained.weight_files import load_pickled
from ftkit.recipe.peft_adapter import (
    CONFIG,
    OLD_WEIGHTS,
    PARTS_KEY,
    WEIGHTS,
    adapter_keys,
    read_notes,
    target_parameters,
)
from ftkit.utils.damaged_files import reading, require_regular

_SAVED_AGAIN = "Take it from where it was saved again."


@dataclass(frozen=True)
class Adapter:
    """Content of an adapter's files."""

    changes: Mapping[str, Any]
    """Keys of a recipe that the adapter decides."""
    tensors: Mapping[str, Tensor]
    """Tensors by our names of the parameters."""


def read_adapter(directory: Path, base: BaseModel) -> Adapter:
    """Read a PEFT adapter of a base model's Hugging Face version, made by ftkit or elsewhere.

    Raises:
        UserError: it is not an adapter, damaged, of a kind that ftkit does not train, or of
            another model; names the tensor.
    """
    stored = stored_adapter(directory)
    return Adapter(adapter_keys(directory), adapter_tensors(stored, directory, base))


def adapter_tensors(
    stored: Mapping[str, Tensor], directory: Path, base: BaseModel
) -> dict[str, Tensor]:
    """Tensors of a PEFT adapter by our names of the parameters.

    Args:
        stored: by PEFT's names, as its files have them.
        directory: of the adapter's settings.
        base: the adapted model.

    Raises:
        UserError: they belong to another model, or are copies that differ from its weights.
    """
    parts = read_notes(directory).get(PARTS_KEY, {})
    whole = tuple(adapter_keys(directory)["lora_modules_to_save"] or ())
    tensors: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}
    holders = _holders(base)
    shapes = parameter_shapes(base)
    wrapped = parameters_adapted(base, target_parameters(directory))
    for name, tensor in stored.items():
        wrapper, _, matrix = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if wrapper in wrapped:
            parameter = wrapped[wrapper]
            tensors[f"{parameter}{PAIRS}.{matrix}.{TRAINED}.weight"] = from_peft(
                tensor, matrix, shapes[parameter][0]
            )
            continue
        theirs, kind = _split(name)
        found = holders.get(theirs)
        if found is None:
            raise UserError(
                f"adapter {directory} holds {name}, but {base.name} has no layer "
                f"{theirs or name}. Give the model that the adapter was made for."
            )
        try:
            ours = _ours(tensor, kind, *found, parts.get(theirs), base)
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            raise UserError(
                f"adapter {directory}: {name} of shape {list(tensor.shape)} does not fit "
                f"{base.name} ({error}). Give the model that the adapter was made for."
            ) from None
        is_trained = kind.startswith("lora_") or f".{theirs}".endswith(
            tuple(f".{module}" for module in whole)
        )
        (tensors if is_trained else copies).update(ours)
    if base.tied and HEAD in tensors | copies:
        value = (tensors | copies).pop(HEAD)
        embedding = tensors.get(base.architecture.embedding)
        tensors.pop(HEAD, None)
        copies.pop(HEAD, None)
        if embedding is None:
            copies[base.architecture.embedding] = value
        elif not torch.equal(embedding, value):
            raise UserError(
                f"adapter {directory} trains head and embedding apart, but they are one in "
                f"{base.name}. Merge the adapter where it was made, and start from the result."
            )
    # PEFT also saves embedding and head if the vocabulary differs from the one on the hub
    # (save_embedding_layers).
    _check_copies(copies, base, directory)
    return tensors


def _check_copies(copies: Mapping[str, Tensor], base: BaseModel, directory: Path) -> None:
    """Refuse copies of the base model's weights (PEFT sometimes adds them) that differ from it."""
    for name, tensor in weights(base) if copies else ():
        if name in copies and not torch.equal(tensor.to(copies[name].dtype), copies[name]):
            raise UserError(
                f"adapter {directory} comes with {name} of its own, which differs from that of "
                f"{base.name}. Give the model that the adapter was made for."
            )


def check_shapes(adapter: Adapter, model: nn.Module, directory: Path) -> None:
    """Refuse an adapter whose tensors are not exactly the trained parameters of a model.

    Args:
        adapter: from the directory.
        model: adapted, with nothing trained but the adapter.
        directory: of the adapter, for the message.

    Raises:
        UserError: a tensor is missing, unknown to the model, or of another shape.
    """
    shapes = {
        our_name(name): parameter.shape
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    for name, tensor in adapter.tensors.items():
        if name not in shapes:
            problem = "is not among its target modules"
        elif tensor.shape != shapes[name]:
            problem = f"has shape {list(tensor.shape)}, but the model needs {list(shapes[name])}"
        else:
            continue
        raise UserError(
            f"adapter {directory}: {name} {problem}. Give the model that the adapter was made for."
        )
    for name in shapes:
        if name not in adapter.tensors:
            raise UserError(
                f"adapter {directory} lacks {name}, which is a target module in its {CONFIG}. Give "
                "the model that the adapter was made for."
            )


def stored_adapter(directory: Path) -> dict[str, Tensor]:
    """Read the tensors of an adapter's file, by PEFT's names.

    Raises:
        UserError: there is no such file, or it is damaged or holds something else.
    """
    file, old = directory / WEIGHTS, directory / OLD_WEIGHTS
    for candidate in (file, old):
        require_regular(candidate)
    if file.is_file():
        with reading(file, "tensors of an adapter as safetensors", advice=_SAVED_AGAIN):
            return load_file(file)
    if not old.is_file():
        raise UserError(f"adapter {directory} has no {WEIGHTS}. {_SAVED_AGAIN}")
    found = load_pickled(old)
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(t, Tensor) for name, t in found.items()
    ):
        raise UserError(f"{old} holds no tensors. Save it as {WEIGHTS}.")
    return found


def _split(name: str) -> tuple[str, str]:
    """Hugging Face's layer and kind: lora_A, lora_B, lora_magnitude_vector, weight or bias."""
    # Weights that PEFT saves beside their adapter have base_layer in their names.
    plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
    layer, found, kind = plain.rpartition(".lora_")
    if found:
        return layer, "lora_" + kind.removesuffix(".weight")
    layer, _, kind = plain.rpartition(".")
    return layer, kind


def _holders(base: BaseModel) -> dict[str, tuple[list[str], Fused | None]]:
    """Layers of Hugging Face's model, with the layers of ours that each holds."""
    naming = base.architecture.naming_in("hf")
    if naming is None:
        return {}
    found: dict[str, tuple[list[str], Fused | None]] = {}
    for name in (*parameter_shapes(base), HEAD):
        if name.endswith(".weight"):
            theirs, fused = naming.stored_in(name)
            holder = found.setdefault(theirs.removesuffix(".weight"), ([], fused))
            layer = name.removesuffix(".weight")
            if layer not in holder[0]:
                holder[0].append(layer)
    head, *others = head_names(base)
    for other in others:
        found[other] = found[head]
    return found


def _ours(
    tensor: Tensor,
    kind: str,
    layers: list[str],
    fused: Fused | None,
    adapted: list[str] | None,
    base: BaseModel,
) -> dict[str, Tensor]:
    """Split a tensor of a Hugging Face layer into tensors by our names.

    `adapted` names the layers that own the tensor's ranks in turn; None: each owns all.
    """
    end = f".{kind}.{TRAINED}.weight" if kind.startswith("lora_") else f".{kind}"
    if fused is None:
        return {f"{layers[0]}{end}": tensor}
    owners = layers if adapted is None else adapted
    if kind == "lora_A":
        pieces = [tensor] * len(owners) if adapted is None else tensor.chunk(len(owners))
        return {f"{name}{end}": piece for name, piece in zip(owners, pieces, strict=True)}
    found = {}
    for index, name in enumerate(owners):
        rows = base.architecture.part_of(tensor, fused, f"{name}.weight")
        if kind == "lora_B" and adapted is not None:
            rows = rows.chunk(len(owners), dim=1)[index]
        found[f"{name}{end}"] = rows
    return found
