"""Tokens that are added to a vocabulary: rows, tokenizer, files of results, refusals."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import MAKERS, build, export, lora_recipe, train
from computed import filled
from messages import key_words
from tiny import make_llama
from torch import Tensor

from ftkit.errors import UserError
from ftkit.models.language_model import outline
from ftkit.models.lora.targets import our_name
from ftkit.models.pretrained.added_tokens import with_added_tokens
from ftkit.models.pretrained.base_model import (
    BaseModel,
    fingerprint,
    open_base,
    open_without_weights,
    parameter_shapes,
    read_blueprint,
    save_without_weights,
    vocabulary_parameters,
    weights,
)
from ftkit.models.pretrained.save import save_hf, save_in_own_layout
from ftkit.recipe.peft_adapter import noted_tokens
from ftkit.recipe.recipe import Recipe

MANY = [f"<{number}>" for number in range(80)]
"""More than a tiny model has rows that no token has."""
TEXT = "red<3> cat <1>"
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BaseModel]:
    directory = tmp_path_factory.mktemp("bases")
    found = {
        name: open_base(str(make(directory / name.replace(" ", "-"))))
        for name, make in MAKERS.items()
    }
    llama = found["llama"]
    found["computed by transformers"] = open_base(str(llama.directory), "transformers")
    save_in_own_layout(llama, weights(llama), directory / "litgpt", layout="litgpt")
    found["in LitGPT's layout"] = open_base(str(directory / "litgpt"))
    return found


FAMILIES = [*MAKERS, "computed by transformers", "in LitGPT's layout"]


def rows_of(base: BaseModel) -> int:
    return parameter_shapes(base)[base.architecture.embedding][0]


@pytest.mark.extensions
@pytest.mark.parametrize("count", [2, 80])
@pytest.mark.parametrize("name", FAMILIES)
def test_new_rows_are_the_mean_of_those_of_all_other_tokens(
    bases: dict[str, BaseModel], name: str, count: int
) -> None:
    base = bases[name]
    first = base.tokenizer.largest_id + 1
    grown = with_added_tokens(base, MANY[:count])
    ids = [grown.tokenizer.token_id(text) for text in MANY[:count]]
    assert ids == [*range(first, first + count)]
    assert rows_of(grown) == max(rows_of(base), first + count)
    before, after = dict(weights(base)), dict(weights(grown))
    assert before.keys() == after.keys()
    for parameter, old in before.items():
        new = after[parameter]
        if parameter not in vocabulary_parameters(base):
            assert torch.equal(old, new)
            continue
        assert torch.equal(new[:first], old[:first])
        mean = old[:first].mean(0)
        torch.testing.assert_close(new[ids], mean.expand(count, -1), rtol=0, atol=1e-6)


@pytest.mark.extensions
def test_texts_have_the_new_tokens_whole(bases: dict[str, BaseModel]) -> None:
    tokenizer = with_added_tokens(bases["llama"], MANY).tokenizer
    ids = tokenizer.encode("<3>red<1>", bos=False)
    assert [int(ids[0]), int(ids[-1])] == [tokenizer.token_id(token) for token in ("<3>", "<1>")]
    assert tokenizer.decode(ids) == "<3>red<1>"


@pytest.mark.extensions
def test_tokens_that_are_there_are_not_added_again(bases: dict[str, BaseModel]) -> None:
    base = bases["llama"]
    assert with_added_tokens(base, []) is base
    grown = with_added_tokens(base, MANY[:3])
    assert with_added_tokens(grown, MANY[:3]) is grown
    known = base.tokenizer.token_text(5)
    assert with_added_tokens(base, [known, "<new>"]).added_tokens == ("<new>",)


@pytest.mark.extensions
def test_the_fingerprint_follows_from_model_and_tokens(bases: dict[str, BaseModel]) -> None:
    base = bases["llama"]
    found = fingerprint(with_added_tokens(base, ["<a>", "<b>"]))
    assert found == fingerprint(with_added_tokens(base, ["<a>", "<b>"]))
    others = [base, with_added_tokens(base, ["<b>", "<a>"]), with_added_tokens(base, ["<a>"])]
    assert found not in map(fingerprint, others)


def tokens_of(base: BaseModel) -> Tensor:
    """Old and new tokens, [2, 12]."""
    new = torch.tensor([base.tokenizer.token_id(text) for text in MANY[:12]])
    return torch.stack([torch.arange(12) * 7, new])


@torch.no_grad()
def logits_of(model: Any, base: BaseModel) -> Tensor:
    """[2, 12, vocabulary] of ftkit's model."""
    tokens = tokens_of(base)
    result: Tensor = model.eval()(tokens, torch.arange(tokens.numel()))
    return result.view(*tokens.shape, -1)


@torch.no_grad()
def assert_same_logits(theirs: Any, ours: Any, base: BaseModel) -> None:
    found, expected = theirs.eval()(tokens_of(base)).logits, logits_of(ours, base)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.extensions
