"""Compiled blocks: the same losses, and no graph more for other lengths.

Models have one layer, since torch traces each block anew.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo
from computed import filled
from fp8_models import in_fp8
from tiny import make_llama
from torch import Tensor
from transformers_models import make_transformers_model

from ftkit.models import language_model
from ftkit.models.language_model import LanguageModel, compiled_graphs, outline
from ftkit.models.pretrained.base_model import BaseModel, open_base
from ftkit.recipe.recipe import LoraRecipe, Memory, Recipe

LENGTHS = [(7, 5, 9), (4, 4, 4, 4), (12,), (3, 30, 2), (9, 9), (17, 3, 3, 3)]
RECIPES: dict[str, Recipe] = {
    "full": Recipe(checkpoint_dir="it"),
    "LoRA, checkpointed": LoraRecipe(
        checkpoint_dir="it",
        memory=Memory(activation_checkpointing=True),
        lora_dropout=0.3,
    ),
    "DoRA": LoraRecipe(checkpoint_dir="it", lora_variant="dora", lora_dropout=0.3),
    "QLoRA": LoraRecipe(checkpoint_dir="it", quantize="bnb.nf4", lora_mlp=True),
    "int8": LoraRecipe(checkpoint_dir="it", quantize="bnb.int8"),
}
MIXTURES: dict[str, tuple[str, Recipe]] = {
    "full": ("qwen3_moe", Recipe(checkpoint_dir="it")),
    "QLoRA of experts": (
        "gpt_oss",
        LoraRecipe(checkpoint_dir="it", quantize="bnb.nf4", lora_experts=True, lora_dropout=0),
    ),
    "another kind": ("granitemoe", LoraRecipe(checkpoint_dir="it", quantize="bnb.nf4")),
}
pytestmark = pytest.mark.slow  # a few seconds of tracing, half a minute with a compiler


@pytest.fixture
def base(tmp_path: Path) -> BaseModel:
    return open_base(str(make_llama(tmp_path / "base", num_hidden_layers=1)))


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_model(recipe: Recipe, base: BaseModel, *, compile_: bool) -> LanguageModel:
    recipe = dataclasses.replace(recipe, compile=compile_)
    model = outline(base, recipe, torch.float32)
    model = filled(model, base, seed=1)
    model.body.tokens.prepare(1, torch.device("cpu"))
    return model


def step(model: LanguageModel, lengths: tuple[int, ...]) -> tuple[float, list[Tensor]]:
    """Loss and gradients of some samples, with the dropout that belongs to them."""
    tokens = sum(lengths)
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(200, (1, tokens), generator=generator)
    labels = torch.randint(200, (tokens // 2,), generator=generator)
    model.zero_grad()
    batch = {
        "input_ids": ids,
        "lengths": lengths,
        "sequence_lengths": lengths,
        "numbers": range(len(lengths)),
        "first": 0,
    }
    with model.body.tokens.of(tokens, batch):
        loss = model(ids, torch.arange(tokens // 2) * 2, labels, sequence_lengths=lengths)
        loss.backward()
    return float(loss.detach()), [p.grad for p in model.parameters() if p.grad is not None]


def assert_same(recipe: Recipe, lengths: list[tuple[int, ...]], base: BaseModel) -> list[int]:
    """Steps of a compiled model and of a plain one; graphs after each step."""
    plain, fast = (make_model(recipe, base, compile_=compile_) for compile_ in (False, True))
    before = compiled_graphs()
    counts = []
    for some in lengths:
        loss, gradients = step(fast, some)
        counts.append(compiled_graphs() - before)
        expected_loss, expected = step(plain, some)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        for ours, theirs in zip(gradients, expected, strict=True):
            assert torch.dist(ours, theirs) <= 1e-4 * theirs.norm() + 1e-6
    with torch.no_grad():
        fast(torch.zeros(1, 8, dtype=torch.long), torch.arange(8), torch.arange(8))
    assert compiled_graphs() - before == counts[-1], "evaluation compiles nothing"
    return counts


@pytest.mark.parametrize(
    "name",
    [
        "full",
        # Packed weights in graphs are also those of the test below in FP8.
        pytest.param("QLoRA", marks=pytest.mark.matrix),
        pytest.param("LoRA, checkpointed", marks=pytest.mark.matrix),
        pytest.param("int8", marks=pytest.mark.matrix),
    ],
)
def test_other_lengths_need_no_other_graph(
    name: str, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "COMPILE_BACKEND", "aot_eager")
    counts = assert_same(RECIPES[name], LENGTHS, base)
    assert counts == [counts[0]] * len(LENGTHS)
    assert 0 < counts[0] < 12


def test_weights_in_fp8_are_unpacked_within_the_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "COMPILE_BACKEND", "aot_eager")
    model, _ = in_fp8(make_llama(tmp_path / "base", num_hidden_layers=1), tmp_path, "DeepSeek V3")
    recipe = LoraRecipe(checkpoint_dir="it", quantize="stored")
    counts = assert_same(recipe, LENGTHS, open_base(str(model)))
    assert counts == [counts[0]] * len(LENGTHS)
    assert 0 < counts[0] < 12


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.matrix if name != "full" else ()) for name in MIXTURES],
)
def test_experts_stay_outside_whatever_tokens_choose_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "COMPILE_BACKEND", "aot_eager")
    model, recipe = MIXTURES[name]
    one_layer = {} if model == "gpt_oss" else {"num_hidden_layers": 1}  # its two differ
    made = make_transformers_model(tmp_path / model, model, **one_layer)
    base = open_base(str(made), "transformers")
    counts = assert_same(recipe, LENGTHS[:4], base)
    assert counts[-1] == counts[-2], "lengths that are new in no way need no graph"
    assert 0 < counts[-1] < 30


@pytest.mark.parametrize("name", ["LoRA, checkpointed", "DoRA"])
@pytest.mark.matrix
def test_compiled_code_computes_the_same_with_dropout(name: str, base: BaseModel) -> None:
    assert_same(RECIPES[name], LENGTHS[:2], base)
