"""LoRA and its variants through PEFT: which layers, their first values, what they compute."""

import difflib
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.base.base_model import BaseModel, parameter_shapes
from ftkit.base.naming import LITGPT
from ftkit.errors import UserError
from ftkit.recipe import LoraRecipe

TRAINED, INITIAL = "default", "initial"
"""Names of the low-rank matrices of a layer: those that are trained, and, where their first values
are taken from the base weight, a frozen copy of these."""
ADAPTED_LAYERS = {
    "lora_query": ("q_proj",),
    "lora_key": ("k_proj",),
    "lora_value": ("v_proj",),
    "lora_projection": ("attn.proj",),
    "lora_mlp": ("mlp.fc", "mlp.fc_1", "mlp.fc_2", "mlp.proj"),
    "lora_head": ("lm_head",),
}
"""Recipe keys and the layers (name endings) that they adapt."""


class Magnitude(nn.Module):
    """DoRA's trained length of each row of a weight."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows))

    def forward(self, result: Tensor, norms: Tensor) -> Tensor:
        """The result of rows of the length `norms`, had they the trained lengths."""
        return result * (self.weight / norms.to(self.weight.dtype)).to(result.dtype)


class Dora:
    """DoRA for every layer and strategy that ftkit has, as a variant of PEFT's LoRA layers.

    PEFT's own reads bitsandbytes' parameters and multiplies by the base weight a second time if
    there is dropout. Here dropout is on the input of the low-rank matrices alone; without it, and
    in evaluation, the results are PEFT's.
    """

    @staticmethod
    def forward(
        module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any
    ) -> Tensor:
        """The layer's result with adapted directions and trained lengths of the rows."""
        a, b = module.lora_A[active_adapter], module.lora_B[active_adapter]
        scaling = module.scaling[active_adapter]
        update = b(a(module.lora_dropout[active_adapter](x))) * scaling
        base = module.get_base_layer()
        bias = base.bias
        norms = row_norms(numbers_of(base), a.weight, b.weight, scaling)
        magnitude = module.lora_magnitude_vector[active_adapter]
        if bias is None:
            return magnitude(result + update, norms)
        return magnitude(result - bias + update, norms) + bias


class FromInitial:
    """LoRA relative to its first values, as a variant of PEFT's LoRA layers (PiSSA, OLoRA).

    Taking the first product off the base weight would round that weight, and would have to be
    repeated exactly wherever training goes on. Taking it off the result is the same in exact
    arithmetic, starts at the base model in every number format, on shards and quantised weights
    too, and is what a PEFT adapter of the original model needs.
    """

    @staticmethod
    def forward(
        module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any
    ) -> Tensor:
        """The layer's result with what its low-rank product has changed."""
        a, b, dropout = module.lora_A, module.lora_B, module.lora_dropout[active_adapter]
        trained = b[active_adapter](a[active_adapter](dropout(x)))
        difference: Tensor = trained - b[INITIAL](a[INITIAL](x))
        return result + difference * module.scaling[active_adapter]


def numbers_of(layer: Any) -> Tensor:
    """[out, in], the weight of a linear layer, unpacked if it is quantised."""
    weight: Tensor = layer.weight
    return layer.unpacked(weight) if hasattr(layer, "unpacked") else weight


@torch.no_grad()
def row_norms(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """[out] float32, the lengths of the rows of an adapted weight; no gradient, as in the paper."""
    with torch.autocast(weight.device.type, enabled=False):
        adapted = torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)
        return torch.linalg.vector_norm(adapted, dim=1)


@torch.no_grad()
def merged(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None
) -> Tensor:
    """[out, in] float32, the weight of a plain layer that computes what an adapted one does.

    Args:
        weight: [out, in], the base layer's.
        a: [rank, in].
        b: [out, rank].
        scaling: of their product.
        magnitude: [out], DoRA's trained lengths of the rows; None: not DoRA.
    """
    adapted = torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)
    if magnitude is not None:
        lengths = torch.linalg.vector_norm(adapted, dim=1)
        adapted *= (magnitude.float() / lengths)[:, None]
    return adapted


