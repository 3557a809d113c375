"""LoRA and its variants: trained layers, and exchange of adapters with PEFT in both directions."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ALL, FUSED, MAKERS, TOKENS, VARIANTS, build, export, logits, lora_recipe, train
from messages import message_of, says
from safetensors.torch import load_file, save_file
from tiny import make_llama
from torch import Tensor
from transformers_models import MORE_MODELS, NEWEST, make_transformers_model

from ftkit.errors import UserError
from ftkit.launch.supervisor import launch
from ftkit.models.language_model import outline
from ftkit.models.lora.adapter_files import check_adapter
from ftkit.models.lora.adapter_reading import read_adapter
from ftkit.models.lora.layers import initial_adapter
from ftkit.models.lora.peft_layers import without_bitsandbytes
from ftkit.models.lora.targets import our_name, skipped_targets, unadapted_experts
from ftkit.models.pretrained.base_model import BaseModel, open_base
from ftkit.recipe.adapter_types import is_adapter
from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import make_plan
from ftkit.recipe.recipe import Lora
from ftkit.strategies.strategy import make_strategy

TOLERANCE = 1e-5


@torch.no_grad()
def logits_of_peft(
    base: BaseModel, adapter: Path | None, weights: dict[str, Tensor] | None = None
) -> Tensor:
    """Of the Hugging Face model, with other weights in places if there are any."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base.directory, dtype=torch.float32)
    for name, value in (weights or {}).items():
        theirs = base.naming.theirs(name)
        assert theirs is not None
        model.get_parameter(theirs).data.copy_(value)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    result: Tensor = model.eval()(TOKENS).logits
    return result


# --- Variants -----------------------------------------------------------------------------------


@pytest.mark.extensions
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


def test_an_adapter_begins_with_the_same_numbers_in_every_precision() -> None:
    """In 16 bits, which are the default of a run in bf16-true, others would be drawn."""
    name, shape = "transformer.h.0.attn.proj.lora_A.default.weight", torch.Size([8, 64])
    expected = initial_adapter(name, shape, 1, Lora())
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = initial_adapter(name, shape, 1, Lora())
    finally:
        torch.set_default_dtype(usual)
    assert torch.equal(found, expected) and found.dtype == torch.float32


@pytest.mark.parametrize("matrix", ["lora_A", "lora_B"])
def test_an_adapter_is_drawn_on_the_host_whatever_the_default_device_is(matrix: str) -> None:
    name, shape = f"transformer.h.0.attn.proj.{matrix}.default.weight", torch.Size([8, 64])
    expected = initial_adapter(name, shape, 1, Lora())
    with torch.device("meta"):  # Lightning makes the GPU the default while a model is filled
        found = initial_adapter(name, shape, 1, Lora())
    assert found.device.type == "cpu" and torch.equal(found, expected)


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        (name, variant)
        for name in MAKERS
        for variant in VARIANTS
        if not (variant == "dora" and name in FUSED)  # refused, see below
    ],
)
def test_an_adapter_loads_in_peft_with_equal_logits(
    bases: dict[str, BaseModel], name: str, variant: str, tmp_path: Path
) -> None:
    base = bases[name]
    recipe = lora_recipe(base, **ALL, **VARIANTS[variant])
    model = train(build(base, recipe))
    adapter = export(model, base, recipe, tmp_path / "adapter")
    ours, theirs = logits(model), logits_of_peft(base, adapter)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert (ours - logits_of_peft(base, None)).abs().max() > 0.05
    assert any("lora_B" in key for key in load_file(adapter / "adapter_model.safetensors"))


@pytest.mark.extensions
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
    assert settings_of(copy) == settings_of(adapter)
    tensors = load_file(copy / "adapter_model.safetensors")
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        assert torch.equal(tensors.pop(name), tensor)
    assert not tensors


