"""Adapters of other types than LoRA: PEFT's layers, and exchange with PEFT in both directions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ALL, TOKENS, TYPES, build, export, logits, lora_recipe, train
from messages import says
from torch import Tensor
from transformers_models import make_transformers_model

from ftkit.errors import UserError
from ftkit.extensions.other_models.reference import AdapterSwitch
from ftkit.extensions.peft_types.layers import Vera
from ftkit.models.flops import flops_per_token
from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.lora.adapter_files import check_adapter
from ftkit.models.pretrained.base_model import BaseModel, open_base
from ftkit.recipe.devices import Devices
from ftkit.recipe.plan import make_plan

TOLERANCE = 1e-5
NOT_FUSED = ["attention.dense", "dense_h_to_4h", "dense_4h_to_h"]
"""Layers of GPT-NeoX that have biases, and are no parts of others."""


@torch.no_grad()
def logits_of_peft(base: BaseModel, adapter: Path) -> Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base.directory, dtype=torch.float32)
    result: Tensor = PeftModel.from_pretrained(model, adapter).eval()(TOKENS).logits
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_training_starts_at_the_base_model(llama: BaseModel, name: str, dtype: torch.dtype) -> None:
    model = build(llama, lora_recipe(llama, **ALL, **TYPES[name]), dtype=dtype)
    plain = build(llama, lora_recipe(llama), dtype=dtype)
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("base_name", "name", "layers"),
    [
        *(("llama", name, {"lora_targets": "all-linear"}) for name in TYPES),
        *(("tied llama", name, ALL) for name in TYPES),
        *(("gpt-neox", name, {"lora_targets": NOT_FUSED}) for name in TYPES),
        ("llama", "ia3", {"lora_targets": ["q_proj", "layers.1.mlp.down_proj"]}),
        ("llama", "oft", {"lora_modules_to_save": ["embed_tokens", "norm"]}),
    ],
)
def test_an_adapter_loads_in_peft_and_here_with_equal_logits(
    bases: dict[str, BaseModel],
    base_name: str,
    name: str,
    layers: dict[str, Any],
    tmp_path: Path,
) -> None:
    base = bases[base_name]
    recipe = lora_recipe(base, **layers, **TYPES[name])
    model = train(build(base, recipe))
    adapter = export(model, base, recipe, tmp_path / "adapter")
    expected = logits(model)
    assert (expected - logits(build(base, lora_recipe(base)))).abs().max() > 1e-3
    torch.testing.assert_close(logits_of_peft(base, adapter), expected, rtol=0, atol=TOLERANCE)
    again = build(base, lora_recipe(base, adapter=adapter))
    torch.testing.assert_close(logits(again), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["vera", "loha", "ia3"])
def test_shared_experts_are_adapted_as_layers(name: str, tmp_path: Path) -> None:
    """PEFT stores LoRA of shared experts as that of experts' matrices; the other types are not."""
    base = open_base(str(make_transformers_model(tmp_path / "base", "qwen2_moe")))
    recipe = lora_recipe(base, lora_targets="all-linear", **TYPES[name])
    model = train(build(base, recipe))
    adapter = export(model, base, recipe, tmp_path / "adapter")
    assert "gate_proj" in (adapter / "adapter_config.json").read_text()
    found = logits_of_peft(base, adapter)
    torch.testing.assert_close(found, logits(model), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", TYPES)
def test_an_adapter_made_by_peft_continues_here(
    llama: BaseModel, name: str, tmp_path: Path
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    options = {key.partition("__")[2]: v for key, v in TYPES[name].items() if "__" in key}
    if name == "ia3":
        options = {"feedforward_modules": ["down_proj"]}
    layers = {"peft_type": name.upper(), "target_modules": ["v_proj", "down_proj"]}
    config = peft.get_peft_config(layers | {"task_type": "CAUSAL_LM", **options})
    model: Any = AutoModelForCausalLM.from_pretrained(llama.directory, dtype=torch.float32)
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = model.eval()(TOKENS).logits
    ours = build(llama, lora_recipe(llama, adapter=tmp_path / "adapter"))
    torch.testing.assert_close(logits(ours), expected, rtol=0, atol=TOLERANCE)


def test_the_matrices_of_vera_follow_from_their_seed_as_in_peft(
    llama: BaseModel, tmp_path: Path
) -> None:
    """Without them in its files, PEFT draws them again."""
    recipe = lora_recipe(
        llama, lora_targets="all-linear", **TYPES["vera"], seed=3, peft__save_projection=False
    )
    model = train(build(llama, recipe))
    adapter = export(model, llama, recipe, tmp_path / "adapter")
    with pytest.warns(UserWarning, match="vera_A"):
        found = logits_of_peft(llama, adapter)
    torch.testing.assert_close(found, logits(model), rtol=0, atol=TOLERANCE)
    assert json.loads((adapter / "adapter_config.json").read_text())["projection_prng_key"] == 3
    other = lora_recipe(llama, **TYPES["vera"], peft__projection_prng_key=4)
    first, second = (Vera(one).projections(96, 96)[0] for one in (other, recipe))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", TYPES)
def test_switched_off_an_adapter_leaves_the_base_model(llama: BaseModel, name: str) -> None:
    model = train(build(llama, lora_recipe(llama, **ALL, **TYPES[name])))
    plain = build(llama, lora_recipe(llama))
    with AdapterSwitch(model).off():
        assert torch.equal(logits(model), logits(plain))
    assert not torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("quantize", ["bnb.nf4", "bnb.int8"])
@pytest.mark.parametrize("name", ["vera", "oft", "ia3"])
def test_layers_lie_over_quantised_ones(llama: BaseModel, name: str, quantize: str) -> None:
    recipe = lora_recipe(llama, lora_targets="all-linear", quantize=quantize, **TYPES[name])
    model = build(llama, recipe)
    plain = build(llama, lora_recipe(llama, quantize=quantize))
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-6)
    _loss(model).backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is not None for p in trained.values())
    # At its beginning, VeRA has no gradients of the vectors below those that are zero.
    assert any(p.grad.abs().max() > 0 for p in trained.values() if p.grad is not None)


