"""Language models within whole checkpoints, from end to end: training and files of the result.

Two that differ most stand for all in the run of slow tests; the others are the matrix.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import TOKENS, logits
from computed import assert_close
from family_runs import (
    CUT,
    STEPS,
    Directory,
    Found,
    as_it_was_trained,
    assert_written_as_theirs,
    logits_of_theirs,
    selected,
    train_all,
)
from multimodal_models import MODELS, SELDOM, make_multimodal_model, multimodal_model
from rank_jobs import METHODS, Run, assert_same_maths, make_run

from ftkit.recipe.recipe import Method

pytestmark = pytest.mark.slow

FEW = ("gemma4", "qwen3_5_moe")
"""With encoders of images and audio, and inputs for each layer; with states and experts."""
EACH = pytest.mark.parametrize(
    "model",
    [
        *FEW,
        *(
            pytest.param(model, marks=pytest.mark.matrix)
            for model in MODELS | SELDOM
            if model not in FEW
        ),
    ],
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    @functools.cache
    def made(model: str) -> Path:
        return make_multimodal_model(tmp_path_factory.mktemp("model"), model)

    return made


@pytest.fixture(scope="module")
def trained(run: Run, base_of: Directory, request: pytest.FixtureRequest) -> Found:
    return train_all(run, base_of, selected(request))


@EACH
@pytest.mark.parametrize("method", METHODS)
def test_the_loss_falls(trained: Found, model: str, method: Method) -> None:
    losses = trained[model, method, "whole"].losses
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]


@EACH
@pytest.mark.parametrize("method", METHODS)
def test_a_run_resumes_in_two_shards(trained: Found, model: str, method: Method) -> None:
    assert len(trained[model, method, "half"].losses) == CUT
    # What a random model answers may be the end of the text.
    resumed, whole = (trained[model, method, name] for name in ("resumed", "whole"))
    assert_same_maths(resumed, whole, answers=False)


@EACH
def test_an_adapter_loads_in_peft_on_the_whole_with_equal_logits(
    trained: Found, base_of: Directory, model: str
) -> None:
    outcome = trained[model, "lora", "whole"]
    found = logits_of_theirs(multimodal_model(base_of(model)), outcome.out_dir / "final")
    assert_close(logits(as_it_was_trained(outcome, "lora")), found)
    assert (found - logits_of_theirs(multimodal_model(base_of(model)))).abs().max() > 1e-3


@EACH
def test_a_full_result_is_the_whole_as_transformers_writes_it_with_equal_logits(
    trained: Found, base_of: Directory, model: str, tmp_path: Path
) -> None:
    outcome = trained[model, "full", "whole"]
    final, base = outcome.out_dir / "final", base_of(model)
    theirs = multimodal_model(final)
    assert_close(logits(as_it_was_trained(outcome, "full")), logits_of_theirs(theirs))
    assert_written_as_theirs(theirs, base, final, tmp_path)


@EACH
def test_full_training_changes_what_text_reaches_alone(
    trained: Found, base_of: Directory, model: str
) -> None:
    before, after = (
        multimodal_model(directory)
        for directory in (base_of(model), trained[model, "full", "whole"].out_dir / "final")
    )
    before(TOKENS).logits.sum().backward()
    # Gemma 3n embeds text as images too, and takes none of it.
    reached = {n for n, p in before.named_parameters() if p.grad is not None and p.grad.any()}
    weights = before.state_dict()
    changed = {n for n, tensor in after.state_dict().items() if not torch.equal(tensor, weights[n])}
    # An embedding may be reached by several names.
    assert {weights[name].data_ptr() for name in changed} == {
        weights[name].data_ptr() for name in reached
    }


@EACH
@pytest.mark.parametrize("method", METHODS)
def test_the_code_of_its_card_loads_a_result(
    trained: Found, base_of: Directory, model: str, method: Method
) -> None:
    from ftkit.extensions.publish.model_card import card_text, with_name

    if model == "mistral4":
        # Its results load in ftkit; the card names a class of transformers that lacks this type.
        pytest.skip("AutoModelForCausalLM of transformers 5.24 does not know it")
    outcome = trained[model, method, "whole"]
    card = card_text(outcome.report, base_of(model), "adapter" if method == "lora" else "hf")
    code = card.partition("```python\n")[2].partition("\nmessages = ")[0]
    found: dict[str, Any] = {}
    exec(with_name(code, str(outcome.out_dir / "final"), None), found)
    loaded = found["model"]
    assert loaded.config.architectures == [type(multimodal_model(base_of(model))).__name__]
    if method == "lora":
        pairs = [tensor for name, tensor in loaded.state_dict().items() if ".lora_B." in name]
        assert pairs and all(tensor.any() for tensor in pairs)
        loaded = loaded.get_base_model()
    assert [type(loaded).__name__] == loaded.config.architectures
