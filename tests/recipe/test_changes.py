"""Keys that may differ when a run continues, and the comparison of two recipes."""

import inspect
from typing import Any

import pytest
from litgpt import data

from ftkit.recipe.changes import (
    _DATA_DEFAULTS,
    _PROMPT_STYLES,
    carries_over,
    kinds,
    recipe_changes,
)
from ftkit.recipe.parsing import from_dict, read_recipe, to_dict
from ftkit.recipe.recipe import Method, Recipe
from ftkit.recipe.recipe_keys import key_types


def recipe(method: Method = "lora", **keys: object) -> Recipe:
    """A recipe with these keys; dots are written as two underscores."""
    pairs = [(key.replace("__", "."), str(value)) for key, value in keys.items()]
    return read_recipe([], [("checkpoint_dir", "base"), *pairs], method=method)


def refused(saved: Recipe, now: Recipe) -> list[str]:
    refusals, changes = recipe_changes(saved, now)
    assert changes == []
    return refusals


def changed(saved: Recipe, now: Recipe) -> list[str]:
    refusals, changes = recipe_changes(saved, now)
    assert refusals == []
    return changes


# --- Classes of keys ----------------------------------------------------------------------------


def test_every_key_of_both_recipes_has_a_class_and_no_other_has() -> None:
    assert kinds().keys() == key_types("lora").keys() | key_types("full").keys()


@pytest.mark.parametrize("module", ["Alpaca", "Alpaca2k", "Deita", "FLAN", "JSON", "LongForm"])
def test_a_missing_argument_of_data_is_litgpts_default(module: str) -> None:
    known = inspect.signature(getattr(data, module)).parameters
    expected = _DATA_DEFAULTS | {"prompt_style": _PROMPT_STYLES.get(module, "alpaca")}
    for name, default in expected.items():
        assert name not in known or known[name].default == default


# --- Comparison ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_recipe_does_not_differ_from_its_copy(method: Method) -> None:
    original = recipe(method)
    assert recipe_changes(original, from_dict(to_dict(original), method)) == ([], [])


def test_a_checkpoint_of_a_version_without_a_key_continues() -> None:
    saved = to_dict(recipe())
    del saved["deterministic"]
    assert recipe_changes(from_dict(saved, "lora"), recipe(deterministic="true")) == ([], [])


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"lora_r": 8}, "lora_r 16 -> 8"),
        ({"lora_alpha": 8}, "lora_alpha 32 -> 8"),
        ({"lora_variant": "dora"}, "lora_variant lora -> dora"),
        ({"lora_init": "pissa"}, "lora_init default -> pissa"),
        ({"lora_modules_to_save": "[lm_head]"}, "lora_modules_to_save not set -> ['lm_head']"),
        ({"adapter": "some/adapter"}, "adapter not set -> some/adapter"),
        ({"quantize": "bnb.nf4"}, "quantize not set -> bnb.nf4"),
        ({"seed": 1}, "seed 1337 -> 1"),
        ({"data__mask_prompt": "true"}, "data.mask_prompt false -> true"),
        ({"data__prompt_style": "llama3"}, "data.prompt_style alpaca -> llama3"),
        (
            {"data__chat_template_kwargs": "{enable_thinking: false}"},
            "data.chat_template_kwargs not set -> {'enable_thinking': False}",
        ),
        ({"data__add_tokens": "[<a>]"}, "data.add_tokens not set -> ['<a>']"),
        ({"data": "FLAN"}, "data.prompt_style alpaca -> flan"),
        ({"train__max_seq_length": 512}, "train.max_seq_length not set -> 512"),
        ({"train__tie_embeddings": "true"}, "train.tie_embeddings not set -> true"),
        ({"train__only": "mlp"}, "train.only not set -> mlp"),
        ({"train__freeze": "mlp"}, "train.freeze not set -> mlp"),
        ({"optimizer": "SGD"}, "optimizer torch.optim.AdamW -> torch.optim.SGD"),
        ({"objective": "dpo", "objective__beta": 0.2}, "objective sft -> dpo"),
        ({"reference": "some/model"}, "reference not set -> some/model"),
    ],
)
def test_keys_that_decide_what_is_trained_are_fixed(keys: dict[str, Any], line: str) -> None:
    assert refused(recipe(), recipe(**keys)) == [line]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"lora_query": "false"}, "lora_query true -> false"),
        ({"lora_mlp": "true"}, "lora_mlp false -> true"),
        ({"lora_targets": "[q_proj]"}, "lora_targets not set -> ['q_proj']"),
    ],
)
def test_the_layers_that_a_recipe_names_are_fixed(keys: dict[str, Any], line: str) -> None:
    assert refused(recipe(lora_value="true"), recipe(**keys)) == [line]


