"""Reward models: made of language models, written for transformers, and read again."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import message_of, says
from tiny import make_llama
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from transformers_models import MODELS, make_transformers_model

from ftkit.models.architectures.architecture import HEAD, Implementation
from ftkit.models.language_model import outline_plain
from ftkit.models.load_weights import initial_score
from ftkit.models.pretrained.base_model import BaseModel, fingerprint, open_base, weights
from ftkit.models.pretrained.recipe_model import base_for
from ftkit.models.pretrained.save import chat_files, save_hf
from ftkit.models.pretrained.scored_model import as_scored, padding_token
from ftkit.recipe.objectives import ScoreLabels
from ftkit.recipe.recipe import Component, Recipe

SEQUENCES = [[0, 7, 9, 1], [0, 30, 2, 4, 8, 1]]
FEW: dict[str, dict[str, Any]] = {
    "llama tied": {},
    "gpt_neox": {"num_key_value_heads": 4},
    "gpt2": {},
    "gemma2": {},
}
WITHOUT_SCORES = {
    "apertus",
    "cohere",
    "cohere2",
    "ernie4_5",
    "granite",
    "granitemoe",
    "olmoe",
}
"""Families of which transformers has no such class."""

REWARD = ScoreLabels()


def with_score(base: BaseModel) -> Iterator[tuple[str, Tensor]]:
    yield from weights(base)
    width = base.architecture.parameter_shapes(tied=False)[HEAD][1]
    yield HEAD, initial_score(torch.Size((1, width)), seed=3)


def scores_of(base: BaseModel) -> list[float]:
    """Of the sequences, as ftkit computes them."""
    known = dict(with_score(base)) if base.source is not None else dict(weights(base))
    model = outline_plain(base, torch.float32, tied=False)
    merge = pytest.importorskip("ftkit.extensions.publish.merge")
    outputs = merge.logits_of(model, known.__getitem__, SEQUENCES)
    ends = torch.tensor([len(one) for one in SEQUENCES]).cumsum(0) - 1
    found: list[float] = outputs[ends, 0].tolist()
    return found


def scores_of_transformers(directory: Path) -> list[float]:
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        directory, output_loading_info=True, dtype=torch.float32
    )
    assert not any(loading.values()), loading
    width = max(map(len, SEQUENCES))
    padding = model.config.pad_token_id
    rows = [[*one, *[padding] * (width - len(one))] for one in SEQUENCES]
    with torch.no_grad():
        found: list[float] = model(torch.tensor(rows)).logits[:, 0].tolist()
    return found


def saved(base: BaseModel, out: Path) -> None:
    files = chat_files(base, "{{ messages }}", {base.tokenizer.eos_id})
    save_hf(base, with_score(base), out, others=files)


def check_family(
    directory: Path, name: str, implementation: Implementation | None, **changes: Any
) -> None:
    original = make_transformers_model(directory / "base", name, **changes)
    base = open_base(str(original), implementation)
    reward = as_scored(base, REWARD)
    saved(reward, directory / "saved")
    expected = scores_of(reward)
    assert scores_of_transformers(directory / "saved") == pytest.approx(expected, abs=1e-5)
    again = open_base(str(directory / "saved"), implementation)
    assert again.architecture.scores and not again.tied
    assert scores_of(again) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", FEW)
def test_transformers_gives_the_same_scores(name: str, tmp_path: Path) -> None:
    check_family(tmp_path, name, None, **FEW[name])


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_every_family_gives_the_same_scores_or_is_refused(name: str, tmp_path: Path) -> None:
    if name not in WITHOUT_SCORES:
        check_family(tmp_path, name, "transformers")
        return
    base = open_base(str(make_transformers_model(tmp_path, name)), "transformers")
    assert says(message_of(as_scored, base, REWARD), "checkpoint_dir", "scores")


def test_a_reward_model_has_the_fingerprint_of_what_it_is_made_of(tiny_base: Path) -> None:
    base = open_base(str(tiny_base))
    assert fingerprint(as_scored(base, REWARD)) == fingerprint(base)
    assert as_scored(as_scored(base, REWARD), REWARD).source == base


def test_the_score_starts_by_the_seed_alone() -> None:
    shape = torch.Size((1, 64))
    first = initial_score(shape, 1)
    assert torch.equal(first, initial_score(shape, 1))
    assert not torch.equal(first, initial_score(shape, 2))
    assert first.std() == pytest.approx(0.02, rel=0.3)


def make_tokenizer_config(directory: Path, **changes: Any) -> BaseModel:
    base = make_llama(directory / "base")
    file = base / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return as_scored(open_base(str(base)), REWARD)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, "<s>", id="begin: no sequence ends with it"),
        pytest.param({"pad_token": "cat"}, "cat", id="its own"),
        pytest.param({"pad_token": "</s>"}, "<s>", id="its own is the end"),
        pytest.param({"bos_token": "</s>", "pad_token": "</s>"}, "<s>", id="another special one"),
    ],
)
def test_padding_is_a_token_that_no_sequence_ends_with(
    changes: dict[str, str], expected: str, tmp_path: Path
) -> None:
    base = make_tokenizer_config(tmp_path, **changes)
    assert padding_token(base, {base.tokenizer.eos_id}) == expected
    saved(base, tmp_path / "saved")
    settings = json.loads((tmp_path / "saved/tokenizer_config.json").read_text())
    assert settings["pad_token"] == expected
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert config["pad_token_id"] == base.tokenizer.token_id(expected)


def test_without_any_special_token_padding_is_a_rare_one(tiny_base: Path) -> None:
    base = as_scored(open_base(str(tiny_base)), REWARD)
    ends = {0, 1}
    found = base.tokenizer.token_id(padding_token(base, ends))
    assert found is not None and found not in ends
    assert found > 300, "one of the last merges"


def recipe_of(objective: str) -> Recipe:
    return Recipe(checkpoint_dir="any", objective=Component(class_path=objective, init_args={}))


@pytest.mark.extensions
def test_a_reward_model_is_trained_on_as_one_alone(tiny_base: Path, tmp_path: Path) -> None:
    saved(as_scored(open_base(str(tiny_base)), REWARD), tmp_path / "saved")
    again = open_base(str(tmp_path / "saved"))
    assert base_for(again, recipe_of("reward")) is again
    refusal = message_of(base_for, again, recipe_of("dpo"))
    assert says(refusal, "saved", "reward", "dpo", "--objective reward")


def test_a_classifier_keeps_its_labels_and_is_trained_on_with_these_alone(
    tiny_base: Path, tmp_path: Path
) -> None:
    scores = ScoreLabels(names=("good", "bad"), problem_type="single_label_classification")
    base = as_scored(open_base(str(tiny_base)), scores)
    score = initial_score(torch.Size((2, 64)), seed=3)
    save_hf(base, [*weights(base), (HEAD, score)], tmp_path / "saved")
    settings = json.loads((tmp_path / "saved/config.json").read_text())
    assert settings["label2id"] == {"good": 0, "bad": 1}
    again = open_base(str(tmp_path / "saved"))
    assert again.architecture.scores == scores and as_scored(again, scores) is again
    refusal = message_of(as_scored, again, dataclasses.replace(scores, names=("bad", "good")))
    assert says(refusal, "saved", "good, bad", "bad, good", "objective")