@pytest.mark.parametrize("name", [*MAKERS, "computed by transformers"])
def test_an_adapter_with_new_tokens_loads_in_peft_with_equal_logits(
    bases: dict[str, BaseModel], name: str, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    grown = with_added_tokens(bases[name], MANY)
    recipe = lora_recipe(grown)
    model = train(build(grown, recipe))
    # Without a key that names them, embedding and head are trained beside the adapter.
    trained = {our_name(name) for name, p in model.named_parameters() if p.requires_grad}
    assert trained > {*vocabulary_parameters(grown)} & parameter_shapes(grown).keys()
    adapter = export(model, grown, recipe, tmp_path / "adapter")
    assert noted_tokens(adapter) == MANY
    theirs = AutoModelForCausalLM.from_pretrained(grown.directory, dtype=torch.float32)
    theirs.resize_token_embeddings(rows_of(grown))
    found = PeftModel.from_pretrained(theirs, adapter)
    assert_same_logits(found, model, grown)
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    expected = grown.tokenizer.encode(TEXT, bos=False).tolist()
    assert tokenizer(TEXT, add_special_tokens=False).input_ids == expected
    # An adapter is read back on the model of its tokens.
    again = lora_recipe(grown, adapter=adapter, data__add_tokens=MANY)
    assert torch.equal(logits_of(build(grown, again), grown), logits_of(model, grown))


def full_model(base: BaseModel) -> Any:
    model = outline(base, Recipe(checkpoint_dir="base"), torch.float32)
    return filled(model, base, rope_length=32, seed=1).eval()


@pytest.mark.extensions
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_with_new_tokens_loads_in_transformers_with_equal_logits(
    bases: dict[str, BaseModel], name: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    grown = with_added_tokens(bases[name], MANY)
    save_hf(grown, weights(grown), tmp_path / "model")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert found.config.vocab_size == rows_of(grown)
    assert_same_logits(found, full_model(grown), grown)
    expected = grown.tokenizer.encode(TEXT, bos=False).tolist()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer(TEXT, add_special_tokens=False).input_ids == expected
    # Opened by itself, the result has the tokens as its own.
    opened = open_base(str(tmp_path / "model"))
    assert with_added_tokens(opened, MANY) is opened


@pytest.mark.extensions
@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_keeps_what_it_needs_of_a_model_with_new_tokens(
    bases: dict[str, BaseModel], name: str, tmp_path: Path
) -> None:
    grown = with_added_tokens(bases[name], MANY)
    save_without_weights(grown, tmp_path)
    found = open_without_weights(tmp_path)
    assert parameter_shapes(found) == parameter_shapes(grown)
    assert with_added_tokens(found, MANY) is found
    assert found.tokenizer.encode(TEXT).tolist() == grown.tokenizer.encode(TEXT).tolist()


@pytest.mark.extensions
def test_a_plan_knows_the_rows_with_and_without_the_tokenizer(
    bases: dict[str, BaseModel], tmp_path: Path
) -> None:
    base = bases["llama"]
    assert base.directory is not None
    described = with_added_tokens(read_blueprint(str(base.directory)), MANY)
    assert parameter_shapes(described) == parameter_shapes(with_added_tokens(base, MANY))
    (tmp_path / "config.json").write_bytes((base.directory / "config.json").read_bytes())
    alone = with_added_tokens(read_blueprint(str(tmp_path)), MANY)
    assert rows_of(alone) == rows_of(base) + len(MANY)
    assert alone.added_tokens == tuple(MANY)


@pytest.mark.extensions
def test_training_from_an_adapter_asks_for_its_tokens(
    bases: dict[str, BaseModel], tmp_path: Path
) -> None:
    grown = with_added_tokens(bases["llama"], ["<a>", "<b>"])
    recipe = lora_recipe(grown)
    adapter = export(build(grown, recipe), grown, recipe, tmp_path / "adapter")
    with pytest.raises(UserError, match=key_words("<b> as tokens ... --data.add_tokens '[\"<a>")):
        lora_recipe(grown, adapter=adapter, data__add_tokens=["<a>"])


@pytest.mark.extensions
def test_what_cannot_grow_is_refused_by_name(bases: dict[str, BaseModel], tmp_path: Path) -> None:
    base = bases["llama"]
    make_llama(tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    settings = json.loads(file.read_text())
    vocabulary = settings["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    vocabulary[last] += 7
    file.write_text(json.dumps(settings))
    with pytest.raises(UserError, match=key_words("data.add_tokens ... have gaps")):
        with_added_tokens(open_base(str(tmp_path / "model")), MANY[:3])
    part = dataclasses.replace(base, settings={"model_type": "gemma3", "text_config": {}})
    with pytest.raises(UserError, match=key_words("data.add_tokens ... part of a larger model")):
        with_added_tokens(part, MANY)
