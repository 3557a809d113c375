"""Adapters of other types than LoRA: PEFT's own layers, without values, filled and merged.

VeRA: Kopiczko et al. 2023, https://arxiv.org/abs/2310.11454. OFT: Qiu et al. 2023,
https://arxiv.org/abs/2306.07280. LoHa: Hyeon-Woo et al. 2021, https://arxiv.org/abs/2108.06098.
LoKr: Yeh et al. 2023, https://arxiv.org/abs/2309.14859. (IA)3: Liu et al. 2022,
https://arxiv.org/abs/2205.05638.
"""

import dataclasses
import importlib
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.errors import UserError
from ftkit.models.lora.targets import TRAINED, are_called, names_of, our_name
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.recipe.adapter_types import OftOptions, check_packed, peft_name, peft_options, peft_type
from ftkit.recipe.peft_adapter import peft_arguments
from ftkit.recipe.recipe import Lora, LoraRecipe
from ftkit.utils.imports import hidden

PROJECTIONS = ("vera_A", "vera_B")
"""Random matrices of VeRA, which all layers share: [r, most inputs] and [most outputs, r]."""
_CPU = torch.device("cpu")


@contextmanager
def without_bitsandbytes() -> Iterator[None]:
    """Keep PEFT from importing bitsandbytes, which takes seconds for all of torch's compiler."""
    # PEFT 0.21 imports it wherever it is installed, and caches whether it is. Quantised layers have
    # imported it before, but need none of PEFT's layers for it.
    with hidden("bitsandbytes"):
        from peft.import_utils import is_bnb_4bit_available, is_bnb_available

        checks = (is_bnb_available, is_bnb_4bit_available)
        for check in checks:
            check.cache_clear()
        try:
            yield
        finally:
            for check in checks:
                check.cache_clear()


def add_layers(model: nn.Module, base: BaseModel, lora: Lora, targets: list[str]) -> None:
    """Put PEFT's layers around the chosen ones; no memory is taken.

    Args:
        model: outlined on the meta device, and frozen.
        base: gives Hugging Face's names of the layers.
        lora: type and its options.
        targets: full names of the layers in the model.

    Raises:
        UserError: an option does not fit a layer.
    """
    check_packed(lora)
    linear = {name: model.get_submodule(name) for name in targets}
    options = peft_options(lora.peft)
    if isinstance(options, OftOptions):
        _check_blocks(linear, options)
    scaled = _scaled_inputs(linear, base, lora) if peft_name(lora) == "ia3" else ()
    inject(model, peft_config(lora, targets, scaled_inputs=scaled), lora)
    for _, layer in tuner_layers(model):
        if hasattr(layer, "module_dropout"):
            # LoHa and LoKr draw a number in every pass of training, though nothing drops out: a
            # simulated step has no numbers to look at. They do nothing else in training.
            layer.training = False
            layer.train = lambda mode=True, layer=layer: layer


def inject(model: nn.Module, config: Any, lora: Lora) -> None:
    """Replace the target modules of a configuration by PEFT's layers."""
    package = importlib.import_module(f"peft.tuners.{peft_name(lora)}")
    with without_bitsandbytes():
        getattr(package, peft_type(lora).model)(
            model, config, adapter_name=TRAINED, low_cpu_mem_usage=True
        )


def peft_config(
    lora: Lora,
    targets: Collection[str],
    *,
    scaled_inputs: Collection[str] = (),
    **others: Any,
) -> Any:
    """Return PEFT's configuration of an adapter.

    Args:
        lora: type and its options; VeRA's seed is there.
        targets: names of the adapted layers.
        scaled_inputs: those of them whose inputs IA3 scales.
        others: further keys of PEFT's.
    """
    arguments = dataclasses.asdict(peft_options(lora.peft)) | others
    if "feedforward_modules" in arguments:
        arguments["feedforward_modules"] = list(scaled_inputs)
    if "projection_prng_key" in arguments:
        arguments["projection_prng_key"] = projection_key(lora)
    package = importlib.import_module(f"peft.tuners.{peft_name(lora)}")
    with warnings.catch_warnings():
        # What save_projection says itself.
        warnings.filterwarnings("ignore", "Specified to not save vera_A")
        return getattr(package, peft_type(lora).config)(target_modules=list(targets), **arguments)