def _loss(model: LanguageModel) -> Tensor:
    result: Tensor = model(TOKENS, torch.arange(TOKENS.numel())).square().mean()
    return result


def test_flops_count_what_the_inputs_are_multiplied_by(llama: BaseModel) -> None:
    def flops(**keys: Any) -> float:
        recipe = lora_recipe(llama, lora_targets="all-linear", **keys)
        model = outline(llama, recipe, torch.float32)
        return flops_per_token(model, attention_length=8, label_fraction=0.5)

    shapes = [(64, 64), (64, 64), (32, 64), (32, 64), (96, 64), (96, 64), (64, 96)]
    inputs, outputs = (2 * sum(sizes) for sizes in zip(*((i, o) for o, i in shapes), strict=True))
    matrices = 2 * sum(o * i for o, i in shapes)
    # IA3 multiplies numbers alone. Below what is trained, 4 for each weight: there and back.
    frozen = flops(**TYPES["ia3"])
    assert flops(**TYPES["vera"]) - frozen == 4 * 16 * (inputs + outputs)
    assert flops(**TYPES["oft"]) - frozen == 6 * 16 * inputs
    assert flops(**TYPES["loha"]) - frozen == flops(**TYPES["lokr"]) - frozen == 6 * matrices


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "an unknown type": ({"peft": "adalora"}, ("peft", "adalora", "lora, vera, oft")),
    "an unknown option": ({"peft": "vera", "peft__rank": 4}, ("peft.rank", "vera_dropout")),
    "a key of LoRA": ({"peft": "vera", "lora_r": 4}, ("lora_r", "vera", "peft.r")),
    "a variant of LoRA": ({"peft": "oft", "lora_variant": "dora"}, ("lora_variant", "oft")),
    "a rank below 1": ({"peft": "vera", "peft__r": 0}, ("peft.r", "at least 1")),
    "a word as a number": ({"peft": "loha", "peft__alpha": "big"}, ("peft.alpha", "big")),
    "all of the inputs dropped": (
        {"peft": "vera", "peft__vera_dropout": 1.0},
        ("peft.vera_dropout", "below 1"),
    ),
    "two sizes of blocks": (
        {"peft": "oft", "peft__r": 4, "peft__oft_block_size": 4},
        ("peft.oft_block_size", "peft.r"),
    ),
    "a packed base layer": ({"peft": "loha", "quantize": "bnb.nf4"}, ("quantize", "loha")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_a_type_lacks_are_refused_by_name(llama: BaseModel, case: str) -> None:
    changes, words = REFUSED[case]
    recipe = lora_recipe(llama, **{"lora_dropout": 0.05, **changes})
    with pytest.raises(UserError) as caught:
        make_plan(recipe, Devices(accelerator="cpu", count=1))
    assert says(str(caught.value), *words)


def test_blocks_that_do_not_divide_the_inputs_are_refused(llama: BaseModel) -> None:
    recipe = lora_recipe(llama, lora_targets="all-linear", peft="oft", peft__oft_block_size=64)
    with pytest.raises(UserError) as caught:
        build(llama, recipe)
    assert says(
        str(caught.value), "peft.oft_block_size is 64", "96 inputs", "--peft.oft_block_size 32"
    )


def test_a_part_of_a_fused_layer_is_refused(bases: dict[str, BaseModel]) -> None:
    base = bases["gpt-neox"]
    with pytest.raises(UserError) as caught:
        check_adapter(base, lora_recipe(base, **TYPES["oft"]))
    assert says(str(caught.value), "peft is oft", "query_key_value", "--lora_targets")


@pytest.mark.parametrize("name", ["loha", "lokr"])
def test_a_packed_base_layer_is_refused_by_commands_too(
    llama: BaseModel, name: str, tmp_path: Path
) -> None:
    recipe = lora_recipe(llama, **TYPES[name])
    adapter = export(build(llama, recipe), llama, recipe, tmp_path / "adapter")
    with pytest.raises(UserError) as caught:
        build(llama, lora_recipe(llama, adapter=adapter, quantize="bnb.nf4"))
    assert says(str(caught.value), "quantize is bnb.nf4", f"peft is {name}")


def test_matrices_of_vera_that_no_seed_gives_are_refused(llama: BaseModel, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    recipe = lora_recipe(llama, **TYPES["vera"])
    adapter = export(build(llama, recipe), llama, recipe, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.vera_A"] *= 2
    save_file(tensors, file)
    with pytest.raises(UserError) as caught:
        build(llama, lora_recipe(llama, adapter=adapter))
    assert says(str(caught.value), "vera_A", "projection_prng_key")
