"""Adapters of other types than LoRA: PEFT's own layers, without values, filled and merged.

VeRA: Kopiczko et al. 2023, https://arxiv.org/abs/2310.11454. OFT: Qiu et al. 2023,
https://arxiv.org/abs/2306.07280. LoHa: Hyeon-Woo et al. 2021, https://arxiv.org/abs/2108.06098.
LoKr: Yeh et al. 2023, https://arxiv.org/abs/2309.14859. (IA)3: Liu et al. 2022,
https://arxiv.org/abs/2205.05638.
"""

import dataclasses
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.errors import UserError
from ftkit.extensions.peft_types.adapter_types import check_packed
from ftkit.models.lora.adapter_files import PREFIX, by_short_name, huggingface_naming, of_layer
from ftkit.models.lora.peft_layers import (
    AdapterFiles,
    PeftLayers,
    tuner_layers,
    without_bitsandbytes,
)
from ftkit.models.lora.targets import TRAINED, are_called, names_of, our_name
from ftkit.models.pretrained.base_model import BaseModel, parameter_shapes
from ftkit.recipe.adapter_types import peft_name, peft_options
from ftkit.recipe.recipe import Lora, LoraRecipe

_PROJECTIONS = ("vera_A", "vera_B")
"""Random matrices of VeRA, which all layers share: [r, most inputs] and [most outputs, r]."""
_CPU = torch.device("cpu")


class TypeOfPeft(PeftLayers):
    """A type whose layers PEFT computes as they are."""

    constants: ClassVar[Mapping[str, float]] = {}
    """First values of parameters that are not drawn at random, by a part of their names."""

    def __init__(self, lora: Lora) -> None:
        super().__init__(lora)
        self.options = peft_options(lora.peft)

    def check(self, base: BaseModel, layers: Sequence[str]) -> None:
        naming, name = huggingface_naming(base), peft_name(self.lora)
        for ours in layers:
            theirs, fused = naming.stored_in(ours)
            if fused is not None:
                raise UserError(
                    f"peft is {name}, but {theirs} of Hugging Face's "
                    f"{base.architecture.class_name} is several layers in one, of which {ours} is "
                    f"a part: {name} has no adapter of a part. Try --peft lora, or choose other "
                    "layers by --lora_targets."
                )

    def add(self, model: nn.Module, base: BaseModel, targets: list[str]) -> None:
        linear = {name: model.get_submodule(name) for name in targets}
        self.inject(model, targets, self.scaled_inputs(linear, base))

    def scaled_inputs(self, linear: Mapping[str, nn.Module], base: BaseModel) -> list[str]:
        """Return which of the adapted layers have their inputs scaled, and not their outputs."""
        return []

    def inject(self, model: nn.Module, targets: Sequence[str], scaled: Sequence[str]) -> None:
        """Replace the target modules by PEFT's layers."""
        from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

        settings = self.settings(targets, scaled)
        add_layers: Any = PEFT_TYPE_TO_TUNER_MAPPING[settings.peft_type]
        with without_bitsandbytes():
            add_layers(model, settings, adapter_name=TRAINED, low_cpu_mem_usage=True)

    def settings(self, targets: Collection[str], scaled: Collection[str]) -> Any:
        """Return PEFT's configuration for layers, with those whose inputs are scaled."""
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
        from peft.utils.peft_types import PeftType

        make: Any = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(peft_name(self.lora).upper())]
        with warnings.catch_warnings():
            # What save_projection says itself.
            warnings.filterwarnings("ignore", "Specified to not save vera_A")
            return make(target_modules=list(targets), **self.arguments(scaled))

    def arguments(self, scaled: Collection[str]) -> dict[str, Any]:
        """Return the arguments of PEFT's configuration beside the adapted layers."""
        return dataclasses.asdict(self.options)

    def first_number(self, name: str) -> float | None:
        return next((value for part, value in self.constants.items() if part in f"{name}."), None)

    def files(self, adapter: Mapping[str, Tensor], base: BaseModel) -> AdapterFiles:
        naming, shapes = huggingface_naming(base), parameter_shapes(base)
        tensors: dict[str, Tensor] = {}
        adapted: dict[str, bool] = {}
        sizes: set[tuple[int, ...]] = set()
        for name, tensor in adapter.items():
            layer, parameter = of_layer(name)
            theirs, _ = naming.stored_in(layer)
            # In a file, names of parameters lack that of the adapter.
            kind = ".".join(word for word in parameter.split(".") if word != TRAINED)
            tensors[f"{PREFIX}{theirs}.{kind}"] = tensor.contiguous()
            # A tied head has no weight of its own.
            shape = shapes.get(f"{layer}.weight", shapes[base.architecture.embedding])
            sizes.add(tuple(shape))
            # IA3 has [1, in] where it scales inputs, and [out, 1] where it scales outputs.
            adapted[theirs] = parameter.startswith("ia3_l") and tensor.shape[0] < shape[0]
        targets = by_short_name(adapted, base)
        scaled = [name for name, is_scaled in targets.items() if is_scaled]
        most_outputs, most_inputs = map(max, zip(*sizes, strict=True))
        tensors |= self.tensors_beside(most_inputs, most_outputs)
        return tensors, {}, self.settings(targets, scaled)

    def tensors_beside(self, inputs: int, outputs: int) -> dict[str, Tensor]:
        """Return what files hold beside parameters, by the most inputs and outputs of a layer."""
        return {}

    @torch.no_grad()
    def merged(self, layer: Any, values: Mapping[str, Tensor], kind: str, base: Tensor) -> Tensor:
        name = "layer"
        # Float32 of its own: the parameter may be the base model's, which stays as it is.
        linear = nn.Linear(layer.in_features, layer.out_features)
        for own, parameter in linear.named_parameters():
            parameter.copy_(base) if own == kind else parameter.zero_()
        model = nn.ModuleDict({name: linear})
        self.inject(model, [name], [name] * bool(getattr(layer, "is_feedforward", False)))
        adapted: Any = model[name]
        self.give_sizes(adapted, layer)
        for key, value in values.items():
            parameter = adapted.get_parameter(key)
            holder, _, last = key.rpartition(".")
            setattr(
                adapted.get_submodule(holder),
                last,
                nn.Parameter(value.to(device=_CPU, dtype=torch.float32).view(parameter.shape)),
            )
        self.fill(model, _CPU)
        adapted.merge()
        return linear.get_parameter(kind)

    def give_sizes(self, layer: Any, other: Any) -> None:
        """Give what a layer holds beside parameters the sizes that another one has."""