def stored_config(directory: Path) -> Any:
    """Return PEFT's configuration of an adapter's files, without any code or path they name.

    Raises:
        UserError: as `adapter_keys`.
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from peft.utils.peft_types import PeftType

    kind, arguments = peft_arguments(directory)
    return PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](**arguments)


def projection_key(lora: Lora) -> int:
    """Return the seed of VeRA's random matrices."""
    key: int | None = peft_options(lora.peft).projection_prng_key
    if key is not None:
        return key
    return lora.seed if isinstance(lora, LoraRecipe) else 0


def tuner_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of every linear layer that an adapter of any type adapts."""
    for name, module in model.named_modules():
        if hasattr(module, "adapter_layer_names"):
            yield name, module


def fill_tables(model: nn.Module, lora: Lora, device: torch.device) -> None:
    """Compute what the layers of an adapter hold beside its parameters, on every rank alike."""
    layers = [layer for _, layer in tuner_layers(model)]
    for layer in layers:
        for rotation in getattr(layer, "oft_R", {}).values():
            indices = torch.triu_indices(*(rotation.block_size,) * 2, 1, device=_CPU)
            rotation.rows, rotation.cols = indices.to(device)
    if layers and hasattr(layers[0], PROJECTIONS[0]):
        # All layers refer to the same dictionaries.
        holders = [getattr(layers[0], name) for name in PROJECTIONS]
        a, b = (holder[TRAINED] for holder in holders)
        drawn = projections(lora, a.shape[1], b.shape[0])
        for holder, value in zip(holders, drawn, strict=True):
            holder[TRAINED] = value.to(device, holder[TRAINED].dtype)


def projections(lora: Lora, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Draw VeRA's random matrices as PEFT does: [r, inputs] and [outputs, r], float32."""
    generator = torch.Generator(device=_CPU).manual_seed(projection_key(lora))
    rank = peft_options(lora.peft).r
    a, b = (
        nn.init.kaiming_uniform_(
            torch.empty(shape, dtype=torch.float32, device=_CPU), generator=generator
        )
        for shape in ((rank, inputs), (outputs, rank))
    )
    return a, b


def cast_projections(model: nn.Module, dtype: torch.dtype) -> None:
    """Give VeRA's random matrices the number format in which products are computed."""
    # FSDP casts parameters alone; under autocast they would be cast in every pass.
    for _, layer in tuner_layers(model):
        for name in PROJECTIONS:
            if hasattr(layer, name):
                getattr(layer, name).to(dtype)


def first_number(name: str, lora: Lora) -> float | None:
    """Return the first value of all numbers of a parameter; None: they are drawn at random."""
    if ".vera_lambda_d." in name:
        first: float = peft_options(lora.peft).d_initial
        return first
    constants = {
        **dict.fromkeys((".vera_lambda_b.", ".oft_R.", ".hada_w2_b.", ".lokr_w1."), 0.0),
        ".lokr_w1_a.": 0.0,
        ".ia3_l.": 1.0,
    }
    return next((value for part, value in constants.items() if part in f"{name}."), None)


def _check_blocks(linear: Mapping[str, nn.Module], options: OftOptions) -> None:
    """Refuse blocks of inputs that do not divide those of a layer, which PEFT would change."""
    key = "r" if options.r else "oft_block_size"
    size: int = getattr(options, key)
    inputs = {name: int(layer.in_features) for name, layer in linear.items()}  # type: ignore[arg-type]
    common = math.gcd(*inputs.values())
    for name, width in inputs.items():
        if width % size:
            best = next(d for d in range(min(size, common), 0, -1) if common % d == 0)
            raise UserError(
                f"peft.{key} is {size}, but {our_name(name)} has {width} inputs, which {size} does "
                f"not divide. Try --peft.{key} {best}, which divides those of all layers."
            )


