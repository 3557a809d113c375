"""Objectives in a recipe: options in range, and settings that fit what is learned."""

from typing import Any

import pytest
from messages import message_of, says

from ftkit.models.pretrained.model_names import naming
from ftkit.models.pretrained.places import find_or_download
from ftkit.recipe.objectives import (
    OBJECTIVES,
    check_objective,
    model_beside,
    objective_options,
    objective_row,
)
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.recipe import Method, Recipe


def recipe(method: Method = "lora", **keys: Any) -> Recipe:
    pairs = [(key.replace("__", "."), str(value)) for key, value in keys.items()]
    return read_recipe([], [("checkpoint_dir", "base"), *pairs], method=method)


OPTIONS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("dpo2", {}, ("objective is 'dpo2'", "simpo", "--objective dpo")),
    ("dpo", {"bta": 1}, ("objective.bta", "label_noise", "--objective.beta")),
    ("orpo", {"beta": 1}, ("objective.beta", "orpo", "weight")),
    ("dft", {"beta": 1}, ("objective.beta", "dft", "remove it")),
    ("dpo", {"loss": "sigmoyd"}, ("objective.loss is 'sigmoyd'", "--objective.loss sigmoid")),
    *(
        ("dpo", {"beta": value}, (f"objective.beta is {shown}", "above 0", "--objective.beta 0.1"))
        for value, shown in (
            (0, "0"), (-1, "-1"), (".nan", "nan"), (".inf", "inf"), ("high", "'high'"),
            ("true", "True"),
        )
    ),
    *(
        (name, {key: value}, (f"objective.{key}", f"--objective.{key} {default}"))
        for name, key, default in (
            ("sft", "z_loss", "0"), ("dpo", "sft_weight", "0"), ("orpo", "weight", "0.1"),
            ("simpo", "margin", "0.5"),
            ("kto", "desirable_weight", "1"), ("kto", "undesirable_weight", "1"),
            ("reward", "center_weight", "0"), ("eaft", "alpha", "1"),
            ("distill", "temperature", "1"), ("distill", "sft_weight", "0"),
            ("asft", "alpha", "0.1"),
        )
        for value in (-1, ".nan")
    ),
    (
        "dpo",
        {"loss": "robust", "label_noise": 0.5},
        ("objective.label_noise is 0.5", "below 0.5", "--objective.label_noise 0.1"),
    ),
    (
        "dpo",
        {"label_noise": 0.1},
        ("objective.label_noise is 0.1", "loss is sigmoid", "--objective.loss conservative"),
    ),
]  # fmt: skip


@pytest.mark.extensions
@pytest.mark.parametrize(("name", "options", "words"), OPTIONS)
def test_options_out_of_range_are_refused(
    name: str, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    keys = {f"objective__{key}": value for key, value in options.items()}
    made = recipe(objective=name, **keys)
    assert says(message_of(objective_options, made.objective), *words)


SETTINGS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("dft", {"train__label_smoothing": 0.1}, ("train.label_smoothing is 0.1", "dft")),
    ("orpo", {"reference": "other"}, ("reference is other", "orpo", "--objective dpo")),
    ("distill", {}, ("teacher is not set", "--teacher MODEL")),
    ("asft", {}, ("teacher is not set", "--teacher MODEL")),
    ("dpo", {"teacher": "other"}, ("teacher is other", "dpo", "--objective distill")),
    ("kto", {"train__global_batch_size": 1}, ("train.global_batch_size is 1", "kto")),
    *(
        ("reward", {key.replace(".", "__"): value}, (f"{key} is {value}", "reward", f"--{key} "))
        for key, value in (("eval.exact_match", 3), ("eval.rouge_l", 3), ("lora_head", "true"))
    ),
]


@pytest.mark.extensions
@pytest.mark.parametrize(("name", "keys", "words"), SETTINGS)
def test_settings_that_contradict_the_objective_are_refused(
    name: str, keys: dict[str, Any], words: tuple[str, ...]
) -> None:
    assert says(message_of(check_objective, recipe(objective=name, **keys)), *words)


WITHOUT_REFERENCE: list[tuple[Method, dict[str, Any], str]] = [
    ("full", {}, "reference is not set ... --reference base ... ftkit finetune)"),
    ("full", {"train__only": "norm"}, "reference is not set ... --reference base"),
    (
        "lora",
        {"lora_modules_to_save": "[norm]"},
        'lora_modules_to_save is ["norm"] ... --reference base ... --lora_modules_to_save null',
    ),
    ("lora", {"adapter": "mine"}, "adapter is mine ... --reference MODEL ... ftkit merge"),
]


@pytest.mark.extensions
@pytest.mark.parametrize(("method", "keys", "words"), WITHOUT_REFERENCE)
def test_a_second_model_in_memory_has_to_be_asked_for(
    method: Method, keys: dict[str, Any], words: str
) -> None:
    made = recipe(method, objective="kto", **keys)
    assert says(message_of(check_objective, made), "objective is kto", words)
    check_objective(recipe(method, objective="kto", reference="base", **keys))
    check_objective(recipe(method, objective="dpo", **keys))


BESIDE: list[tuple[Method, dict[str, Any], tuple[str, str, str | None] | None]] = [
    ("lora", {"objective": "kto"}, None),
    ("full", {"objective": "kto", "reference": "base"}, ("reference", "base", "transformers")),
    ("lora", {"objective": "kto", "reference": "base"}, ("reference", "base", "transformers")),
    ("lora", {"objective": "kto", "reference": "other"}, ("reference", "other", None)),
    ("lora", {"objective": "kto", "reference": "other", "adapter": "mine"},
     ("reference", "other", None)),
    ("full", {"objective": "dpo", "reference": "other"}, None),
    ("full", {"objective": "distill", "teacher": "large"}, ("teacher", "large", None)),
    ("full", {}, None),
]  # fmt: skip


@pytest.mark.extensions
@pytest.mark.parametrize(("method", "keys", "expected"), BESIDE)
def test_a_model_is_held_beside_the_trained_one_where_nothing_else_gives_its_numbers(
    method: Method, keys: dict[str, Any], expected: tuple[str, str, str | None] | None
) -> None:
    made = recipe(method, model_implementation="transformers", **keys)
    check_objective(made)
    found = model_beside(made)
    assert (found and (found.key, found.name, found.implementation)) == expected


@pytest.mark.parametrize("name", OBJECTIVES.names)
def test_every_objective_is_accepted_as_it_is(name: str) -> None:
    keys = {"teacher": "other"} if objective_row(name).needs_teacher else {}
    check_objective(recipe(objective=name, **keys))


@pytest.mark.parametrize("key", ["reference", "teacher"])
def test_a_second_model_that_is_not_there_is_named_by_its_key(key: str) -> None:
    def find() -> None:
        with naming(key):
            find_or_download("./nowhere")

    assert says(message_of(find), f"{key} ./nowhere does not exist")
