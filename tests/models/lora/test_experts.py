"""LoRA of fused experts: a pair for each, in a file that PEFT reads."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import litgpt
import pytest
import torch
from adapters import TOKENS, build, export, logits, lora_recipe, train
from conversions import assert_equal, merge, own_logits, transformers_logits
from litgpt_models import litgpt_architecture
from tiny import make_llama
from torch import Tensor
from transformers_models import MORE_MODELS, make_transformers_model

from ftkit.cli.app import run
from ftkit.errors import UserError
from ftkit.models.flops import flops_per_token
from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.lora.adapter_files import check_adapter, taken_for_experts
from ftkit.models.lora.experts import expert_pairs
from ftkit.models.pretrained.base_model import BaseModel, open_base
from ftkit.recipe.sections import check_ranges

MODELS = ["mixtral", "qwen3_moe", "gpt_oss", "olmoe"]
RANK, EXPERTS = 3, 4
BaseOf = Callable[[str], BaseModel]


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> BaseOf:
    directory = tmp_path_factory.mktemp("bases")
    known: dict[str, BaseModel] = {}

    def base(model: str) -> BaseModel:
        if model not in known:
            made = make_transformers_model(directory / model, model)
            known[model] = open_base(str(made), "transformers")
        return known[model]

    return base


def made(base: BaseModel, **keys: Any) -> tuple[LanguageModel, Any]:
    recipe = lora_recipe(base, lora_experts=True, lora_r=RANK, **keys)
    return build(base, recipe), recipe


def in_peft(base: BaseModel, adapter: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert base.directory is not None
    model = AutoModelForCausalLM.from_pretrained(base.directory, attn_implementation="eager")
    return PeftModel.from_pretrained(model, adapter).eval()


@torch.no_grad()
def logits_in_peft(base: BaseModel, adapter: Path) -> Tensor:
    found: Tensor = in_peft(base, adapter)(TOKENS).logits
    return found


@pytest.mark.extensions
@pytest.mark.parametrize(
    "model",
    [
        *MODELS,
        # PEFT renames shared experts of Laguna; ZAYA has parameters outside of its layers.
        *(
            pytest.param(model, marks=pytest.mark.matrix)
            for model in ("laguna", "zaya", "inkling_text", "inkling2_text", "hy_v4")
            if model in MORE_MODELS
        ),
    ],
)
def test_an_adapter_of_experts_has_equal_logits_in_peft_and_merged(
    base_of: BaseOf, model: str, tmp_path: Path
) -> None:
    base = base_of(model)
    adapted, recipe = made(base, lora_variant="rslora", lora_mlp=model not in MODELS)
    assert_equal(logits(adapted), transformers_logits(base.directory))
    adapter = export(train(adapted), base, recipe, tmp_path / "adapter")
    found = logits(adapted)
    assert (found - transformers_logits(base.directory)).abs().max() > 0.05
    assert_equal(logits_in_peft(base, adapter), found)
    assert_equal(transformers_logits(merge(adapter, tmp_path / "merged")), found)
    assert_equal(own_logits(adapter), found)


@pytest.mark.extensions
@pytest.mark.parametrize("experts", [False, True], ids=["layers alone", "with experts"])
@pytest.mark.parametrize("model", ["deepseek_v3", "qwen2_moe"])
def test_layers_with_former_names_of_experts_have_equal_logits_in_peft(
    base_of: BaseOf, model: str, experts: bool, tmp_path: Path
) -> None:
    base = base_of(model)
    keys = {"lora_experts": experts, "lora_mlp": True, "lora_r": RANK}
    recipe = lora_recipe(base, **keys, **({} if experts else {"lora_dropout": 0.05}))
    adapted = build(base, recipe)
    adapter = export(train(adapted), base, recipe, tmp_path / "adapter")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    names = [f"{kind}_proj.weight" for kind in ("down", "gate", "up")]
    # With transformers 5.24, PEFT takes those of Qwen2 MoE for the layers that they are.
    if taken_for_experts(base, ["model.layers.0.mlp.shared_expert.up_proj"]):
        assert set(names) <= set(settings["target_parameters"])
        assert settings["lora_dropout"] == 0
    else:
        assert model == "qwen2_moe" and {"down_proj", "up_proj"} <= set(settings["target_modules"])
    found = logits(adapted)
    assert_equal(logits_in_peft(base, adapter), found)
    assert (found - transformers_logits(base.directory)).abs().max() > 0.05
    assert_equal(transformers_logits(merge(adapter, tmp_path / "merged")), found)
    assert_equal(own_logits(adapter), found)
    again = build(base, lora_recipe(base, adapter=adapter))
    assert_equal(logits(again), found)


def test_layers_with_former_names_of_experts_have_no_dora(base_of: BaseOf) -> None:
    def check(model: str, **keys: Any) -> None:
        base = base_of(model)
        check_adapter(base, lora_recipe(base, lora_variant="dora", **keys))

    check("deepseek_v3", lora_query=True)
    check("qwen3", lora_mlp=True)
    chosen: list[dict[str, Any]] = [{"lora_mlp": True}, {"lora_targets": ["q_proj", "up_proj"]}]
    for keys in chosen:
        with pytest.raises(UserError, match=r"lora_variant is dora, .*_proj of .* rslora\."):
            check("deepseek_v3", **keys)


def test_experts_alone_may_be_adapted(base_of: BaseOf, tmp_path: Path) -> None:
    base = base_of("qwen3_moe")
    adapted, recipe = made(base, lora_query=False, lora_value=False)
    names = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert names and all("_pairs.lora_" in name for name in names)
    adapter = export(train(adapted), base, recipe, tmp_path / "adapter")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    assert settings["target_modules"] == []
    assert_equal(logits_in_peft(base, adapter), logits(adapted))
    again, _ = made(base, adapter=adapter)
    assert_equal(logits(again), logits(adapted))


def test_gradients_are_those_of_peft(base_of: BaseOf, tmp_path: Path) -> None:
    base = base_of("gpt_oss")
    adapted, recipe = made(base)
    theirs = in_peft(base, export(train(adapted), base, recipe, tmp_path / "adapter"))
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    count = TOKENS.numel()
    adapted(TOKENS, torch.arange(count), TOKENS.flatten().roll(-1)).backward()
    scores = theirs(TOKENS).logits.flatten(0, 1)
    torch.nn.functional.cross_entropy(scores, TOKENS.flatten().roll(-1), reduction="sum").backward()
    expected = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    outer = "base_model.model.model.layers.1.mlp.experts"
    for wrapper, name in ((outer, "down_proj"), (f"{outer}.base_layer", "gate_up_proj")):
        pairs = dict(expert_pairs(adapted))[f"model.layers.1.mlp.experts.{name}"]
        a, b = (getattr(pairs, f"lora_{matrix}")["default"].weight.grad for matrix in "AB")
        torch.testing.assert_close(
            a.flatten(0, 1), expected[f"{wrapper}.lora_A.default.weight"], rtol=1e-3, atol=1e-5
        )
        of_b = b.permute(1, 2, 0).flatten(1)
        torch.testing.assert_close(
            of_b, expected[f"{wrapper}.lora_B.default.weight"], rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
def test_quantised_experts_are_adapted_too(base_of: BaseOf, model: str) -> None:
    plain, _ = made(base_of(model))
    quantised, _ = made(base_of(model), quantize="bnb.nf4")
    for one in (plain, quantised):
        pairs = dict(expert_pairs(train(one)))
        assert len(pairs) == 2 * 2
        first = pairs["model.layers.0.mlp.experts.down_proj"]
        assert first.lora_A["default"].weight.shape == (
            EXPERTS,
            RANK,
            48 if model == "gpt_oss" else 24,
        )
        assert first.lora_B["default"].weight.shape == (EXPERTS, 32, RANK)
    counted = {"attention_length": 10, "label_fraction": 0.5}
    assert flops_per_token(quantised, **counted) == flops_per_token(plain, **counted)
    total = logits(quantised).square().sum()
    assert torch.isfinite(total) and not torch.equal(logits(quantised), logits(plain))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora_dropout": 0.05}, r"lora_dropout is 0\.05, .* Try --lora_dropout 0, or"),
        ({"lora_variant": "dora"}, r"lora_variant is dora, .* Try --lora_variant lora, or"),
        ({"lora_init": "pissa"}, r"lora_init is pissa, .* Try --lora_init default, or"),
    ],
)
def test_settings_that_the_format_cannot_hold_are_refused(
    base_of: BaseOf, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_ranges(lora_recipe(base_of("qwen3_moe"), lora_experts=True, **keys))


def test_models_without_such_experts_are_refused(tmp_path: Path) -> None:
    base = open_base(str(make_llama(tmp_path / "tiny")))
    with pytest.raises(UserError, match=r"tiny has no experts .* Try --lora_experts false\."):
        outline(base, lora_recipe(base, lora_experts=True), torch.float32)
    config = litgpt.Config.from_name("Mixtral-8x7B-v0.1", n_layer=1)
    of_layers = dataclasses.replace(
        base,
        architecture=litgpt_architecture(config),
    )
    with pytest.raises(UserError, match=r"linear layers: try .* --lora_mlp true\."):
        outline(of_layers, lora_recipe(of_layers, lora_experts=True), torch.float32)


@pytest.mark.extensions
def test_an_adapter_of_other_parameters_is_refused(base_of: BaseOf, tmp_path: Path) -> None:
    base = base_of("qwen3_moe")
    adapted, recipe = made(base)
    adapter = export(adapted, base, recipe, tmp_path / "adapter")
    config = adapter / "adapter_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"target_parameters": ["experts.down_proj"]}))
    with pytest.raises(UserError, match=r"adapts the parameters experts\.down_proj, but"):
        run(["merge", str(adapter), "--out", str(tmp_path / "merged")])
