"""Linear layers of torchao: which layers become one, what they compute, and by which scales."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from computed import filled
from messages import key_words
from multimodal_models import make_multimodal_model
from tiny import make_llama
from torch import nn
from torchao.float8 import Float8LinearConfig
from torchao.quantization import quantize_
from transformers_models import make_transformers_model

from ftkit.errors import UserError
from ftkit.extensions.torchao import layers
from ftkit.extensions.torchao.keys import Qat
from ftkit.extensions.torchao.layers import qat_config
from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.pretrained.base_model import BaseModel, open_base
from ftkit.recipe.recipe_sections import recipe_type

TOKENS = torch.arange(2, 66).view(2, 32)
LABELS = torch.arange(62)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return open_base(str(make_llama(tmp_path_factory.mktemp("llama"))))


def outlined(base: BaseModel, **keys: Any) -> LanguageModel:
    return outline(base, recipe_type("full")(checkpoint_dir="base", **keys), torch.float32)


def made(base: BaseModel, **keys: Any) -> LanguageModel:
    return filled(outlined(base, **keys), base)


def loss_of(model: LanguageModel, rows: slice = slice(None)) -> torch.Tensor:
    ids = TOKENS[rows]
    return model(ids, torch.arange(ids.numel()), ids.flatten())


def kinds(model: LanguageModel) -> dict[str, str]:
    return {
        name: type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }


@pytest.mark.parametrize(
    ("keys", "kind"),
    [({"float8": True}, "_Float8Layer"), ({"qat": Qat(weights="int4")}, "FakeQuantizedLinear")],
)
def test_the_layers_of_the_blocks_are_replaced_and_parameters_keep_their_names(
    llama: BaseModel, keys: dict[str, Any], kind: str
) -> None:
    plain, model = outlined(llama), outlined(llama, **keys)
    found = kinds(model)
    assert found.keys() == kinds(plain).keys()
    assert {name for name, one in found.items() if one != kind} == {"head.lm_head"}
    shapes = {name: (p.shape, p.requires_grad) for name, p in plain.named_parameters()}
    assert shapes == {n: (p.shape, p.requires_grad) for n, p in model.named_parameters()}


def test_layers_of_other_widths_are_not_computed_in_float8(tmp_path: Path) -> None:
    base = open_base(str(make_llama(tmp_path / "a", intermediate_size=72)))
    found = kinds(outlined(base, float8=True))
    for part, kind in (("attn", "_Float8Layer"), ("mlp", "Linear")):
        assert {one for name, one in found.items() if f".{part}." in name} == {kind}


def test_models_without_such_a_layer_or_with_experts_are_refused(tmp_path: Path) -> None:
    narrow = make_llama(tmp_path / "a", hidden_size=24, intermediate_size=40, num_attention_heads=2)
    with pytest.raises(UserError, match=key_words("float8 is true ... 16 ... --float8 false")):
        outlined(open_base(str(narrow)), float8=True)
    with pytest.raises(UserError, match=key_words("qat.group_size is 32 ... --qat.group_size 8")):
        outlined(open_base(str(narrow)), qat=Qat(weights="int4"))
    assert outlined(open_base(str(narrow)), qat=Qat(weights="int4", group_size=8))
    experts = open_base(str(make_transformers_model(tmp_path / "b", "mixtral")))
    for keys in ({"float8": True}, {"qat": Qat(weights="int4")}):
        with pytest.raises(UserError, match=key_words("experts")):
            outlined(experts, **keys)


def test_models_that_see_are_not_trained_for_a_form_that_they_are_not_written_in(
    tmp_path: Path,
) -> None:
    base = open_base(str(make_multimodal_model(tmp_path, "gemma3")))
    with pytest.raises(UserError, match=key_words("qat.weights is int4 ... --qat.weights null")):
        outlined(base, qat=Qat(weights="int4"))
    assert outlined(base, float8=True)


def test_float8_is_of_training_alone(llama: BaseModel) -> None:
    plain, model = made(llama), made(llama, float8=True)
    expected = loss_of(plain).item()
    assert loss_of(model).item() != pytest.approx(expected, rel=1e-6)
    assert loss_of(model).item() == pytest.approx(expected, rel=1e-2)
    assert loss_of(model.eval()).item() == expected


def gradients(model: LanguageModel, parts: int = 1, times: int = 1) -> list[torch.Tensor]:
    """Gradients of a loss that is multiplied and divided again, as on so many ranks."""
    model.zero_grad()
    for rows in range(0, len(TOKENS), len(TOKENS) // parts):
        (loss_of(model, slice(rows, rows + len(TOKENS) // parts)) * times).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [gradient / times for gradient in found]


def largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "keys",
    [
        {"float8": True},
        {"qat": Qat(weights="int4", activations="int8")},
        {"qat": Qat(weights="int3", group_size=None)},
    ],
)
def test_scales_depend_neither_on_micro_batches_nor_on_the_number_of_ranks(
    llama: BaseModel, keys: dict[str, Any]
) -> None:
    model = made(llama, **keys)
    expected = gradients(model)
    for parts, times in ((2, 1), (1, 3), (2, 3)):
        assert largest_difference(gradients(model, parts, times), expected) < 1e-5


@pytest.mark.parametrize(
    ("recipe", "powers", "parts", "times"),
    [
        ("tensorwise", False, 2, 1),
        ("rowwise", False, 2, 1),
        ("rowwise_with_gw_hp", True, 1, 3),
    ],
)
def test_those_of_other_recipes_of_torchao_do(
    llama: BaseModel,
    recipe: str,
    powers: bool,
    parts: int,
    times: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why there is one recipe."""
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), round_scales_to_power_of_2=powers
    )
    monkeypatch.setattr(layers, "replace", lambda *_, **__: config)
    model = made(llama, float8=True)
    expected = gradients(model)
    assert largest_difference(gradients(model, parts, times), expected) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "qat",
    [
        Qat(weights="int4", activations="int8"),
        Qat(weights="int2", group_size=16),
        Qat(weights="int8", group_size=None),
        Qat(weights="int5", activations="int8", group_size=64),
    ],
    ids=str,
)
def test_the_rounded_weights_are_those_that_torchao_quantises(qat: Qat, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 48)).to(dtype)

    class OneBlock(nn.Module):
        blocks = nn.ModuleList([copy.deepcopy(plain)])
        kept_in_full = frozenset[str]()

    body: Any = OneBlock()
    layers.round_in_forward(body, qat)
    quantize_(plain, qat_config(qat))
    x = torch.randn(5, 64, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(body.blocks[0](x), plain(x))
