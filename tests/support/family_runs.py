"""Runs of tiny models of many families, and their results beside transformers' own models."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapters import TOKENS
from computed import filled
from rank_jobs import METHODS, Case, Outcome, Run
from safetensors.torch import load_file
from torch import Tensor

from ftkit.checkpoint.metadata import read_metadata
from ftkit.checkpoint.state import trained_parameter
from ftkit.checkpoint.stored_state import StoredState
from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.pretrained.base_model import open_base
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.recipe import Method

STEPS, CUT = 5, 2
COMMON: dict[str, Any] = {
    "model_implementation": "transformers",
    # A tied model says the last token of its prompt again: a word, not the end of a line.
    "data.prompt_style": "litgpt.prompts.Default",
    "train.max_steps": STEPS,
    "eval.interval": 3,
    "eval.max_new_tokens": 2,
    "eval.exact_match": 1,
    "eval.rouge_l": 1,
    # A bias of keys that are not rotated changes no weight of attention: its gradient is what
    # rounding leaves, which Adam would turn into steps of 1e-5 below its usual eps of 1e-8.
    "optimizer.eps": 1e-6,
}

Found = dict[tuple[str, ...], Outcome]
Directory = Callable[[str], Path]


def selected(request: pytest.FixtureRequest) -> list[str]:
    """Models of the selected tests of a module: with `-k MODEL`, one family takes seconds."""
    found = {
        item.callspec.params.get("model"): None
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and hasattr(item, "callspec")
    }
    return [str(model) for model in found if model is not None]


def case(base: Path, strategy: str, method: Method, **keys: Any) -> Case:
    changes = COMMON | {"checkpoint_dir": str(base)} | keys.pop("changes", {})
    return Case(strategy, method, changes=tuple(changes.items()), **keys)


def train_all(run: Run, base_of: Directory, models: Sequence[str]) -> Found:
    """The runs of some models, all in one process group: whole, stopped, and gone on with."""
    pairs = [(model, method) for model in models for method in METHODS]
    one: dict[tuple[str, ...], Case] = {}
    two: dict[tuple[str, ...], Case] = {}
    for model, method in pairs:
        one[model, method, "whole"] = case(base_of(model), "single", method)
        one[model, method, "half"] = case(base_of(model), "single", method, stop_after=CUT)
    found = outcomes(run, 1, one)
    for model, method in pairs:
        start = found[model, method, "half"].out_dir
        two[model, method, "resumed"] = case(base_of(model), "fsdp", method, start=start)
    return found | outcomes(run, 2, two)


def outcomes(run: Run, world_size: int, cases: dict[tuple[str, ...], Case]) -> Found:
    found = run(world_size, list(cases.values()))
    return {name: found[case] for name, case in cases.items()}


def as_it_was_trained(outcome: Outcome, method: Method) -> LanguageModel:
    """Ftkit's model with the numbers of the newest checkpoint, by ftkit's own names."""
    recipe = read_recipe([outcome.checkpoint / "recipe.yaml"], method=method)
    base = open_base(str(recipe.checkpoint_dir), "transformers")
    stored = StoredState.in_checkpoint(outcome.checkpoint, read_metadata(outcome.checkpoint))
    model = outline(base, recipe, torch.float32)
    return filled(
        model, base, seed=recipe.seed, trained=lambda name: trained_parameter(stored, name)
    ).eval()


@torch.no_grad()
def logits_of_theirs(model: Any, adapter: Path | None = None) -> Tensor:
    """Logits of transformers' model, with an adapter that PEFT loads."""
    from peft import PeftModel

    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    found: Tensor = model(TOKENS).logits
    return found


def assert_written_as_theirs(theirs: Any, base: Path, final: Path, empty: Path) -> None:
    """Files have the names, shapes and settings of the base, as what transformers loads saves.

    Args:
        theirs: transformers' model of `final`.
        base: the model that was trained.
        final: the result.
        empty: a directory to save it in.
    """
    theirs.save_pretrained(empty)
    before, ours, again = (load_file(d / "model.safetensors") for d in (base, final, empty))
    assert ours.keys() == again.keys() == before.keys()
    for name, tensor in again.items():
        assert ours[name].shape == before[name].shape
        assert torch.equal(ours[name], tensor)
    settings = [transformers.AutoConfig.from_pretrained(d).to_dict() for d in (base, final)]
    for one in settings:
        del one["_name_or_path"]
        one.setdefault("tie_word_embeddings", False)  # Inkling has no such key
    assert settings[1] == settings[0]
    assert settings[1]["architectures"] == [type(theirs).__name__]
