"""Which layers a LoRA recipe adapts, with which rank and scale, by the keys that it sets."""

import dataclasses
from typing import Any

import pytest

from ftkit.recipe.lora_layers import adapted_text, kept_from
from ftkit.recipe.parsing import from_dict, read_recipe, to_dict
from ftkit.recipe.recipe import LoraRecipe


def recipe(words: str = "") -> LoraRecipe:
    """A recipe with keys, given as 'lora_r=4 lora_mlp=true'."""
    pairs = [word.partition("=")[::2] for word in words.split()]
    found = read_recipe([], [("checkpoint_dir", "base"), *pairs], method="lora")
    assert isinstance(found, LoraRecipe)
    return found


@pytest.mark.parametrize(
    ("given", "adapted"),
    [
        # No key names layers.
        ("", "all linear layers, rank 16, alpha 32"),
        ("lora_dropout=0 quantize=bnb.nf4", "all linear layers, rank 16, alpha 32"),
        ("lora_r=4", "all linear layers, rank 4, alpha 32"),
        ("lora_alpha=8", "all linear layers, rank 16, alpha 8"),
        ("lora_experts=true", "all linear layers, experts, rank 16, alpha 32"),
        ("lora_targets=null lora_query=null lora_r=null", "all linear layers, rank 16, alpha 32"),
        # The default, by its name.
        ("lora_targets=all-linear", "all linear layers, rank 16, alpha 32"),
        # A key of LitGPT does: the others have LitGPT's defaults.
        ("lora_query=true", "query, value, rank 8, alpha 16"),
        ("lora_head=false", "query, value, rank 8, alpha 16"),
        ("lora_value=false", "query, rank 8, alpha 16"),
        ("lora_mlp=true lora_r=32", "query, value, mlp, rank 32, alpha 16"),
        ("lora_key=true lora_experts=true", "query, key, value, experts, rank 8, alpha 16"),
        ("lora_query=true lora_targets=null", "query, value, rank 8, alpha 16"),
        # Names do.
        ("lora_targets=[q_proj,o_proj]", "q_proj, o_proj, rank 8, alpha 16"),
        ("lora_targets=.*_proj lora_alpha=64", ".*_proj, rank 8, alpha 64"),
        # Names win over LitGPT's keys.
        ("lora_targets=all-linear lora_mlp=true", "all linear layers, rank 16, alpha 32"),
    ],
)
def test_layers_rank_and_scale_follow_from_the_keys_that_are_given(
    given: str, adapted: str
) -> None:
    assert adapted_text(recipe(given)) == adapted


@pytest.mark.parametrize("given", ["", "lora_query=true", "lora_targets=[q_proj] lora_r=3"])
def test_a_recorded_recipe_means_the_same_again(given: str) -> None:
    assert from_dict(to_dict(recipe(given)), "lora") == recipe(given)


EARLIER: dict[str, Any] = {"lora_targets": None, "lora_r": 8, "lora_alpha": 16}


@pytest.mark.parametrize(
    ("given", "then", "kept"),
    [
        ("", EARLIER, EARLIER),
        ("lora_r=4", EARLIER | {"lora_r": 4}, {"lora_targets": None, "lora_alpha": 16}),
        ("lora_alpha=8", EARLIER | {"lora_alpha": 8}, {"lora_targets": None, "lora_r": 8}),
        (
            "lora_targets=all-linear",
            EARLIER | {"lora_targets": "all-linear"},
            {"lora_r": 8, "lora_alpha": 16},
        ),
        # What is given is not replaced: these differ, and are refused.
        ("lora_query=true lora_r=4", EARLIER, {}),
        ("lora_targets=[q_proj]", EARLIER, {}),
        # A run of today has the defaults of today.
        ("", {}, {}),
        ("lora_mlp=true", {"lora_targets": "all-linear"}, {}),
    ],
)
def test_a_run_that_began_with_the_earlier_defaults_keeps_them(
    given: str, then: dict[str, Any], kept: dict[str, Any]
) -> None:
    saved = dataclasses.replace(recipe(), **then)
    assert kept_from(saved, recipe(given)) == kept


def test_full_fine_tuning_has_nothing_to_keep() -> None:
    full = read_recipe([], [("checkpoint_dir", "base")], method="full")
    assert kept_from(full, full) == kept_from(recipe(), full) == {}
