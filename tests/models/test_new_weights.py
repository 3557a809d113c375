"""Weights with which training from scratch begins: as transformers draws them, and equal again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import says
from tiny import make_llama
from transformers import AutoModelForCausalLM
from transformers_models import make_transformers_model

from ftkit.errors import UserError
from ftkit.models.pretrained.base_model import BaseModel, open_base, parameter_shapes
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.sections import check_ranges


def drawn(base: BaseModel, seed: int) -> dict[str, torch.Tensor]:
    return dict(base.architecture.drawn(base.settings, seed))


@pytest.mark.extensions
@pytest.mark.parametrize("model", ["llama", "gpt2", "gemma2", "mixtral", "jamba", "falcon_h1"])
def test_new_weights_are_spread_as_those_of_transformers(model: str, tmp_path: Path) -> None:
    is_litgpt = model == "llama"
    made = make_llama(tmp_path) if is_litgpt else make_transformers_model(tmp_path, model)
    base = open_base(str(made))
    assert base.architecture.implementation == ("litgpt" if is_litgpt else "transformers")
    found, again, other = (drawn(base, seed) for seed in (1, 1, 2))
    shapes = parameter_shapes(base)
    assert {name: found[name].shape for name in shapes} == shapes
    assert all(torch.equal(found[name], again[name]) for name in found)
    torch.manual_seed(0)
    theirs: Any = AutoModelForCausalLM.from_config(
        AutoModelForCausalLM.from_pretrained(made).config
    )
    expected = dict(theirs.named_parameters())
    random = 0
    for name in shapes:
        if (like := expected.get(base.naming.theirs(name) or "")) is None:
            continue  # a part of a fused layer, or stored in another form
        like, values = like.detach().float(), found[name]
        if torch.equal(values, other[name]):  # nothing is drawn
            torch.testing.assert_close(values.flatten(), like.flatten())
        elif values.numel() >= 500:
            random += 1
            assert float(values.std()) == pytest.approx(float(like.std()), rel=0.2), name
            assert abs(float(values.mean() - like.mean())) < 5 * float(like.std()) / 20, name
    assert random > 3


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("method", "keys", "advice"),
    [
        ("lora", {}, "ftkit finetune_full"),
        ("full", {"train.only": "lm_head"}, "--train.only null"),
        ("full", {"objective": "dpo"}, "--objective sft"),
        ("full", {"objective": "reward"}, "--objective sft"),
    ],
)
def test_what_needs_given_weights_is_refused(
    method: Any, keys: dict[str, str], advice: str
) -> None:
    pairs = [("checkpoint_dir", "base"), ("train.from_scratch", "true"), *keys.items()]
    recipe = read_recipe([], pairs, method=method)
    with pytest.raises(UserError) as error:
        check_ranges(recipe)
    assert says(str(error.value), "train.from_scratch", advice, "--train.from_scratch false")