def add_adapter(model: nn.Module, base: BaseModel, recipe: LoraRecipe) -> None:
    """Freeze the model and put LoRA matrices beside the chosen layers; no memory is taken.

    Args:
        model: outlined on the meta device.
        base: tells Hugging Face's names of the layers.
        recipe: its LoRA keys choose layers, rank and variant.

    Raises:
        UserError: a name matches no layer, or one that cannot be adapted or trained so.
    """
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds

    model.requires_grad_(False)
    if recipe.quantize is not None:  # PEFT then chooses its LoRA layers for quantised ones
        bits = 8 if recipe.quantize == "bnb.int8" else 4
        setattr(model, f"is_loaded_in_{bits}bit", True)
    targets = adapted_layers(model, base, recipe)
    saved = _whole_layers(model, base, recipe)
    config = LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=recipe.lora_dropout,
        use_rslora=recipe.lora_variant == "rslora",
        target_modules=targets,
    )
    inject_adapter_in_model(config, model, adapter_name=TRAINED, low_cpu_mem_usage=True)
    for name, layer in lora_layers(model):
        if recipe.lora_variant == "dora":
            layer.lora_magnitude_vector[TRAINED] = Magnitude(layer.out_features)
            layer.lora_variant[TRAINED] = Dora()
        if recipe.lora_init != "default":
            _relate_to_initial(name, layer, recipe)
    for module in saved:
        module.requires_grad_(True)


def _relate_to_initial(name: str, layer: Any, recipe: LoraRecipe) -> None:
    """Outline a frozen copy of a layer's first values."""
    most = min(layer.in_features, layer.out_features)
    if recipe.lora_r > most:
        raise UserError(
            f"lora_r is {recipe.lora_r}, but {our_name(name)} has {most} singular values, of "
            f"which lora_init {recipe.lora_init} takes that many. Try --lora_r {most}."
        )
    layer.lora_A[INITIAL] = nn.Linear(layer.in_features, recipe.lora_r, bias=False)
    layer.lora_B[INITIAL] = nn.Linear(recipe.lora_r, layer.out_features, bias=False)
    layer.lora_variant[TRAINED] = FromInitial()
    for matrices in (layer.lora_A, layer.lora_B):
        matrices[INITIAL].requires_grad_(False)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of every adapted layer."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            yield name, module


def our_name(name: str) -> str:
    """The name of a parameter or module without the wrapper's prefix."""
    return name.removeprefix("gpt.").removeprefix("head.").replace(".base_layer.", ".")


def names_of(base: BaseModel, ours: str) -> tuple[str, ...]:
    """Hugging Face's full name of a layer of ours.

    Where that is a part of theirs, there are two: theirs followed by ours, and theirs.
    """
    theirs, fused = (base.family.naming if base.family else LITGPT).stored_in(ours)
    return (theirs,) if fused is None else (f"{theirs}.{ours.rpartition('.')[2]}", theirs)


