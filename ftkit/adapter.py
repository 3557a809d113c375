"""LoRA through PEFT: which layers, their first values, and the adapter on disk."""

import math
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.base.base_model import BaseModel, hf_name
from ftkit.base.tensor_files import sync
from ftkit.checkpoint.shards import save_tensors
from ftkit.errors import UserError
from ftkit.recipe import LoraRecipe

ADAPTED_LAYERS = {
    "lora_query": ("q_proj",),
    "lora_key": ("k_proj",),
    "lora_value": ("v_proj",),
    "lora_projection": ("attn.proj",),
    "lora_mlp": ("mlp.fc", "mlp.fc_1", "mlp.fc_2", "mlp.proj"),
    "lora_head": ("lm_head",),
}
"""Recipe keys and the layers (name endings) that they adapt."""


def add_adapter(model: nn.Module, recipe: LoraRecipe) -> None:
    """Freeze the model and put LoRA matrices beside the chosen layers."""
    from peft import LoraConfig, inject_adapter_in_model

    model.requires_grad_(False)
    if recipe.quantize is not None:  # PEFT then chooses its LoRA layers for quantised ones
        bits = 8 if recipe.quantize == "bnb.int8" else 4
        setattr(model, f"is_loaded_in_{bits}bit", True)
    config = LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=adapted_layers(model, recipe),
    )
    inject_adapter_in_model(config, model, low_cpu_mem_usage=True)


def adapted_layers(model: nn.Module, recipe: LoraRecipe) -> list[str]:
    """Full names of the layers that the recipe's LoRA keys choose."""
    endings = tuple(
        f".{ending}"
        for key, layer_endings in ADAPTED_LAYERS.items()
        if getattr(recipe, key)
        for ending in layer_endings
    )
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.endswith(endings)
    ]


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to the adapter."""
    return ".lora_" in name


def initial_adapter(name: str, shape: torch.Size, seed: int) -> Tensor:
    """The first values of a LoRA matrix, the same on every device and layout.

    A is drawn as PEFT draws it (Kaiming-uniform), B is zero, so that training starts at the base
    model. Each matrix has a generator of its own: no other matrix changes its values.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
    return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)


def check_adapter(base: BaseModel) -> None:
    """Refuse LoRA where its result could not be written as a PEFT adapter.

    Raises:
        UserError: the Hugging Face model fuses query, key and value into one layer.
    """
    if hf_name(base, "transformer.h.0.attn.qkv.q_proj") is None:
        raise UserError(
            f"checkpoint_dir {base.name}: LoRA is not supported for this model, because its "
            "Hugging Face version has no separate query, key and value layers that a PEFT adapter "
            "could name. Try ftkit finetune_full, or --checkpoint.save false to measure only."
        )


def save_adapter(
    weights: Iterable[tuple[str, Tensor]], base: BaseModel, recipe: LoraRecipe, out: Path
) -> None:
    """Write the LoRA weights as a PEFT adapter of the Hugging Face model.

    The directory appears complete or not at all.

    Args:
        weights: our names and values of all trained parameters.
        base: the model that is adapted.
        recipe: the adapter's settings.
        out: a directory that does not exist yet.
    """
    from peft import LoraConfig

    tensors = {}
    targets = set()
    for name, tensor in weights:
        layer, _, matrix = name.rpartition(".lora_")
        theirs = hf_name(base, layer)
        assert theirs is not None, "check_adapter refuses these families"
        targets.add(theirs.rpartition(".")[2])
        matrix = matrix.replace(".default", "")
        tensors[f"base_model.model.{theirs}.lora_{matrix}"] = tensor.cpu()
    config = LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base.name if base.directory is None else str(base.directory),
        inference_mode=True,
    )
    config.target_modules = sorted(targets)  # LoraConfig made it a set, without an order
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save_tensors(tensors, partial / "adapter_model.safetensors", {})
        config.save_pretrained(str(partial))
        for path in (*partial.iterdir(), partial):
            sync(path)
        partial.rename(out)
        sync(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
