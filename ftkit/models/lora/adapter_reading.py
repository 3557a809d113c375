"""Adapters in PEFT's files, read for a base model: made by ftkit or elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import HEAD, Fused
from ftkit.models.bodies.experts import PAIRS
from ftkit.models.lora.adapter_files import PREFIX, names_in_file, of_layer
from ftkit.models.lora.peft_layers import layers_of, parameter_of
from ftkit.models.lora.targets import TRAINED, head_names, names_of, our_name
from ftkit.models.pretrained.base_model import BaseModel, parameter_shapes, weights
from ftkit.models.pretrained.pickled_tensors import load_pickled
from ftkit.recipe.adapter_types import is_adapter
from ftkit.recipe.peft_adapter import adapter_keys, peft_settings, read_notes, target_parameters
from ftkit.recipe.peft_names import CONFIG, OLD_WEIGHTS, PARTS_KEY, WEIGHTS
from ftkit.recipe.recipe import Lora
from ftkit.utils.damaged_files import reading, require_regular

_SAVED_AGAIN = "Take it from where it was saved again."


@dataclass(frozen=True)
class Adapter:
    """Content of an adapter's files."""

    changes: Mapping[str, Any]
    """Keys of a recipe that follow from the adapter."""
    tensors: Mapping[str, Tensor]
    """Tensors by our names of the parameters."""
    unties: bool
    """Whether it trains one end of a tied model, or both ends apart."""


def read_adapter(directory: Path, base: BaseModel) -> Adapter:
    """Read a PEFT adapter of a base model's Hugging Face version, made by ftkit or elsewhere.

    Raises:
        UserError: it is not an adapter, damaged, of a kind that ftkit does not train, or of
            another model; names the tensor.
    """
    stored = stored_adapter(directory)
    tensors = adapter_tensors(stored, directory, base)
    return Adapter(adapter_keys(directory), tensors, unties(stored, directory, base))


def unties(stored: Mapping[str, Tensor], directory: Path, base: BaseModel) -> bool:
    """Return whether an adapter makes embedding and head of a tied model two parameters.

    PEFT trains what `modules_to_save` names and leaves the other end as it is, unless
    `ensure_weight_tying` is set (https://github.com/huggingface/peft/issues/2864). ftkit writes
    both ends of a tied model, which are equal.

    Args:
        stored: the adapter's tensors, by PEFT's names.
        directory: of the adapter's settings.
        base: the adapted model.
    """
    if not base.tied:
        return False
    ends, whole = _ends(base), _whole_modules(directory, base)
    trained = [
        tensor
        for theirs, kind, tensor in ((*_split(name), tensor) for name, tensor in stored.items())
        if kind == "weight" and theirs in ends and f".{theirs}".endswith(whole)
    ]
    return len(trained) == 1 or (len(trained) == 2 and not torch.equal(*trained))


def _ends(base: BaseModel) -> tuple[str, ...]:
    """Names of the embedding and of the output layer in Hugging Face's model."""
    embedding = base.architecture.embedding.removesuffix(".weight")
    return (*names_of(base, embedding), *head_names(base))


def _whole_modules(directory: Path, base: BaseModel) -> tuple[str, ...]:
    """Ends of the names of the layers that an adapter trains whole, each behind a dot."""
    whole = tuple(f".{name}" for name in adapter_keys(directory)["lora_modules_to_save"] or ())
    ends = tuple(f".{end}" for end in _ends(base))
    if peft_settings(directory).get("ensure_weight_tying") and base.tied:
        # The settings name one of both, and the file has both.
        return whole + ends * any(end.endswith(whole) for end in ends)
    return whole


