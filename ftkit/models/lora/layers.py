"""LoRA layers of PEFT, added to the model.

LoRA: Hu et al. 2021, https://arxiv.org/abs/2106.09685. rsLoRA (scaled by the square root of the
rank): Kalajdzievski 2023, https://arxiv.org/abs/2312.03732.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn as nn

from ftkit.errors import UserError
from ftkit.models.lora.experts import ExpertPairs, add_expert_pairs
from ftkit.models.lora.targets import INITIAL, TRAINED, adapted_layers, our_name, whole_layers
from ftkit.models.lora.variants import Dora, FromInitial, Magnitude, Plain
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.recipe.recipe import LoraRecipe
from ftkit.utils.imports import hidden


def add_adapter(model: nn.Module, base: BaseModel, recipe: LoraRecipe) -> None:
    """Freeze the model and add LoRA matrices to the chosen layers; no memory is taken.

    Args:
        model: outlined on the meta device.
        base: gives Hugging Face's names of the layers.
        recipe: its LoRA keys choose layers, rank and variant.

    Raises:
        UserError: a name matches no layer, or one that cannot be adapted or trained.
    """
    model.requires_grad_(False)
    targets = adapted_layers(model, base, recipe)
    saved = whole_layers(model, base, recipe)
    if targets:
        with _without_bitsandbytes():
            _inject(model, recipe, targets)
    if recipe.lora_experts:
        add_expert_pairs(model, base, recipe)
    for name, layer in lora_layers(model):
        layer.cast_input_dtype_enabled = False  # the variants handle autocast themselves
        layer.lora_variant[TRAINED] = Plain()
        if recipe.lora_variant == "dora":
            layer.lora_magnitude_vector[TRAINED] = Magnitude(layer.out_features)
            layer.lora_variant[TRAINED] = Dora()
        if recipe.lora_init != "default":
            _relate_to_initial(name, layer, recipe)
    for module in saved:
        module.requires_grad_(True)


def _inject(model: nn.Module, recipe: LoraRecipe, targets: list[str]) -> None:
    from peft.tuners.lora import LoraConfig, LoraModel  # takes a second

    config = LoraConfig(
        r=recipe.lora_r,
        # PEFT's annotation is int, but it only divides by the rank.
        lora_alpha=recipe.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=recipe.lora_dropout,
        use_rslora=recipe.lora_variant == "rslora",
        target_modules=targets,
    )
    # Adapters on the meta device, like the model.
    LoraModel(model, config, adapter_name=TRAINED, low_cpu_mem_usage=True)


@contextmanager
def _without_bitsandbytes() -> Iterator[None]:
    """Keep PEFT from importing bitsandbytes, which takes seconds for all of torch's compiler."""
    # PEFT 0.21 imports it wherever it is installed, and caches whether it is. Quantised layers have
    # imported it before, but need none of PEFT's layers for it.
    with hidden("bitsandbytes"):
        from peft.import_utils import is_bnb_4bit_available, is_bnb_available

        answers = (is_bnb_available, is_bnb_4bit_available)
        for answer in answers:
            answer.cache_clear()
        try:
            yield
        finally:
            for answer in answers:
                answer.cache_clear()


def _relate_to_initial(name: str, layer: Any, recipe: LoraRecipe) -> None:
    """Add a frozen copy of a layer's initial matrices, on the meta device."""
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
    """Yield name and module of every adapted linear layer."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and not isinstance(module, ExpertPairs):
            yield name, module
