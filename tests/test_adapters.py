"""LoRA and its variants: what is trained, and adapters that are PEFT's, in both directions."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_llama, make_tokenizer
from torch import Tensor

from ftkit.adapter import check_adapter, check_shapes, read_adapter, save_adapter
from ftkit.adapter_config import with_adapter
from ftkit.base.base_model import BaseModel, open_base
from ftkit.errors import UserError
from ftkit.lora import is_adapter
from ftkit.model import LanguageModel, fill, our_name, outline, trained_weights
from ftkit.parsing import read_recipe
from ftkit.planning import Devices, make_plan
from ftkit.recipe import LoraRecipe
from ftkit.sharding import Whole

CPU = torch.device("cpu")
ALL = dict.fromkeys(("lora_key", "lora_projection", "lora_mlp", "lora_head"), True)
TOLERANCE = 1e-5
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
        shapes = {our_name(n): p.shape for n, p in model.named_parameters() if p.requires_grad}
        check_shapes(found, shapes, recipe.adapter)
        adapter = found.tensors
    fill(
        model,
        base,
        sharding=Whole(),
        device=CPU,
        rope_length=32,
        seed=recipe.seed,
        adapter=adapter,
        progress=lambda done, total: None,
    )
    return model.eval()


def train(model: LanguageModel) -> LanguageModel:
    """Move every trained number, as training would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def logits(model: LanguageModel) -> Tensor:
    result: Tensor = model(TOKENS, torch.arange(TOKENS.numel()))
    return result.view(*TOKENS.shape, -1)


@torch.no_grad()
def logits_of_peft(base: BaseModel, adapter: Path | None) -> Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base.directory, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    result: Tensor = model.eval()(TOKENS).logits
    return result


def export(model: LanguageModel, base: BaseModel, recipe: LoraRecipe, out: Path) -> Path:
    check_adapter(base, recipe)
    save_adapter(trained_weights(model, Whole()), base, recipe, out)
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


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BaseModel]:
    directory = tmp_path_factory.mktemp("bases")
    return {
        name: open_base(str(make(directory / name.replace(" ", "-"))))
        for name, make in MAKERS.items()
    }


@pytest.fixture(scope="module")
def llama(bases: dict[str, BaseModel]) -> BaseModel:
    return bases["llama"]


# --- Variants -----------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"lora_variant": "dora"},
    "rslora": {"lora_variant": "rslora"},
    "pissa": {"lora_init": "pissa"},
    "olora": {"lora_init": "olora"},
    "rslora with pissa": {"lora_init": "pissa", "lora_variant": "rslora"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["llama", "tied llama", "gpt-neox"])
def test_training_starts_exactly_at_the_base_model(
    bases: dict[str, BaseModel], name: str, variant: str, dtype: torch.dtype
) -> None:
    model = build(bases[name], lora_recipe(bases[name], **ALL, **VARIANTS[variant]), dtype=dtype)
    plain = build(bases[name], lora_recipe(bases[name]), dtype=dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-6)
    else:
        assert torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MAKERS)
def test_an_adapter_loads_in_peft_with_equal_logits(
    bases: dict[str, BaseModel], name: str, variant: str, tmp_path: Path
) -> None:
    base = bases[name]
    if variant == "dora" and base.family is not None and base.family.naming.fused:
        pytest.skip("refused, see below")
    recipe = lora_recipe(base, **ALL, **VARIANTS[variant])
    model = train(build(base, recipe))
    adapter = export(model, base, recipe, tmp_path / "adapter")
    ours, theirs = logits(model), logits_of_peft(base, adapter)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert (ours - logits_of_peft(base, None)).abs().max() > 0.05
    assert any("lora_B" in key for key in load_file(adapter / "adapter_model.safetensors"))


@pytest.mark.parametrize("name", MAKERS)
def test_an_adapter_is_read_back_as_it_was_written(
    bases: dict[str, BaseModel], name: str, tmp_path: Path
) -> None:
    base = bases[name]
    recipe = lora_recipe(base, lora_head=True, lora_mlp=True, lora_r=4, lora_alpha=6)
    model = train(build(base, recipe))
    adapter = export(model, base, recipe, tmp_path / "adapter")
    again = lora_recipe(base, adapter=adapter)
    assert (again.lora_r, again.lora_alpha) == (4, 6)
    found = build(base, again)
    assert torch.equal(logits(found), logits(model))
    names = {our_name(name) for name, _ in model.named_parameters() if is_adapter(name)}
    assert names == {our_name(name) for name, _ in found.named_parameters() if is_adapter(name)}
    copy = export(found, base, again, tmp_path / "copy")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (copy / file).read_bytes() == (adapter / file).read_bytes()