@pytest.mark.extensions
def test_options_of_an_objective_are_fixed_and_a_default_may_be_written_out() -> None:
    saved = recipe(objective="dpo")
    assert refused(saved, recipe(objective="dpo", objective__beta=0.2)) == [
        "objective.beta 0.1 -> 0.2"
    ]
    assert refused(saved, recipe(objective="dpo", objective__beta=0.1)) == []


@pytest.mark.extensions
def test_the_type_of_adapter_and_its_options_are_fixed_but_for_dropout() -> None:
    saved = recipe(peft="vera", peft__r=64)
    assert refused(recipe(), saved) == ["peft lora -> vera"]
    assert refused(saved, recipe(peft="vera", peft__r=32)) == ["peft.r 64 -> 32"]
    same = recipe(peft="vera", peft__r=64, peft__vera_dropout=0.0)
    assert refused(saved, same) == changed(saved, same) == []
    dropped = recipe(peft="vera", peft__r=64, peft__vera_dropout=0.1)
    assert changed(saved, dropped) == ["peft.vera_dropout 0.0 -> 0.1"]


def test_every_fixed_key_that_differs_is_named() -> None:
    now = recipe(lora_r=4, seed=1, data__mask_prompt="true")
    lines = ["data.mask_prompt false -> true", "seed 1337 -> 1", "lora_r 16 -> 4"]
    assert sorted(refused(recipe(), now)) == sorted(lines)


@pytest.mark.parametrize(("saved", "now"), [("lora", "full"), ("full", "lora")])
def test_another_method_says_all(saved: str, now: str) -> None:
    assert refused(recipe(saved, seed=1), recipe(now)) == [f"method {saved} -> {now}"]


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"train__epochs": 3}, "train.epochs 5 -> 3"),
        ({"train__max_steps": 10}, "train.max_steps not set -> 10"),
        ({"train__global_batch_size": 32}, "train.global_batch_size 16 -> 32"),
        ({"train__max_norm": 1}, "train.max_norm not set -> 1.0"),
        ({"train__lr_warmup_steps": 10}, "train.lr_warmup_steps auto -> 10"),
        ({"train__min_lr": 0}, "train.min_lr 6e-05 -> 0.0"),
        ({"train__label_smoothing": 0.1}, "train.label_smoothing 0.0 -> 0.1"),
        ({"train__neftune_noise_alpha": 5}, "train.neftune_noise_alpha not set -> 5.0"),
        ({"train__ema_decay": 0.99}, "train.ema_decay not set -> 0.99"),
        ({"train__lr_schedule": "wsd"}, "train.lr_schedule cosine -> wsd"),
        ({"eval__patience": 3}, "eval.patience not set -> 3"),
        ({"precision": "32-true"}, "precision not set -> 32-true"),
        ({"lora_dropout": 0}, "lora_dropout 0.05 -> 0.0"),
        ({"float8": "true"}, "float8 false -> true"),
        ({"qat__weights": "int4"}, "qat.weights not set -> int4"),
        ({"optimizer__lr": 1e-3}, "optimizer.lr not set -> 0.001"),
        ({"optimizer": "Adam"}, "optimizer torch.optim.AdamW -> torch.optim.Adam"),
    ],
)
def test_keys_that_decide_how_it_is_trained_may_change_with_a_notice(
    keys: dict[str, Any], line: str
) -> None:
    assert changed(recipe(), recipe(**keys)) == [line]