class Vera(TypeOfPeft):
    """VeRA."""

    dropout = "vera_dropout"
    constants: ClassVar = {".vera_lambda_b.": 0.0}

    def arguments(self, scaled: Collection[str]) -> dict[str, Any]:
        return super().arguments(scaled) | {"projection_prng_key": self._key}

    @property
    def _key(self) -> int:
        """Seed of the random matrices."""
        key: int | None = self.options.projection_prng_key
        if key is not None:
            return key
        return self.lora.seed if isinstance(self.lora, LoraRecipe) else 0

    def first_number(self, name: str) -> float | None:
        if ".vera_lambda_d." in name:
            first: float = self.options.d_initial
            return first
        return super().first_number(name)

    def fill(self, model: nn.Module, device: torch.device) -> None:
        # All layers refer to the same dictionaries.
        _, layer = next(tuner_layers(model))
        holders = [getattr(layer, name) for name in _PROJECTIONS]
        a, b = (holder[TRAINED] for holder in holders)
        drawn = self.projections(a.shape[1], b.shape[0])
        for holder, value in zip(holders, drawn, strict=True):
            holder[TRAINED] = value.to(device, holder[TRAINED].dtype)

    def give_sizes(self, layer: Any, other: Any) -> None:
        for name in _PROJECTIONS:
            shape = getattr(other, name)[TRAINED].shape
            getattr(layer, name)[TRAINED] = torch.empty(shape, device=_CPU)

    def projections(self, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
        """Draw the random matrices as PEFT does: [r, inputs] and [outputs, r], float32."""
        generator = torch.Generator(device=_CPU).manual_seed(self._key)
        rank = self.options.r
        a, b = (
            nn.init.kaiming_uniform_(
                torch.empty(shape, dtype=torch.float32, device=_CPU), generator=generator
            )
            for shape in ((rank, inputs), (outputs, rank))
        )
        return a, b

    def cast(self, model: nn.Module, dtype: torch.dtype) -> None:
        # FSDP casts parameters alone; under autocast they would be cast in every pass.
        for _, layer in tuner_layers(model):
            for name in _PROJECTIONS:
                getattr(layer, name).to(dtype)

    def products(self, layer: Any) -> Iterator[tuple[str, Tensor, int]]:
        rank = layer.r[TRAINED]
        for name, width in zip(_PROJECTIONS, (layer.in_features, layer.out_features), strict=True):
            yield f"vera_lambda_{name}", getattr(layer, name)[TRAINED], rank * width

    def tensors_beside(self, inputs: int, outputs: int) -> dict[str, Tensor]:
        if not self.options.save_projection:
            return {}
        drawn = self.projections(inputs, outputs)
        return {_in_file(name): value for name, value in zip(_PROJECTIONS, drawn, strict=True)}

    def take_beside(self, stored: dict[str, Tensor], directory: Path) -> None:
        a, b = (stored.pop(_in_file(name), None) for name in _PROJECTIONS)
        if a is None or b is None:
            return
        for found, drawn in zip((a, b), self.projections(a.shape[-1], b.shape[0]), strict=True):
            # They are drawn again wherever the adapter is used.
            if found.shape != drawn.shape or not torch.equal(found, drawn.to(found.dtype)):
                raise UserError(
                    f"adapter {directory} holds vera_A and vera_B that its projection_prng_key "
                    "does not give, and ftkit draws them from it. Merge the adapter where it was "
                    "made."
                )


def _in_file(name: str) -> str:
    """PEFT's name of one of VeRA's random matrices, which belong to no layer."""
    return f"base_model.{name}"


class Oft(TypeOfPeft):
    """OFT."""

    constants: ClassVar = {".oft_R.": 0.0}

    def add(self, model: nn.Module, base: BaseModel, targets: list[str]) -> None:
        self._check_blocks({name: model.get_submodule(name).in_features for name in targets})  # type: ignore[misc]
        super().add(model, base, targets)

    def _check_blocks(self, inputs: Mapping[str, int]) -> None:
        """Refuse blocks of inputs that do not divide those of a layer, which PEFT would change."""
        key = "r" if self.options.r else "oft_block_size"
        size: int = getattr(self.options, key)
        common = math.gcd(*inputs.values())
        for name, width in inputs.items():
            if width % size:
                best = next(d for d in range(min(size, common), 0, -1) if common % d == 0)
                raise UserError(
                    f"peft.{key} is {size}, but {our_name(name)} has {width} inputs, which {size} "
                    f"does not divide. Try --peft.{key} {best}, which divides those of all layers."
                )

    def fill(self, model: nn.Module, device: torch.device) -> None:
        for _, layer in tuner_layers(model):
            for rotation in layer.oft_R.values():
                indices = torch.triu_indices(*(rotation.block_size,) * 2, 1, device=_CPU)
                rotation.rows, rotation.cols = indices.to(device)

    def products(self, layer: Any) -> Iterator[tuple[str, Tensor, int]]:
        for name, parameter in layer.oft_R.named_parameters(prefix="oft_R"):
            yield name, parameter, layer.in_features * layer.oft_block_size[TRAINED]


class _Matrix(TypeOfPeft):
    """A type whose factors make a matrix like the layer's own."""

    first_factors: ClassVar[tuple[str, ...]]
    """Beginnings of the names of one of its factors."""

    def add(self, model: nn.Module, base: BaseModel, targets: list[str]) -> None:
        check_packed(self.lora)
        super().add(model, base, targets)
        for _, layer in tuner_layers(model):
            # They draw a number in every pass of training, though nothing drops out: a simulated
            # step has no numbers to look at. They do nothing else in training.
            layer.training = False
            layer.train = lambda mode=True, layer=layer: layer

    def products(self, layer: Any) -> Iterator[tuple[str, Tensor, int]]:
        for name, parameter in layer.named_parameters():
            if name.startswith(self.first_factors):
                yield name, parameter, layer.in_features * layer.out_features


class Loha(_Matrix):
    """LoHa."""

    constants: ClassVar = {".hada_w2_b.": 0.0}
    first_factors = ("hada_w1_a",)


class Lokr(_Matrix):
    """LoKr."""

    constants: ClassVar = {".lokr_w1.": 0.0, ".lokr_w1_a.": 0.0}
    first_factors = ("lokr_w1.", "lokr_w1_a")


class Ia3(TypeOfPeft):
    """(IA)3."""

    merged_kinds = ("weight", "bias")  # the bias of a layer whose outputs are scaled
    constants: ClassVar = {".ia3_l.": 1.0}

    def arguments(self, scaled: Collection[str]) -> dict[str, Any]:
        return {"feedforward_modules": list(scaled)}

    def scaled_inputs(self, linear: Mapping[str, nn.Module], base: BaseModel) -> list[str]:
        given = self.options.feedforward_modules
        if given is None:
            endings = tuple(f".{end}" for end in base.architecture.lora_layers.get("lora_mlp", ()))
            return [
                name
                for name, layer in linear.items()
                if name.endswith(endings) and layer.in_features > layer.out_features  # type: ignore[operator]
            ]
        chosen: set[str] = set()
        for target in given:
            matching = {n for n in linear if are_called(names_of(base, our_name(n)), target)}
            if not matching:
                raise UserError(
                    f"peft.feedforward_modules names {target}, which is not among the adapted "
                    f"layers of {base.name}. Try --lora_targets '[{target}]', or remove it."
                )
            chosen |= matching
        return [name for name in linear if name in chosen]
