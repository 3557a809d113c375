"""Compiled blocks: the same losses, and no graph more for other lengths."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from ftkit.config.recipe import LoraRecipe, Memory, Recipe
from ftkit.model import compiled
from ftkit.model.compiled import compiled_graphs
from ftkit.model.language_model import LanguageModel, outline
from ftkit.model.load_weights import fill
from ftkit.model.sharding import Whole
from ftkit.pretrained.base_model import open_base

LENGTHS = [(7, 5, 9), (4, 4, 4, 4), (12,), (3, 30, 2), (9, 9), (17, 3, 3, 3)]
RECIPES: dict[str, tuple[type[Recipe], dict[str, Any]]] = {
    "full": (Recipe, {}),
    "LoRA, checkpointed": (LoraRecipe, {"memory": Memory(activation_checkpointing=True)}),
    "QLoRA": (LoraRecipe, {"quantize": "bnb.nf4", "lora_mlp": True}),
    "int8": (LoraRecipe, {"quantize": "bnb.int8"}),
}
pytestmark = pytest.mark.slow  # a few seconds of tracing, half a minute with a compiler


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_model(name: str, *, compile_: bool) -> LanguageModel:
    kind, keys = RECIPES[name]
    recipe = kind(checkpoint_dir="embedded:quickstart", compile=compile_, **keys)
    base = open_base("embedded:quickstart")
    model = outline(base, recipe, torch.float32)
    fill(
        model,
        base,
        sharding=Whole(),
        device=torch.device("cpu"),
        rope_length=64,
        seed=1,
        progress=lambda *_: None,
    )
    return model


def step(model: LanguageModel, lengths: tuple[int, ...]) -> tuple[float, list[Tensor]]:
    """Loss and gradients of some samples; dropout draws the same each time."""
    tokens = sum(lengths)
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(200, (1, tokens), generator=generator)
    labels = torch.randint(200, (tokens // 2,), generator=generator)
    model.zero_grad()
    torch.manual_seed(tokens)
    loss = model(ids, torch.arange(tokens // 2) * 2, labels, sequence_lengths=lengths)
    loss.backward()
    return float(loss.detach()), [p.grad for p in model.parameters() if p.grad is not None]


def assert_same(name: str, lengths: list[tuple[int, ...]]) -> list[int]:
    """Steps of a compiled model and of a plain one; graphs after each step."""
    plain, fast = (make_model(name, compile_=compile_) for compile_ in (False, True))
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


@pytest.mark.parametrize("name", RECIPES)
def test_other_lengths_need_no_other_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    counts = assert_same(name, LENGTHS)
    assert counts == [counts[0]] * len(LENGTHS)
    assert 0 < counts[0] < 12


def test_what_the_compiler_makes_computes_the_same_with_dropout() -> None:
    assert_same("LoRA, checkpointed", LENGTHS[:2])