@pytest.mark.extensions
@pytest.mark.parametrize(
    "keys",
    [
        {"checkpoint_dir": "elsewhere", "out_dir": "out", "resume": "auto", "logger_name": "wandb"},
        {"devices": 2, "num_nodes": 2, "strategy": "fsdp", "strategy__cpu_offload": "true"},
        {"train__micro_batch_size": 4, "train__save_interval": 5, "checkpoint__keep_last": 1},
        {"eval__interval": 1, "eval__exact_match": 3, "train__max_time": 60},
        {"data__num_workers": 1, "data__json_path": "x.json", "data__seed": 7},
        {"data": "JSON", "data__json_path": "x.json"},
        {"data__mask_prompt": "false", "data__prompt_style": "alpaca", "data__ignore_index": -100},
    ],
)
def test_hardware_paths_and_intervals_are_free(keys: dict[str, Any]) -> None:
    assert recipe_changes(recipe(), recipe(**keys)) == ([], [])


# --- Optimizers ---------------------------------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("saved", "now", "carried"),
    [
        ("torch.optim.AdamW", "torch.optim.AdamW", True),
        ("torch.optim.AdamW", "torch.optim.Adam", True),
        ("torch.optim.AdamW", "deepspeed.ops.adam.DeepSpeedCPUAdam", True),
        ("bitsandbytes.optim.PagedAdamW8bit", "torch.optim.AdamW", True),
        ("bitsandbytes.optim.Adam", "bitsandbytes.optim.PagedAdamW32bit", True),
        ("bitsandbytes.optim.Lion8bit", "bitsandbytes.optim.PagedLion", True),
        ("bitsandbytes.optim.SGD", "bitsandbytes.optim.SGD8bit", True),
        ("torch.optim.SGD", "torch.optim.SGD", True),
        ("torch.optim.SGD", "bitsandbytes.optim.SGD", False),
        ("torch.optim.AdamW", "torch.optim.SGD", False),
        ("torch.optim.AdamW", "torch.optim.NAdam", False),
        ("bitsandbytes.optim.Lion", "bitsandbytes.optim.AdamW", False),
        ("bitsandbytes.optim.AdEMAMix", "bitsandbytes.optim.AdamW", False),
    ],
)
def test_the_state_of_an_optimizer_is_kept_within_its_family(
    saved: str, now: str, carried: bool
) -> None:
    assert carries_over(saved, now) is carries_over(now, saved) is carried


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        ({}, {"weight": 2}, "data.sources[1].weight 1.0 -> 2.0"),
        ({"weight": 0.5}, {"weight": 0.25}, "data.sources[1].weight 0.5 -> 0.25"),
        ({"samples": 5}, {"samples": 6}, "data.sources[1].samples 5 -> 6"),
    ],
)
def test_what_an_epoch_takes_of_a_source_stays(
    before: dict[str, object], now: dict[str, object], line: str
) -> None:
    saved, new = (
        recipe(data="JSON", data__sources=[{"path": "a.json"}, {"path": "b.json", **shares}])
        for shares in (before, now)
    )
    assert refused(saved, new) == [line]


def test_a_weight_of_1_may_be_left_out_and_a_source_may_move() -> None:
    saved = recipe(data="JSON", data__sources=[{"path": "a.json"}, {"path": "b.json"}])
    entries = [{"path": "x/a.json", "weight": 1}, {"path": "b.json", "weight": 1.0}]
    assert recipe_changes(saved, recipe(data="JSON", data__sources=entries)) == ([], [])


def test_sets_to_validate_on_may_change_with_a_notice_for_each() -> None:
    before = read_recipe([], [("checkpoint_dir", "x"), ("eval.sets", "{a: a.json, b: b.json}")])
    same = read_recipe(
        [], [("checkpoint_dir", "x"), ("eval.sets.a.path", "a.json"), ("eval.sets.b", "b.json")]
    )
    assert recipe_changes(before, same) == ([], [])
    after = read_recipe([], [("checkpoint_dir", "x"), ("eval.sets", "{b: c.json, d: d.json}")])
    assert recipe_changes(before, after) == (
        [],
        [
            "eval.sets.a a.json -> not set",
            "eval.sets.b b.json -> c.json",
            "eval.sets.d not set -> d.json",
        ],
    )