def adapter_tensors(
    stored: Mapping[str, Tensor], directory: Path, base: BaseModel
) -> dict[str, Tensor]:
    """Return the tensors of a PEFT adapter by our names of the parameters.

    Args:
        stored: by PEFT's names, as its files have them.
        directory: of the adapter's settings.
        base: the adapted model.

    Raises:
        UserError: they belong to another model, or are copies that differ from its weights.
    """
    parts = read_notes(directory).get(PARTS_KEY, {})
    whole, is_untied = _whole_modules(directory, base), unties(stored, directory, base)
    stored = dict(stored)
    layers_of(Lora(**adapter_keys(directory))).take_beside(stored, directory)
    tensors: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}
    holders = _holders(base)
    shapes = parameter_shapes(base)
    wrapped: dict[str, str] = {}
    if targets := target_parameters(directory):
        from ftkit.models.lora.experts import from_peft, parameters_adapted

        wrapped = parameters_adapted(base, targets)
    for name, tensor in stored.items():
        # First pairs of experts, whose wrappers are no layers of the model.
        wrapper, _, matrix = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if wrapper in wrapped:
            parameter = wrapped[wrapper]
            tensors[f"{parameter}{PAIRS}.{matrix}.{TRAINED}.weight"] = from_peft(
                tensor, matrix, shapes[parameter][0]
            )
            continue
        theirs, kind = _split(name)
        # PEFT also adapts layers that no loss trains, to no effect: one of the two stays 0.
        if base.architecture.is_untrained(theirs) and (kind == "lora_A" or not tensor.any()):
            continue
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
        # All else are copies of the base model's weights.
        is_whole = f".{theirs}".endswith(whole) or base.architecture.is_beside(theirs)
        is_trained = is_adapter(f".{kind}") or is_whole
        (tensors if is_trained else copies).update(ours)
    # PEFT has both ends of a tied model; here they are one parameter.
    if base.tied:
        embedding = base.architecture.embedding
        if HEAD in tensors and not is_untied:
            tensors[embedding] = tensors.pop(HEAD)
        if HEAD in copies:
            copies[embedding] = copies.pop(HEAD)
    # PEFT also saves embedding and head if the vocabulary differs from the one on the hub
    # (save_embedding_layers).
    _check_copies(copies, base, directory)
    return tensors


def _check_copies(copies: Mapping[str, Tensor], base: BaseModel, directory: Path) -> None:
    """Refuse copies of the base model's weights (PEFT sometimes adds them) that differ from it."""
    for name, tensor in weights(base) if copies else ():
        # In the number format of the copy, which may be another.
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
        UserError: a tensor is missing, unknown to the model, or of another shape, or the model
            ties what the adapter has apart.
    """
    if adapter.unties and getattr(model, "tied", False):
        raise UserError(
            f"adapter {directory} trains embedding or head of a model in which both are one, and "
            "leaves the other as it was. Try --train.tie_embeddings false."
        )
    shapes = {
        our_name(name): parameter.shape
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    # Both ways: tensors without a parameter, then parameters without a tensor.
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
        UserError: the file is missing, damaged, or not an adapter.
    """
    file, old = directory / WEIGHTS, directory / OLD_WEIGHTS
    for candidate in (file, old):
        require_regular(candidate)
    # The safetensors file comes first, as in PEFT; the other is a pickle.
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
    """Split a name into layer and kind: lora_A, lora_magnitude_vector, oft_R.weight, bias."""
    # Weights that PEFT saves beside their adapter have base_layer in their names.
    plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
    layer, found, kind = plain.rpartition(".lora_")
    if found:
        return layer, "lora_" + kind.removesuffix(".weight")
    if is_adapter(plain):
        return of_layer(plain)
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
    for name in filter(base.architecture.is_beside, parameter_shapes(base)):
        owner = name.rpartition(".")[0]
        found.setdefault(owner, ([owner], None))
    # Older and newer names of the head mean the same layer.
    head, *others = head_names(base)
    for other in others:
        found[other] = found[head]
    for theirs, in_file in names_in_file(base, list(found)).items():
        if in_file is not None:
            found[in_file] = found[theirs]
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
    is_of_type = is_adapter(end) and not kind.startswith("lora_")
    if is_of_type:
        end = f".{parameter_of(kind)}"
    if fused is None:
        return {f"{layers[0]}{end}": tensor}
    if is_of_type:
        raise ValueError("it belongs to several layers in one, which ftkit adapts apart")
    owners = layers if adapted is None else adapted
    if kind == "lora_A":
        # An adapter made elsewhere has one A for the whole fused layer, which every part then
        # repeats.
        pieces = [tensor] * len(owners) if adapted is None else tensor.chunk(len(owners))
        return {f"{name}{end}": piece for name, piece in zip(owners, pieces, strict=True)}
    found = {}
    for index, name in enumerate(owners):
        # B has the rows of the weight, so it is divided like the weight.
        rows = base.architecture.part_of(tensor, fused, f"{name}.weight")
        if kind == "lora_B" and adapted is not None:
            rows = rows.chunk(len(owners), dim=1)[index]
        found[f"{name}{end}"] = rows
    return found
