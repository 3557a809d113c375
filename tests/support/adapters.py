"""Adapters of tiny models of several families: made, trained for a step, saved."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from computed import filled
from tiny import make_llama, make_tokenizer
from torch import Tensor

from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.load_weights import Whole, result_weights
from ftkit.models.lora.adapter_files import check_adapter, save_adapter
from ftkit.models.lora.adapter_reading import check_shapes, read_adapter
from ftkit.models.pretrained.base_model import BaseModel, open_base
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.peft_adapter import with_adapter
from ftkit.recipe.recipe import LoraRecipe

CPU = torch.device("cpu")


ALL = dict.fromkeys(("lora_key", "lora_projection", "lora_mlp", "lora_head"), True)


TOKENS = torch.arange(24).view(2, 12) * 7 % 397


def lora_recipe(base: BaseModel, **keys: Any) -> LoraRecipe:
    values = {"checkpoint_dir": str(base.directory), "lora_dropout": 0} | keys
    pairs = [
        (k.replace("__", "."), str(v) if isinstance(v, Path) else json.dumps(v))
        for k, v in values.items()
    ]
    recipe = with_adapter(read_recipe([], pairs, method="lora"))
    assert isinstance(recipe, LoraRecipe)
    return recipe


def build(
    base: BaseModel, recipe: LoraRecipe, *, dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """The model at the start of training."""
    model = outline(base, recipe, dtype)
    adapter = None
    if recipe.adapter is not None:
        found = read_adapter(recipe.adapter, base)
        check_shapes(found, model, recipe.adapter)
        adapter = found.tensors
    return filled(model, base, rope_length=32, seed=recipe.seed, adapter=adapter).eval()


def train(model: LanguageModel) -> LanguageModel:
    """Move every trained number, as training would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)  # type: ignore[misc]
    return model


@torch.no_grad()
def logits(model: LanguageModel) -> Tensor:
    result: Tensor = model(TOKENS, torch.arange(TOKENS.numel()))
    return result.view(*TOKENS.shape, -1)


def export(model: LanguageModel, base: BaseModel, recipe: LoraRecipe, out: Path) -> Path:
    check_adapter(base, recipe)
    parameters = result_weights(model, Whole())
    save_adapter(parameters, base, recipe, out, tie_embeddings=recipe.train.tie_embeddings)
    return out


def make_phi3(directory: Path) -> Path:
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        sliding_window=None,
    )
    return save(Phi3ForCausalLM, config, directory)


def make_neox(directory: Path) -> Path:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    return save(GPTNeoXForCausalLM, config, directory)


def save(model_class: Any, config: Any, directory: Path) -> Path:
    directory.mkdir()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model_class(config).save_pretrained(directory)
    make_tokenizer(directory)
    return directory


MAKERS: dict[str, Callable[[Path], Path]] = {
    "llama": make_llama,
    "tied llama": lambda directory: make_llama(directory, tie_word_embeddings=True),
    "phi-3": make_phi3,
    "gpt-neox": make_neox,
}


FUSED = ("phi-3", "gpt-neox")
"""Families whose Hugging Face model itself fuses layers."""


VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"lora_variant": "dora"},
    "rslora": {"lora_variant": "rslora"},
    "pissa": {"lora_init": "pissa"},
    "olora": {"lora_init": "olora"},
    "rslora with pissa": {"lora_init": "pissa", "lora_variant": "rslora"},
}


TYPES: dict[str, dict[str, Any]] = {
    "vera": {"peft": "vera", "peft__r": 16},
    "oft": {"peft": "oft", "peft__oft_block_size": 16},
    "loha": {"peft": "loha"},
    "lokr": {"peft": "lokr", "peft__r": 2, "peft__decompose_both": True},
    "ia3": {"peft": "ia3"},
}
"""Types of adapters beside LoRA, with options that fit the tiny models."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BaseModel]:
    """Base models of several families, whose layers LitGPT's model has apart."""
    directory = tmp_path_factory.mktemp("bases")
    return {
        name: open_base(str(make(directory / name.replace(" ", "-"))), "litgpt")
        for name, make in MAKERS.items()
    }


@pytest.fixture(scope="module")
def llama(bases: dict[str, BaseModel]) -> BaseModel:
    return bases["llama"]
