"""Models of many families from end to end: training, resuming elsewhere, files of the result.

Three that differ most stand for all in the run of slow tests; the others are the matrix.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
from adapters import logits
from computed import assert_close
from family_runs import (
    CUT,
    STEPS,
    Directory,
    Found,
    as_it_was_trained,
    assert_written_as_theirs,
    case,
    logits_of_theirs,
    outcomes,
    selected,
    train_all,
)
from rank_jobs import METHODS, Run, assert_same_maths, make_run
from transformers_models import (
    MODELS,
    MORE_MODELS,
    NEWEST,
    make_transformers_model,
    transformers_model,
)

from ftkit.recipe.recipe import Method

pytestmark = pytest.mark.slow

FEW = ("gemma3_text", "qwen3_moe", "gpt2")
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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    @functools.cache
    def made(model: str) -> Path:
        return make_transformers_model(tmp_path_factory.mktemp("model"), model)

    return made


@pytest.fixture(scope="module")
def trained(run: Run, base_of: Directory, request: pytest.FixtureRequest) -> Found:
    return train_all(run, base_of, selected(request))


@pytest.fixture(scope="module")
def varied(run: Run, base_of: Directory) -> Found:
    cases = {
        (model, variant): case(base_of(model), "single", "lora", changes=keys)
        for model in VARIED
        for variant, keys in VARIANTS.items()
    }
    return outcomes(run, 1, cases)


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
    found = logits_of_theirs(transformers_model(base_of(model)), outcome.out_dir / "final")
    assert_close(logits(as_it_was_trained(outcome, "lora")), found)
    assert (found - logits_of_theirs(transformers_model(base_of(model)))).abs().max() > 1e-3


@EACH
def test_a_full_result_is_as_transformers_writes_it_with_equal_logits(
    trained: Found, base_of: Directory, model: str, tmp_path: Path
) -> None:
    outcome = trained[model, "full", "whole"]
    final, base = outcome.out_dir / "final", base_of(model)
    theirs = transformers_model(final)
    found = logits_of_theirs(theirs)
    assert_close(logits(as_it_was_trained(outcome, "full")), found)
    assert (found - logits_of_theirs(transformers_model(base))).abs().max() > 1e-3
    assert_written_as_theirs(theirs, base, final, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("model", VARIED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_of_each_variant_loads_in_peft_with_equal_logits(
    varied: Found, base_of: Directory, model: str, variant: str
) -> None:
    outcome = varied[model, variant]
    assert outcome.losses[-1] < outcome.losses[0]
    found = logits_of_theirs(transformers_model(base_of(model)), outcome.out_dir / "final")
    assert_close(logits(as_it_was_trained(outcome, "lora")), found)
    assert (found - logits_of_theirs(transformers_model(base_of(model)))).abs().max() > 1e-3
