"""Models of many families from end to end: training, resuming elsewhere, files of the result.

Four that differ most stand for all in the run of slow tests; the others are the matrix.
"""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapters import TOKENS, logits
from computed import filled
from rank_jobs import Case, Outcome, Run, assert_same_maths, make_run
from safetensors.torch import load_file
from torch import Tensor
from transformers_models import (
    MODELS,
    MORE_MODELS,
    NEWEST,
    make_transformers_model,
    transformers_model,
)

from ftkit.checkpoint.metadata import read_metadata
from ftkit.checkpoint.shards import StoredState
from ftkit.checkpoint.state import trained_parameter
from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.pretrained.base_model import open_base
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.recipe import Method

pytestmark = pytest.mark.slow

FEW = ("gemma3_text", "qwen3_moe", "gpt2", "phi3 window")
OTHERS = tuple(model for model in MODELS | NEWEST | MORE_MODELS if model not in FEW)
VARIANTS: dict[str, dict[str, Any]] = {
    "dora": {"lora_variant": "dora"},
    "rslora": {"lora_variant": "rslora"},
    "pissa": {"lora_init": "pissa"},
    "whole layers": {"lora_modules_to_save": ("norm",), "lora_head": False},
    "whole embedding": {"lora_modules_to_save": ("embed_tokens",), "lora_head": False},
}
VARIED = ("qwen3", "gemma3_text")
"""Models of the variants: with a head of its own, and tied."""
EACH = pytest.mark.parametrize(
    "model", [*FEW, *(pytest.param(model, marks=pytest.mark.matrix) for model in OTHERS)]
)
METHODS: tuple[Method, ...] = ("full", "lora")
STEPS, CUT = 5, 2
COMMON: dict[str, Any] = {
    "model_implementation": "transformers",
    # A tied model says the last token of its prompt again: a word, not the end of a line.
    "data.prompt_style": "litgpt.prompts.Default",
    "train.max_steps": STEPS,
    "eval.interval": 3,
    # A bias of keys that are not rotated changes no weight of attention: its gradient is what
    # rounding leaves, which Adam would turn into steps of 1e-5 below its usual eps of 1e-8.
    "optimizer.eps": 1e-6,
}

Found = dict[tuple[str, ...], Outcome]
Directory = Callable[[str], Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    @functools.cache
    def made(model: str) -> Path:
        return make_transformers_model(tmp_path_factory.mktemp("model"), model)

    return made


def case(base: Path, strategy: str, method: Method, **keys: Any) -> Case:
    changes = COMMON | {"checkpoint_dir": str(base)} | keys.pop("changes", {})
    return Case(strategy, method, changes=tuple(changes.items()), **keys)


@pytest.fixture(scope="module")
def few(run: Run, base_of: Directory) -> Found:
    return train(run, base_of, FEW)


@pytest.fixture(scope="module")
def others(run: Run, base_of: Directory, request: pytest.FixtureRequest) -> Found:
    """Those of the selected tests: with `-k MODEL`, one family takes seconds."""
    wanted = {
        item.callspec.params.get("model")
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    }
    return train(run, base_of, [model for model in OTHERS if model in wanted])


@pytest.fixture
def trained(model: str, request: pytest.FixtureRequest) -> Found:
    found: Found = request.getfixturevalue("few" if model in FEW else "others")
    return found


def train(run: Run, base_of: Directory, models: Sequence[str]) -> Found:
    """The runs of some models, all in one process group: whole, stopped, and gone on with."""
    pairs = [(model, method) for model in models for method in METHODS]
    one, two = {}, {}
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


@pytest.fixture(scope="module")
def varied(run: Run, base_of: Directory) -> Found:
    cases = {
        (model, variant): case(base_of(model), "single", "lora", changes=keys)
        for model in VARIED
        for variant, keys in VARIANTS.items()
    }
    return outcomes(run, 1, cases)


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
def logits_of_theirs(directory: Path, adapter: Path | None = None) -> Tensor:
    """Loss of transformers' model with an adapter that PEFT loads."""
    from peft import PeftModel

    model: Any = transformers_model(directory)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    found: Tensor = model(TOKENS).logits
    return found


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@EACH
@pytest.mark.parametrize("method", METHODS)
def test_the_loss_falls(trained: Found, model: str, method: Method) -> None:
    outcome = trained[model, method, "whole"]
    assert len(outcome.losses) == STEPS
    # On the same samples: those of a step may be easier than what LoRA has learned before.
    assert outcome.validation_losses[-1] < outcome.validation_losses[0]


@EACH
@pytest.mark.parametrize("method", METHODS)
def test_a_run_resumes_in_two_shards(trained: Found, model: str, method: Method) -> None:
    assert len(trained[model, method, "half"].losses) == CUT
    # What a random model answers may be the end of the text.
    resumed, whole = (trained[model, method, name] for name in ("resumed", "whole"))
    assert_same_maths(resumed, whole, answers=False)


@EACH
def test_an_adapter_loads_in_peft_with_equal_logits(
    trained: Found, base_of: Directory, model: str
) -> None:
    outcome = trained[model, "lora", "whole"]
    found = logits_of_theirs(base_of(model), outcome.out_dir / "final")
    assert_close(logits(as_it_was_trained(outcome, "lora")), found)
    assert (found - logits_of_theirs(base_of(model))).abs().max() > 1e-3


@EACH
def test_a_full_result_is_as_transformers_writes_it_with_equal_logits(
    trained: Found, base_of: Directory, model: str, tmp_path: Path
) -> None:
    outcome = trained[model, "full", "whole"]
    final, base = outcome.out_dir / "final", base_of(model)
    found = logits_of_theirs(final)
    assert_close(logits(as_it_was_trained(outcome, "full")), found)
    assert (found - logits_of_theirs(base)).abs().max() > 1e-3
    theirs = transformers_model(final)
    theirs.save_pretrained(tmp_path)
    before, ours, again = (load_file(d / "model.safetensors") for d in (base, final, tmp_path))
    assert ours.keys() == again.keys() == before.keys()
    for name, tensor in again.items():
        assert ours[name].shape == before[name].shape
        assert torch.equal(ours[name], tensor)
    settings = [transformers.AutoConfig.from_pretrained(d).to_dict() for d in (base, final)]
    for one in settings:
        del one["_name_or_path"]
    assert settings[1] == settings[0]
    written = json.loads((final / "config.json").read_text())
    assert written["architectures"] == [type(theirs).__name__]


@pytest.mark.matrix
@pytest.mark.parametrize("model", VARIED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_of_each_variant_loads_in_peft_with_equal_logits(
    varied: Found, base_of: Directory, model: str, variant: str
) -> None:
    outcome = varied[model, variant]
    assert outcome.losses[-1] < outcome.losses[0]
    found = logits_of_theirs(base_of(model), outcome.out_dir / "final")
    assert_close(logits(as_it_was_trained(outcome, "lora")), found)
    assert (found - logits_of_theirs(base_of(model))).abs().max() > 1e-3
