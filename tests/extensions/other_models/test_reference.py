"""The reference below an adapter is the base model, whatever the adapter has learned."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ALL, build, lora_recipe, train
from computed import filled
from tiny import make_llama
from torch import Tensor
from transformers_models import make_transformers_model

from ftkit.data.rendering import Rendered
from ftkit.data.samples.loader import collate
from ftkit.data.samples.sample_set import SampleSet
from ftkit.extensions.other_models.reference import (
    BelowAdapter,
)
from ftkit.models.language_model import LanguageModel, outline_plain
from ftkit.models.pretrained.base_model import BaseModel, open_base
from ftkit.objectives.companion import sequence_log_probabilities
from ftkit.recipe.objectives import is_below_adapter
from ftkit.recipe.recipe import Quantization

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "all layers, with dropout": ALL | {"lora_dropout": 0.5},
    "dora": ALL | {"lora_variant": "dora"},
    "rslora": {"lora_variant": "rslora"},
    "pissa": ALL | {"lora_init": "pissa"},
    "olora": ALL | {"lora_init": "olora", "lora_dropout": 0.5},
    "nf4": {"quantize": "bnb.nf4"},
    "int8": {"quantize": "bnb.int8"},
    "nf4 and dora": {"quantize": "bnb.nf4", "lora_variant": "dora"},
    "untied": {"train__tie_embeddings": False, "lora_head": True},
}


def batch() -> dict[str, Any]:
    """Two sequences and a filler, in a row."""
    generator = torch.Generator().manual_seed(0)
    lengths = (9, 14)
    ids = [torch.randint(2, 400, (n,), generator=generator).tolist() for n in lengths]
    samples = SampleSet.of([Rendered(one, ((3, len(one)),)) for one in ids])
    return collate([samples[0], samples[1], None], {}, padding_free=True)


def plain(base: BaseModel, kind: Quantization | None = None) -> LanguageModel:
    """The base model, which no adapter was ever added to."""
    model = outline_plain(base, torch.float32, tied=base.tied, kind=kind)
    return filled(model, base, rope_length=32)


def below(model: LanguageModel) -> Tensor:
    found = BelowAdapter(model.train(), nullcontext).log_probabilities(batch())
    assert not found.requires_grad
    return found


def with_adapter(model: LanguageModel) -> Tensor:
    return sequence_log_probabilities(model.eval(), batch())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return open_base(str(make_llama(tmp_path_factory.mktemp("base") / "tiny")))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_below_every_adapter_is_the_untouched_base_model(adapter: str, base: BaseModel) -> None:
    recipe = lora_recipe(base, **ADAPTERS[adapter])
    expected = sequence_log_probabilities(plain(base, recipe.quantize), batch())
    model = build(base, recipe)
    torch.testing.assert_close(with_adapter(model), expected, rtol=1e-5, atol=0)
    train(model)
    torch.testing.assert_close(below(model), expected, rtol=1e-5, atol=0)
    assert (with_adapter(model)[:2] - expected[:2]).abs().max() > 1e-2, "the adapter is on again"
    assert expected[2] == 0, "a filler has no answer"
    assert is_below_adapter(recipe)


def test_below_the_adapter_of_experts_is_the_untouched_base_model(tmp_path: Path) -> None:
    made = make_transformers_model(tmp_path / "experts", "qwen3_moe")
    base = open_base(str(made), "transformers")
    expected = sequence_log_probabilities(plain(base), batch())
    model = train(build(base, lora_recipe(base, lora_experts=True, lora_query=False)))
    torch.testing.assert_close(below(model), expected, rtol=1e-5, atol=0)
    assert (with_adapter(model)[:2] - expected[:2]).abs().min() > 1e-2


@pytest.mark.parametrize(
    "keys",
    [
        {"lora_modules_to_save": ["embed_tokens"]},
        {"lora_modules_to_save": ["norm"]},
        {"reference": "another"},
    ],
)
def test_where_the_base_is_trained_too_or_is_not_meant_nothing_is_below_the_adapter(
    keys: dict[str, Any], base: BaseModel
) -> None:
    recipe = lora_recipe(base, **keys)
    assert not is_below_adapter(recipe)


def test_layers_that_are_trained_whole_cannot_be_switched_off(base: BaseModel) -> None:
    model = build(base, lora_recipe(base, lora_modules_to_save=["norm"]))
    with pytest.raises(AssertionError):
        BelowAdapter(model, nullcontext)