def adapted_layers(model: nn.Module, base: BaseModel, recipe: LoraRecipe) -> list[str]:
    """Full names of the layers that the recipe's LoRA keys choose."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if recipe.lora_targets is None:
        endings = tuple(
            f".{ending}"
            for key, layer_endings in ADAPTED_LAYERS.items()
            if getattr(recipe, key)
            for ending in layer_endings
        )
        return [name for name in linear if name.endswith(endings)]
    targets = recipe.lora_targets
    names = {name: names_of(base, our_name(name)) for name in linear}
    chosen: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        found = {name for name, theirs in names.items() if _are_called(theirs, target)}
        if not found and isinstance(targets, str):
            found = {name for name, theirs in names.items() if _match(theirs, target)}
        if not found:
            raise UserError(
                f"lora_targets names {target}, which is no linear layer of {base.name}. "
                + _advice("lora_targets", target, names.values())
            )
        chosen |= found
    return [name for name in linear if name in chosen]


def _whole_layers(model: nn.Module, base: BaseModel, recipe: LoraRecipe) -> list[nn.Module]:
    """The layers that are trained whole."""
    asked = recipe.lora_modules_to_save or []
    if not asked:
        return []
    modules = {our_name(name): module for name, module in model.named_modules()}
    names = dict.fromkeys(name.rpartition(".")[0] for name in parameter_shapes(base))
    names["lm_head"] = None
    theirs = {ours: names_of(base, ours)[-1:] for ours in names}
    adapted = {our_name(name) for name in adapted_layers(model, base, recipe)}
    chosen = []
    for target in asked:
        found = [ours for ours, their in theirs.items() if _are_called(their, target)]
        if not found:
            raise UserError(
                f"lora_modules_to_save names {target}, which is no layer of {base.name}. "
                + _advice("lora_modules_to_save", target, theirs.values())
            )
        for ours in found:
            shared = getattr(model, "tied", False) and ours in ("lm_head", "transformer.wte")
            if ours in adapted or (shared and "lm_head" in adapted):
                raise UserError(
                    f"lora_modules_to_save names {target}, which is adapted by LoRA too (its "
                    "weight may be shared with the head). Remove it from one of the two."
                )
            module = modules[ours]
            if hasattr(module, "unpacked"):
                raise UserError(
                    f"lora_modules_to_save names {target}, but quantize {recipe.quantize} keeps "
                    "it in a few bits, which cannot be trained. Try --lora_targets instead."
                )
            chosen.append(module)
    return chosen


def _are_called(names: tuple[str, ...], target: str) -> bool:
    """Whether one of the names is the target, or ends in it."""
    return any(name == target or name.endswith(f".{target}") for name in names)


def _match(names: tuple[str, ...], pattern: str) -> bool:
    """Whether a regular expression matches one of the names as a whole."""
    try:
        return any(re.fullmatch(pattern, name) is not None for name in names)
    except re.error as error:
        raise UserError(
            f"lora_targets is {pattern!r}, which is no regular expression ({error}). "
            "Try --lora_targets '.*(q_proj|v_proj)'."
        ) from None


def _advice(key: str, target: str, names: Iterable[tuple[str, ...]]) -> str:
    short = list(dict.fromkeys(name.rpartition(".")[2] for many in names for name in many))
    close = difflib.get_close_matches(target.rpartition(".")[2], short, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"It has {', '.join(short)}. Try --{key} '[{short[0]}]'."


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to the adapter."""
    return ".lora_" in name


def initial_adapter(name: str, shape: torch.Size, seed: int) -> Tensor:
    """The first values of a LoRA matrix, the same on every device and layout.

    A is drawn as PEFT draws it (Kaiming-uniform), B is zero, so that training starts at the base
    model. Each matrix has a generator of its own: no other matrix changes its values. They are
    float32 whatever the precision of the run, in which other numbers would be drawn.
    """
    if ".lora_B." in name:
        return torch.zeros(shape, dtype=torch.float32, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(seed ^ zlib.crc32(name.encode()))
    matrix = torch.empty(shape, dtype=torch.float32, device="cpu")
    return nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=generator)


def follows_from_base(name: str, recipe: LoraRecipe) -> bool:
    """Whether the first values of an adapter's parameter hang on the base weight."""
    return recipe.lora_init != "default" or ".lora_magnitude_vector." in name


def adapter_from_base(weight: Tensor, layer: Any, recipe: LoraRecipe) -> Mapping[str, Tensor]:
    """First values that follow from the base weight, by the end of the parameter's name.

    Args:
        weight: [out, in], what the layer computes with.
        layer: that is adapted.
        recipe: its LoRA keys.
    """
    numbers = weight.float()
    if recipe.lora_variant == "dora":
        return {f"lora_magnitude_vector.{TRAINED}.weight": torch.linalg.vector_norm(numbers, dim=1)}
    rank, scaling = recipe.lora_r, layer.scaling[TRAINED]
    if recipe.lora_init == "pissa":
        left, values, right = torch.linalg.svd(numbers, full_matrices=False)
        root = (values[:rank] / scaling).sqrt()
        a, b = root[:, None] * right[:rank], left[:, :rank] * root
    else:
        q, r = torch.linalg.qr(numbers)
        a, b = r[:rank], q[:, :rank]
    return {
        f"lora_{matrix}.{adapter}.weight": tensor
        for matrix, tensor in (("A", a), ("B", b))
        for adapter in (TRAINED, INITIAL)
    }