@pytest.mark.extensions
@pytest.mark.parametrize("head", ["embed_out", "lm_head"])
@pytest.mark.parametrize("implementation", ["litgpt", "transformers"])
def test_the_head_of_gpt_neox_is_found_by_its_name_in_any_version_of_transformers(
    bases: dict[str, BaseModel], implementation: Any, head: str, tmp_path: Path
) -> None:
    base = open_base(str(bases["gpt-neox"].directory), implementation)
    keys = {"lora_targets": ["dense", head], "model_implementation": implementation}
    recipe = lora_recipe(base, **keys)
    written = export(train(build(base, recipe)), base, recipe, tmp_path / "adapter")
    expected = read_adapter(written, base).tensors
    file, config = written / "adapter_model.safetensors", written / "adapter_config.json"
    renamed = re.compile("embed_out|lm_head")
    tensors = {renamed.sub(head, name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    config.write_text(renamed.sub(head, config.read_text()))
    found = read_adapter(written, base).tensors
    assert found.keys() == expected.keys() and any("lm_head" in name for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert adapted(base, adapter=written) == adapted(base, **keys)


@pytest.mark.extensions
def test_an_adapter_of_fused_layers_that_adapts_parts_of_them(
    bases: dict[str, BaseModel], tmp_path: Path
) -> None:
    base = bases["phi-3"]
    recipe = lora_recipe(base, lora_targets=["q_proj", "layers.1.mlp.gate_up_proj.fc_2"])
    model = train(build(base, recipe))
    adapter = export(model, base, recipe, tmp_path / "adapter")
    torch.testing.assert_close(logits(model), logits_of_peft(base, adapter), rtol=0, atol=TOLERANCE)
    assert torch.equal(logits(build(base, lora_recipe(base, adapter=adapter))), logits(model))


@pytest.mark.parametrize("model", ["falcon_h1", "jamba", "mamba2", "nemotron_h"])
def test_layers_whose_weights_kernels_read_are_not_adapted(tmp_path: Path, model: str) -> None:
    base = open_base(str(make_transformers_model(tmp_path / "base", model)))
    recipe = lora_recipe(base, **ALL)
    trained = train(build(base, recipe))
    theirs = logits_of_peft(base, export(trained, base, recipe, tmp_path / "adapter"))
    torch.testing.assert_close(logits(trained), theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.extensions
def test_dora_is_refused_where_hugging_face_fuses_layers(bases: dict[str, BaseModel]) -> None:
    for name in FUSED:
        with pytest.raises(UserError, match=r"lora_variant is dora, but .* Try --lora_variant"):
            check_adapter(bases[name], lora_recipe(bases[name], lora_variant="dora"))


@pytest.mark.matrix
@pytest.mark.skipif("inkling2_text" not in MORE_MODELS, reason="older transformers lack it")
def test_layers_of_which_peft_changes_the_name_are_left_out_or_refused(tmp_path: Path) -> None:
    base = open_base(str(make_transformers_model(tmp_path, "inkling2_text")), "transformers")
    check_adapter(base, lora_recipe(base))
    recipe = lora_recipe(base, lora_targets=["q_proj.linear", "weight_proj"])
    assert says(message_of(check_adapter, base, recipe), "weight_proj", "PEFT", "lora_targets")


@pytest.mark.extensions
def test_the_settings_of_an_adapter_are_in_one_order(llama: BaseModel, tmp_path: Path) -> None:
    recipe = lora_recipe(llama, **ALL)
    adapter = export(build(llama, recipe), llama, recipe, tmp_path / "adapter")
    names = settings_of(adapter)["target_modules"]
    assert names == sorted(names)
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"} < set(names)


def settings_of(adapter: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    return found


# --- Layers -------------------------------------------------------------------------------------


def adapted(base: BaseModel, **keys: Any) -> set[str]:
    model = outline(base, lora_recipe(base, **keys), torch.float32)
    names = [our_name(name) for name, p in model.named_parameters() if p.requires_grad]
    return {name.partition(".lora_")[0].removesuffix(".weight") for name in names}


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (["q_proj"], {"transformer.h.0.attn.qkv.q_proj", "transformer.h.1.attn.qkv.q_proj"}),
        ("q_proj", {"transformer.h.0.attn.qkv.q_proj", "transformer.h.1.attn.qkv.q_proj"}),
        (["layers.1.self_attn.o_proj", "lm_head"], {"transformer.h.1.attn.proj", "lm_head"}),
        (r".*layers\.0.*(gate|up)_proj", {"transformer.h.0.mlp.fc_1", "transformer.h.0.mlp.fc_2"}),
        (
            "all-linear",
            {
                f"transformer.h.{layer}.{name}"
                for layer in range(2)
                for name in (
                    *(f"attn.qkv.{part}_proj" for part in "qkv"),
                    *("attn.proj", "mlp.fc_1", "mlp.fc_2", "mlp.proj"),
                )
            },
        ),
    ],
)
def test_targets_are_names_or_a_regular_expression(
    llama: BaseModel, targets: Any, layers: set[str]
) -> None:
    assert adapted(llama, lora_targets=targets) == layers


@pytest.mark.parametrize("model", ["phi3", "mixtral", "qwen3_moe", "mamba2", "falcon_h1", "gpt2"])
def test_all_linear_layers_load_in_peft(model: str, tmp_path: Path) -> None:
    base = open_base(str(make_transformers_model(tmp_path / "base", model)))
    recipe = lora_recipe(base, lora_targets="all-linear")
    trained = train(build(base, recipe))
    written = export(trained, base, recipe, tmp_path / "adapter")
    names = settings_of(written)["target_modules"]
    assert names and not any("all-linear" in name or "router" in name for name in names)
    theirs = logits_of_peft(base, written)
    torch.testing.assert_close(logits(trained), theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.extensions
@pytest.mark.parametrize("model", ["llama", "gpt-neox", "gpt2", "gemma2", "phi", "mpt"])
def test_the_default_layers_of_peft_are_adapted(
    bases: dict[str, BaseModel], model: str, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    made = make_transformers_model
    base = bases.get(model) or open_base(str(made(tmp_path / "base", model)))
    recipe = lora_recipe(base, lora_targets="peft-default")
    written = export(build(base, recipe), base, recipe, tmp_path / "adapter")
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base.directory), LoraConfig())
    expected = get_peft_model_state_dict(theirs)
    assert load_file(written / "adapter_model.safetensors").keys() == expected.keys()


def test_without_default_layers_in_peft_all_linear_is_advised(tmp_path: Path) -> None:
    base = open_base(str(make_transformers_model(tmp_path / "base", "phi3")))
    with pytest.raises(UserError, match=r"lora_targets is peft-default, .* phi3.*all-linear"):
        outline(base, lora_recipe(base, lora_targets="peft-default"), torch.float32)


@pytest.mark.parametrize(
    ("model", "keys", "words"),
    [
        ("mixtral", {}, ["experts", "--lora_experts true"]),
        ("mixtral", {"lora_experts": True, "lora_dropout": 0.0}, None),
        ("qwen3_moe", {}, ["experts", "--lora_experts true"]),
        ("phi3", {}, None),
    ],
)
def test_experts_that_are_not_linear_layers_are_named(
    model: str, keys: dict[str, Any], words: list[str] | None, tmp_path: Path
) -> None:
    base = open_base(str(make_transformers_model(tmp_path / "base", model)))
    recipe = lora_recipe(base, lora_targets="all-linear", **keys)
    notice = unadapted_experts(outline(base, recipe, torch.float32), base, recipe)
    assert notice is None if words is None else says(str(notice), *words)


@pytest.mark.extensions
def test_names_that_a_model_lacks_may_be_left_out(llama: BaseModel) -> None:
    recipe = lora_recipe(llama, lora_targets=["q_proj", "gate_up_proj"], lora_skip_missing=True)
    model = outline(llama, recipe, torch.float32)
    adapted = {our_name(name) for name, _ in model.named_parameters() if is_adapter(name)}
    assert adapted and all(".q_proj." in name for name in adapted)
    assert says(str(skipped_targets(model, llama, recipe)), "gate_up_proj", "only q_proj")


@pytest.mark.extensions
def test_a_target_on_some_layers_loads_in_peft(llama: BaseModel, tmp_path: Path) -> None:
    recipe = lora_recipe(llama, lora_targets=r".*layers\.1\.self_attn\.[qo]_proj")
    model = train(build(llama, recipe))
    adapter = export(model, llama, recipe, tmp_path / "adapter")
    names = settings_of(adapter)["target_modules"]
    assert names == ["model.layers.1.self_attn.o_proj", "model.layers.1.self_attn.q_proj"]
    torch.testing.assert_close(
        logits(model), logits_of_peft(llama, adapter), rtol=0, atol=TOLERANCE
    )


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora_targets": ["q_prj"]}, "lora_targets names q_prj, .* Did you mean q_proj"),
        ({"lora_targets": "qproj"}, "lora_targets names qproj, .* Did you mean q_proj"),
        ({"lora_targets": ["zzz"]}, "lora_targets names zzz, .* It has q_proj, k_proj"),
        ({"lora_targets": ["q_proj", "zzz"]}, "lora_targets names zzz"),
        ({"lora_targets": ["yyy", "zzz"], "lora_skip_missing": True}, "lora_targets names yyy"),
        ({"lora_targets": ["embed_tokens"]}, "lora_targets names embed_tokens, .* linear"),
        ({"lora_targets": "(q_proj"}, r"lora_targets is '\(q_proj', .* not a regular expression"),
        (
            {"lora_modules_to_save": ["embed_token"]},
            "lora_modules_to_save names embed_token, .* Did you mean embed_tokens",
        ),
        (
            {"lora_modules_to_save": ["q_proj"]},
            "lora_modules_to_save names q_proj, which is adapted",
        ),
        (
            {"lora_query": True, "lora_modules_to_save": ["o_proj"], "quantize": "bnb.nf4"},
            "lora_modules_to_save names o_proj, but quantize bnb.nf4",
        ),
        ({"lora_init": "pissa", "lora_r": 100}, "lora_r is 100, .* Try --lora_r 64"),
    ],
)
def test_names_that_match_no_trainable_layer_are_refused(
    llama: BaseModel, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        outline(llama, lora_recipe(llama, **keys), torch.float32)


@pytest.mark.extensions
@pytest.mark.parametrize("name", MAKERS)
def test_whole_layers_are_trained_and_kept_beside_the_adapter(
    bases: dict[str, BaseModel], name: str, tmp_path: Path
) -> None:
    base = bases[name]
    head, embedding = (
        ("embed_out", "embed_in") if name == "gpt-neox" else ("lm_head", "embed_tokens")
    )
    norm = "final_layer_norm" if name == "gpt-neox" else "norm"
    recipe = lora_recipe(base, lora_modules_to_save=[head, embedding, norm])
    model = train(build(base, recipe))
    adapter = export(model, base, recipe, tmp_path / "adapter")
    torch.testing.assert_close(logits(model), logits_of_peft(base, adapter), rtol=0, atol=TOLERANCE)
    again = build(base, lora_recipe(base, adapter=adapter))
    assert torch.equal(logits(again), logits(model))


@pytest.mark.extensions
def test_a_fused_layer_is_trained_whole(bases: dict[str, BaseModel], tmp_path: Path) -> None:
    base = bases["phi-3"]
    recipe = lora_recipe(base, lora_targets=["o_proj"], lora_modules_to_save=["qkv_proj"])
    model = train(build(base, recipe))
    adapter = export(model, base, recipe, tmp_path / "adapter")
    torch.testing.assert_close(logits(model), logits_of_peft(base, adapter), rtol=0, atol=TOLERANCE)


@pytest.mark.extensions
def test_lora_plus_trains_b_faster_and_reports_the_rate_of_a(llama: BaseModel) -> None:
    recipe = lora_recipe(llama, lora_plus_ratio=4, optimizer__lr=0.01, accelerator="cpu")
    plan = make_plan(recipe, Devices(accelerator="cpu", count=1))
    model = build(llama, recipe)
    names = {parameter: our_name(name) for name, parameter in model.named_parameters()}
    first, second = make_strategy(plan).make_optimizer(model).param_groups
    assert (first["lr"], second["lr"]) == (0.01, 0.04)
    assert {".lora_B." in names[p] for p in first["params"]} == {False}
    assert {".lora_B." in names[p] for p in second["params"]} == {True}


# --- Adapters made elsewhere --------------------------------------------------------------------


def peft_adapter(base: BaseModel, out: Path, *, pickled: bool = False, **settings: Any) -> Path:
    """An adapter that PEFT made, with random numbers."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base.directory, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)  # type: ignore[misc]
    adapted.save_pretrained(out, safe_serialization=not pickled)
    return out


LLAMA_TARGETS = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]}


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", LLAMA_TARGETS),
        ("llama", LLAMA_TARGETS | {"use_dora": True}),
        ("llama", LLAMA_TARGETS | {"use_rslora": True}),
        ("llama", LLAMA_TARGETS | {"target_modules": r".*layers\.1.*(q|o)_proj"}),
        ("llama", LLAMA_TARGETS | {"modules_to_save": ["embed_tokens", "lm_head"]}),
        ("llama", LLAMA_TARGETS | {"target_modules": ["q_proj", "qkv_proj"]}),
        ("tied llama", LLAMA_TARGETS | {"target_modules": ["q_proj", "lm_head"]}),
        ("phi-3", {"r": 4, "target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
        ("gpt-neox", {"r": 4, "target_modules": ["query_key_value", "dense"]}),
    ],
)
def test_training_starts_exactly_at_an_adapter_of_peft(
    bases: dict[str, BaseModel], name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    adapter = peft_adapter(bases[name], tmp_path / "adapter", **settings)
    model = build(bases[name], lora_recipe(bases[name], adapter=adapter))
    torch.testing.assert_close(
        logits(model), logits_of_peft(bases[name], adapter), rtol=0, atol=TOLERANCE
    )


@pytest.mark.extensions
def test_an_old_adapter_is_read_without_running_what_it_holds(
    llama: BaseModel, tmp_path: Path
) -> None:
    adapter = peft_adapter(llama, tmp_path / "adapter", **LLAMA_TARGETS)
    expected = logits_of_peft(llama, adapter)
    weights = adapter / "adapter_model.safetensors"
    torch.save(load_file(weights), adapter / "adapter_model.bin")
    weights.unlink()
    model = build(llama, lora_recipe(llama, adapter=adapter))
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=TOLERANCE)
    torch.save({"x": Path("code")}, adapter / "adapter_model.bin")
    with pytest.raises(UserError, match=r"adapter_model.bin holds more than weights"):
        read_adapter(adapter, llama)


@pytest.fixture(scope="module")
def foreign(llama: BaseModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peft_adapter(llama, tmp_path_factory.mktemp("foreign") / "adapter", **LLAMA_TARGETS)


@pytest.mark.extensions
def test_settings_of_an_adapter_are_read_from_it(llama: BaseModel, foreign: Path) -> None:
    recipe = lora_recipe(llama, adapter=foreign, lora_r=4)
    assert (recipe.lora_r, recipe.lora_alpha, recipe.lora_variant) == (4, 6, "lora")
    assert recipe.lora_targets == ["down_proj", "q_proj", "v_proj"]


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora_r": 32}, "lora_r is 32, but the adapter .* has 4"),
        ({"lora_alpha": 5}, "lora_alpha is 5, but the adapter .* has 6"),
        ({"lora_variant": "dora"}, 'lora_variant is "dora", but the adapter .* has "lora"'),
        ({"lora_targets": ["q_proj"]}, r'lora_targets is \["q_proj"\], but the adapter'),
        ({"lora_key": True}, "lora_key is true, but the adapter"),
        ({"lora_init": "pissa"}, "lora_init is pissa, but the first values come from"),
    ],
)
def test_a_recipe_that_contradicts_its_adapter_is_refused(
    llama: BaseModel, foreign: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        lora_recipe(llama, adapter=foreign, **keys)


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "BOFT"}, "is of the kind BOFT"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern.*lora_r.*merge_and_unload"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern.*lora_alpha.*merge_and_unload"),
        ({"bias": "all"}, 'has bias "all"'),
        ({"use_dora": True, "use_rslora": True}, "DoRA and rsLoRA in one"),
        ({"r": None}, "lacks lora_r"),
    ],
)
def test_adapters_that_cannot_be_trained_on_are_refused(
    llama: BaseModel, foreign: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    adapter = copied(foreign, tmp_path)
    settings = settings_of(adapter) | change
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=message):
        lora_recipe(llama, adapter=adapter)


@pytest.mark.extensions
def test_a_directory_without_an_adapter_is_refused(llama: BaseModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no adapter_config\.json"):
        lora_recipe(llama, adapter=tmp_path)


def copied(adapter: Path, directory: Path) -> Path:
    return Path(shutil.copytree(adapter, directory / "copy"))


@pytest.mark.extensions
def test_an_adapter_of_another_model_is_refused_naming_the_tensor(
    bases: dict[str, BaseModel], foreign: Path, tmp_path: Path
) -> None:
    other = open_base(str(make_llama(tmp_path / "wide", hidden_size=128)))
    with pytest.raises(UserError, match=r"lora_\S+ has shape \[.*64.*\], .* \[.*128.*\]"):
        build(other, lora_recipe(other, adapter=foreign))
    with pytest.raises(UserError, match=r"down_proj\.lora_A.*has no layer model\.layers"):
        read_adapter(foreign, bases["gpt-neox"])


@pytest.mark.extensions
def test_an_adapter_that_lacks_a_tensor_or_has_one_too_many_is_refused(
    llama: BaseModel, foreign: Path, tmp_path: Path
) -> None:
    adapter = copied(foreign, tmp_path)
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    tensor = tensors.pop(name)
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"lacks transformer\.h\.0\.attn\.qkv\.q_proj\.lora_B"):
        build(llama, lora_recipe(llama, adapter=adapter))
    tensors |= {name: tensor, name.replace("q_proj", "k_proj"): tensor.clone()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"k_proj\.lora_B\S* is not among its target modules"):
        build(llama, lora_recipe(llama, adapter=adapter))


@pytest.mark.extensions
def test_a_wrong_adapter_is_refused_before_anything_starts(
    llama: BaseModel, foreign: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    keys = {"checkpoint_dir": str(llama.directory), "out_dir": str(out), "adapter": str(foreign)}
    recipe = read_recipe([], [*keys.items(), ("lora_r", "5")], method="lora")
    with pytest.raises(UserError, match="lora_r is 5, but the adapter"):
        launch(recipe, command=())
    assert not out.exists()


# --- Layers without a gradient ------------------------------------------------------------------


@pytest.fixture
def indexed(tmp_path: Path) -> BaseModel:
    """A model of which an indexer in the last layer has a q_proj and a k_proj, too."""
    if "minimax_m3_vl_text" not in NEWEST:
        # The oldest supported transformers does not have it.
        pytest.skip("MiniMax M3 needs transformers 5.24")
    kinds = ["full_attention", "minimax_m3_sparse"]
    made = make_transformers_model(tmp_path / "indexed", "minimax_m3_vl_text", layer_types=kinds)
    return open_base(str(made))


@pytest.mark.parametrize("targets", [["q_proj", "k_proj"], "all-linear", r".*\.[qk]_proj"])
def test_layers_that_no_loss_trains_are_not_adapted(
    indexed: BaseModel, targets: list[str] | str
) -> None:
    model = build(indexed, lora_recipe(indexed, lora_targets=targets))
    adapted = {
        name.partition(".lora_")[0] for name, _ in model.named_parameters() if "lora_" in name
    }
    assert any(name.endswith("layers.1.self_attn.q_proj") for name in adapted)
    assert not any("indexer" in name for name in adapted)


def test_targets_that_no_loss_trains_are_refused(indexed: BaseModel) -> None:
    with pytest.raises(UserError) as error:
        build(indexed, lora_recipe(indexed, lora_targets=r".*indexer\.q_proj"))
    assert says(str(error.value), "lora_targets", "indexer.q_proj", "--lora_targets all-linear")


@pytest.mark.parametrize("is_trained", [False, True])
def test_an_adapter_of_peft_on_such_layers_is_read_if_it_has_no_effect_there(
    indexed: BaseModel, is_trained: bool, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    theirs: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(indexed.directory),
        LoraConfig(target_modules=["q_proj", "k_proj"]),
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".lora_B." in name and (is_trained or "indexer" not in name):
                parameter.normal_()
    theirs.save_pretrained(tmp_path / "adapter")
    recipe = lora_recipe(indexed, adapter=tmp_path / "adapter")
    if is_trained:
        with pytest.raises(UserError, match=r"indexer.*is not among its target modules"):
            build(indexed, recipe)
    else:
        found, expected = logits(build(indexed, recipe)), theirs.eval()(TOKENS).logits
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


# --- Quantised bases ----------------------------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["bnb.nf4-dq", "bnb.int8"])
def test_an_adapter_on_a_quantised_base_starts_there_and_fits_its_weights_in_peft(
    llama: BaseModel, variant: str, kind: str, tmp_path: Path
) -> None:
    recipe = lora_recipe(llama, quantize=kind, lora_mlp=True, **VARIANTS[variant])
    model = build(llama, recipe)
    plain = build(llama, lora_recipe(llama, quantize=kind))
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-6)
    adapter = export(train(model), llama, recipe, tmp_path / "adapter")
    weights = {
        our_name(f"{name}.weight"): layer.unpacked(layer.weight)
        for name, layer in model.named_modules()
        if hasattr(layer, "unpacked")
    }
    torch.testing.assert_close(
        logits(model), logits_of_peft(llama, adapter, weights), rtol=0, atol=TOLERANCE
    )


def test_peft_is_kept_from_bitsandbytes_only_where_nothing_is_quantised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from peft.import_utils import is_bnb_available

    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    is_bnb_available()  # PEFT keeps the answer
    with without_bitsandbytes():
        assert not is_bnb_available()
    assert is_bnb_available()
    assert "bitsandbytes" not in sys.modules
