"""The part of a model that is trained: what its names are, and what is refused."""

from pathlib import Path

import pytest
import torch
from messages import key_words
from tiny import make_llama
from transformers_models import make_transformers_model

from ftkit.errors import UserError
from ftkit.models.language_model import outline
from ftkit.models.lora.targets import our_name
from ftkit.models.pretrained.base_model import BaseModel, open_base
from ftkit.models.trained_part import trained_names
from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import make_plan
from ftkit.recipe.recipe import Train


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return open_base(str(make_llama(tmp_path_factory.mktemp("llama"))))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return open_base(str(make_llama(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)))


def count(base: BaseModel, **keys: str) -> int:
    return len(trained_names(base, Train(**keys)))


PER_LAYER = 9
"""Parameters of a layer: four of attention, three of the MLP, two norms."""


@pytest.mark.parametrize(
    ("keys", "number"),
    [
        ({"only": "layers[.]1[.]"}, PER_LAYER),
        ({"only": "^model.layers.*mlp"}, 2 * 3),
        ({"only": "q_proj.weight$"}, 2),
        ({"only": "layers[.]{last 1}[.]"}, PER_LAYER),
        ({"only": r"^\D*[.]{first 1}[.](?:mlp)|lm_head"}, 3 + 1),
        ({"freeze": "[.]{last 9}[.]"}, 3),
        ({"only": "layers", "freeze": "norm"}, 2 * (PER_LAYER - 2)),
        ({"freeze": "layers"}, 3),
        ({"freeze": "layers|norm|lm_head"}, 1),
    ],
)
def test_an_expression_is_searched_in_names_of_hugging_face(
    llama: BaseModel, keys: dict[str, str], number: int
) -> None:
    assert count(llama, **keys) == number


def test_without_an_expression_everything_is_trained(llama: BaseModel) -> None:
    assert count(llama) == 2 * PER_LAYER + 3


def test_tied_weights_are_one_parameter_with_two_names(tied: BaseModel) -> None:
    assert trained_names(tied, Train(only="lm_head")) == {tied.architecture.embedding}
    assert trained_names(tied, Train(only="embed_tokens")) == {tied.architecture.embedding}
    assert tied.architecture.embedding not in trained_names(tied, Train(freeze="lm_head"))


def test_a_fused_layer_is_one_name_for_all_of_its_parts(tmp_path: Path) -> None:
    base = open_base(str(make_transformers_model(tmp_path / "phi3", "phi3", num_hidden_layers=2)))
    recipe = read_recipe(
        [], [("checkpoint_dir", str(base.directory)), ("train.only", "qkv_proj")], method="full"
    )
    model = outline(base, recipe, torch.float32)
    trained = {our_name(name) for name, p in model.named_parameters() if p.requires_grad}
    assert trained == trained_names(base, recipe.train)
    assert trained and all("qkv" in name for name in trained)


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"only": "layers[.]9[.]"}, ["train.only", "layers[.]9[.]", "model.layers.1.mlp"]),
        ({"freeze": "self_atn"}, ["train.freeze", "self_atn", "self_attn"]),
        ({"only": "("}, ["train.only", "regular expression", "--train.only"]),
        ({"only": "mlp", "freeze": "proj"}, ["train.only", "train.freeze", "frozen"]),
        ({"freeze": "."}, ["train.freeze", "frozen", "--train.freeze null"]),
        (
            {"only": "mlp", "tie_embeddings": "true"},
            ["train.tie_embeddings", "--train.tie_embeddings null"],
        ),
    ],
)
def test_a_part_that_does_not_exist_is_refused_with_names_near_it(
    llama: BaseModel, keys: dict[str, str], words: list[str]
) -> None:
    pairs = [(f"train.{key}", value) for key, value in keys.items()]
    train = read_recipe([], [("checkpoint_dir", "x"), *pairs], method="full").train
    with pytest.raises(UserError, match=key_words(*words)):
        trained_names(llama, train)


def test_an_expression_that_takes_forever_is_refused(llama: BaseModel) -> None:
    with pytest.raises(UserError, match=key_words("train.only", "too long")):
        count(llama, only="(.|[a-z.])*[0-9]{9}")


@pytest.mark.parametrize("key", ["only", "freeze"])
def test_lora_has_other_keys_for_its_layers(key: str) -> None:
    recipe = read_recipe([], [("checkpoint_dir", "x"), (f"train.{key}", "mlp")], method="lora")
    words = [f"train.{key}", "--lora_targets", "finetune_full", f"--train.{key} null"]
    with pytest.raises(UserError, match=key_words(*words)):
        make_plan(recipe, Devices(accelerator="cpu", count=1))
