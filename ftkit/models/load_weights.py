"""Loading of weights into a model that was made on the meta device, whole or sharded."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.models.architectures.architecture import HEAD, seed_of
from ftkit.models.language_model import LanguageModel
from ftkit.models.lora.layers import (
    adapter_from_base,
    follows_from_base,
    initial_adapter,
    lora_layers,
)
from ftkit.models.lora.peft_layers import layers_of
from ftkit.models.lora.targets import our_name
from ftkit.models.meta_device import allocate
from ftkit.models.pretrained.base_model import BaseModel, weights, weights_as_stored
from ftkit.models.unpacking import allocate_scales, held_as_stored, packed
from ftkit.recipe.adapter_types import is_adapter
from ftkit.utils.progress import OnProgress


class Rows(Protocol):
    """A tensor in memory or in a file, read by rows."""

    def __getitem__(self, rows: slice, /) -> Tensor:
        """Read some rows."""


class Sharding(Protocol):
    """Division of a model's parameters among ranks."""

    def allocate(self, model: Any, device: torch.device) -> None:
        """Allocate every parameter's memory on this rank; the values are undefined."""

    def put(self, model: nn.Module, name: str, value: Rows) -> None:
        """Set a parameter; only the rows of this rank are read from the value.

        Every rank puts the same parameters in the same order.
        """

    def replace(self, parameter: nn.Parameter, value: Rows) -> None:
        """Set a parameter of a model that has trained; every rank does, in the same order."""

    def reshard(self, model: nn.Module) -> None:
        """Free the parameters that a forward pass without a backward pass has gathered."""

    def whole(self, parameter: Tensor) -> Tensor:
        """Gather the full parameter; every rank calls this."""


class Whole:
    """No sharding: every rank has every parameter."""

    def allocate(self, model: Any, device: torch.device) -> None:
        # `to_empty` makes a parameter for each name, so tied ones have to be tied again.
        allocate(model, device)
        model.tie()

    def put(self, model: nn.Module, name: str, value: Rows) -> None:
        self.replace(model.get_parameter(name), value)

    def replace(self, parameter: nn.Parameter, value: Rows) -> None:
        parameter.data.copy_(value[:])

    def reshard(self, model: nn.Module) -> None:
        pass

    def whole(self, parameter: Tensor) -> Tensor:
        return parameter.detach()


def fill(
    model: LanguageModel,
    base: BaseModel,
    *,
    sharding: Sharding,
    device: torch.device,
    rope_length: int,
    seed: int,
    trained: Callable[[str], Rows] | None = None,
    adapter: Mapping[str, Tensor] | None = None,
    source: Iterable[tuple[str, Tensor]] | None = None,
    progress: OnProgress,
) -> None:
    """Allocate an outlined model and load its weights, parameter by parameter.

    Args:
        model: from `outline`.
        base: the model whose weights are read.
        sharding: decides which rows this rank holds.
        device: of the parameters.
        rope_length: positions of the table of rotary embeddings.
        seed: of the initial values of an adapter, and of an output layer of scores.
        trained: reads a parameter from a checkpoint by our name, if training continues. If the
            checkpoint holds all parameters, the base is not read.
        adapter: initial values of trained parameters by our names, instead of the recipe's.
        source: weights by our names, instead of those of the base.
        progress: called with (parameters filled, parameters in all).
    """
    # One parameter after the other: the whole model never exists twice, or in full precision beside
    # its packed form, and each rank holds its own rows only.
    names = {our_name(name): name for name, _ in model.named_parameters()}
    adapted = _adapted_weights(model)
    kept = kept_parameters(model)
    left = dict.fromkeys(names)
    sharding.allocate(model, device)
    allocate_scales(model, device)
    # After the allocation, which leaves tables without values.
    model.body.build_rope_cache(device, rope_length)
    model.body.load_beside(base.rest)
    if model.lora is not None:
        layers_of(model.lora).fill(model, device)

    def put(ours: str, value: Rows) -> None:
        sharding.put(model, names[ours], value)
        del left[ours]
        progress(len(names) - len(left), len(names))

    # First what does not depend on the base model, which may then not be needed at all.
    with torch.no_grad():
        for ours, name in names.items():
            parameter = model.get_parameter(name)
            if trained is not None and name in kept:
                put(ours, trained(ours))
            elif adapter is not None and ours in adapter:
                put(ours, adapter[ours])
            elif ours == HEAD and base.source is not None and source is None:
                put(ours, initial_score(parameter.shape, seed))
            elif is_adapter(ours):
                assert model.lora is not None
                if not follows_from_base(name, model, model.lora):
                    of_model = base.architecture.seed_name(ours)
                    put(ours, initial_adapter(of_model, parameter.shape, seed, model.lora))
        if not left:
            return
        for ours, tensor in _weights(base, model, source, device):
            if ours not in left:  # the checkpoint holds it: it is trained whole beside the adapter
                continue
            dtype = model.get_parameter(names[ours]).dtype
            # A quantised weight is packed on the device, from the whole tensor, on every rank.
            stored = packed(model, names[ours], tensor, device)
            put(ours, stored)
            for name in adapted.get(ours, ()):
                if any(key.startswith(f"{our_name(name)}.lora_") for key in left):
                    assert model.lora is not None
                    layer = model.get_submodule(name)
                    # Rounded or quantised as the layer has it: PiSSA and OLoRA start where the
                    # layer does.
                    weight = _computed_weight(layer, stored.to(device), dtype)
                    # LoftQ, which needs it, is refused with weights that are kept as published.
                    original = tensor if isinstance(tensor, Tensor) else weight
                    values = adapter_from_base(weight, original, layer, model.lora)
                    for end, value in values.items():
                        put(f"{our_name(name)}.{end}", value)