def _scaled_inputs(linear: Mapping[str, nn.Module], base: BaseModel, lora: Lora) -> list[str]:
    """Names of the layers whose inputs are scaled, and not their outputs."""
    given = peft_options(lora.peft).feedforward_modules
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
                f"peft.feedforward_modules names {target}, which is not among the adapted layers "
                f"of {base.name}. Try --lora_targets '[{target}]', or remove it."
            )
        chosen |= matching
    return [name for name in linear if name in chosen]


def products(layer: Any) -> Iterator[tuple[str, Tensor, int]]:
    """Yield what the inputs of a layer of another type than LoRA are multiplied by.

    Yields:
        Name in the layer, a tensor that is trained if the factor is, and multiplications for each
        token.
    """
    size = layer.in_features * layer.out_features
    if hasattr(layer, PROJECTIONS[0]):
        rank = layer.r[TRAINED]
        for name, width in zip(PROJECTIONS, (layer.in_features, layer.out_features), strict=True):
            yield f"vera_lambda_{name}", getattr(layer, name)[TRAINED], rank * width
    for name, parameter in layer.named_parameters():
        if name.startswith("oft_R."):
            yield name, parameter, layer.in_features * layer.oft_block_size[TRAINED]
        # The product of the factors is a matrix like the layer's own.
        elif name.startswith(("hada_w1_a", "lokr_w1.", "lokr_w1_a")):
            yield name, parameter, size


@torch.no_grad()
def merged_layer(
    layer: Any, values: Mapping[str, Tensor], lora: Lora, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Merge an adapter into a layer as PEFT does: weight [out, in] and bias [out], float32.

    Args:
        layer: PEFT's, without numbers.
        values: of its parameters, by their names in it.
        lora: type and its options.
        weight: [out, in], the base layer's; None: zeros, where only the bias is wanted.
        bias: [out], the base layer's; None: zeros, where only the weight is wanted.
    """
    name = "layer"
    # Float32 of its own: the weight may be the base model's, which stays as it is.
    linear = nn.Linear(layer.in_features, layer.out_features)
    for parameter, given in ((linear.weight, weight), (linear.bias, bias)):
        parameter.copy_(given) if given is not None else parameter.zero_()
    model = nn.ModuleDict({name: linear})
    scaled = [name] * bool(getattr(layer, "is_feedforward", False))
    inject(model, peft_config(lora, [name], scaled_inputs=scaled), lora)
    adapted: Any = model[name]
    for buffers in PROJECTIONS:
        if hasattr(layer, buffers):
            shape = getattr(layer, buffers)[TRAINED].shape
            getattr(adapted, buffers)[TRAINED] = torch.empty(shape, device=_CPU)
    for key, value in values.items():
        parameter = adapted.get_parameter(key)
        holder, _, last = key.rpartition(".")
        setattr(
            adapted.get_submodule(holder),
            last,
            nn.Parameter(value.to(device=_CPU, dtype=torch.float32).view(parameter.shape)),
        )
    fill_tables(model, lora, _CPU)
    adapted.merge()
    return linear.weight, linear.bias


def parameter_of(kind: str) -> str:
    """Return the name of a parameter in its layer by that in PEFT's files: without the adapter's.

    They are `vera_lambda_b` and `oft_R.weight` in files, and `vera_lambda_b.default` and
    `oft_R.default.weight` in layers.
    """
    first, dot, rest = kind.partition(".")
    return f"{first}.{TRAINED}{dot}{rest}"


def stored_kind(parameter: str) -> str:
    """Return the name in PEFT's files of a parameter by its name in its layer."""
    return ".".join(word for word in parameter.split(".") if word != TRAINED)