def initial_score(shape: torch.Size, seed: int) -> Tensor:
    """Initial values of an output layer of scores, the same on every device and layout.

    Args:
        shape: [scores, width].
        seed: of the run.
    """
    from ftkit.models.pretrained.random_weights import INITIAL_STD

    generator = torch.Generator(device="cpu").manual_seed(seed_of(HEAD, seed))
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    return values.normal_(std=INITIAL_STD, generator=generator)


def kept_parameters(model: LanguageModel) -> dict[str, nn.Parameter]:
    """Parameters that checkpoints hold, by the model's names.

    If the model is adapted or trained in part, these are the adapter and what else is trained,
    because the base model has the rest; otherwise all parameters, also those that are not trained.
    """
    named = dict(model.named_parameters())
    is_whole = model.lora is None and not model.trains_part
    return {n: p for n, p in named.items() if is_whole or p.requires_grad or is_adapter(n)}


def _adapted_weights(model: LanguageModel) -> dict[str, list[str]]:
    """Layers that adapt each weight, by our name; two where embedding and head are one."""
    names = {parameter: our_name(name) for name, parameter in model.named_parameters()}
    found: dict[str, list[str]] = {}
    for name, layer in lora_layers(model):
        found.setdefault(names[layer.get_base_layer().weight], []).append(name)
    return found


def _weights(
    base: BaseModel,
    model: LanguageModel,
    source: Iterable[tuple[str, Tensor]] | None,
    device: torch.device,
) -> Iterator[tuple[str, Any]]:
    """The base model's weights as the model holds them, and tied or untied as it is."""
    found: Iterable[tuple[str, Any]]
    if source is not None:
        found = source
    else:
        kept = [our_name(name) for name in held_as_stored(model)]
        plain = weights(base, device, without=frozenset(kept))
        found = chain(plain, weights_as_stored(base, kept))
    # A stored head that equals the embedding has no parameter in a tied model.
    for name, tensor in found:
        if name == HEAD and model.tied:
            continue
        yield name, tensor
        # Untied for training: the head starts as a copy of the embedding.
        if name == base.architecture.embedding and base.tied and not model.tied:
            yield HEAD, tensor


def _computed_weight(layer: Any, stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the [out, in] weight that an adapted layer computes with."""
    base = layer.get_base_layer()
    unpacked: Tensor = base.unpacked(stored) if hasattr(base, "unpacked") else stored.to(dtype)
    return unpacked


def result_weights(model: LanguageModel, sharding: Sharding) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a result, whole, by our names; called by every rank.

    They are what was trained of an adapted model, and all parameters of another.
    """
    # An evaluation before may have left parameters gathered.
    sharding.reshard(model)
    is_adapted = model.lora is not None
    held = kept_parameters(model) if is_adapted else dict(model.named_parameters())
    for name, parameter in held.items():
        yield our_name(name), sharding.whole(parameter)
