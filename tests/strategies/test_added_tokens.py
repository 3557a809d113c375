"""Runs that add tokens to the vocabulary: every strategy, resuming elsewhere, use of the result."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import NO_EVALUATION, Case, Outcome, assert_same_maths, chosen, layouts, make_run
from safetensors.torch import load_file

from ftkit.cli.app import run
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Method

pytestmark = pytest.mark.slow

WRITTEN = ("colour of", "red cat", "blue moon")
"""Texts that prompts and answers contain."""
TOKENS = (*WRITTEN, *(f"<{number}>" for number in range(80)))
"""More than the model has rows that no token has."""
STRATEGIES = ("ddp", "fsdp", "deepspeed")
Changes = tuple[tuple[str, Any], ...]
Found = dict[tuple[str, ...], Outcome]
OFTEN = {
    ("ddp", "LoRA, tied"),
    ("fsdp", "full, tied"),
    ("deepspeed", "full"),
    ("resumed", "full"),
    ("resumed", "LoRA"),
}
"""Strategy and kind outside the matrix; the others repeat them."""
KINDS: dict[str, tuple[Method, bool]] = {
    "full": ("full", False),
    "full, tied": ("full", True),
    "LoRA": ("lora", False),
    "LoRA, tied": ("lora", True),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Found:
    """Runs of the selected tests, by strategy and kind."""
    run_cases = make_run(tmp_path_factory)
    wanted = {
        (params["strategy"], params["kind"])
        for params in chosen(request, test_two_ranks_learn_as_one_does)
    }
    answers = chosen(request, test_a_result_answers_and_is_merged_with_its_tokens)
    wanted |= {("resumed", params["kind"]) for params in answers}

    def case(strategy: str, kind: str, **keys: Any) -> Case:
        method, tied = KINDS[kind]
        changes: tuple[tuple[str, Any], ...] = (
            *NO_EVALUATION,
            ("data.add_tokens", TOKENS),
            ("optimizer.eps", 1e-6),
        )
        if method == "lora":
            changes += (("lora_head", False),)
        return Case(strategy, method, changes=changes, tied=tied, **keys)

    one = {("single", kind): case("single", kind) for kind in KINDS}
    resumed = sorted(kind for strategy, kind in wanted if strategy == "resumed")
    one |= {("half", kind): case("single", kind, stop_after=4) for kind in resumed}
    alone = run_cases(1, list(one.values()))
    known = {name: alone[a_case] for name, a_case in one.items()}
    two = {
        (strategy, kind): case("fsdp", kind, start=known["half", kind].out_dir)
        if strategy == "resumed"
        else case(strategy, kind)
        for strategy, kind in sorted(wanted)
    }
    in_two = run_cases(2, list(two.values()))
    return known | {name: in_two[a_case] for name, a_case in two.items()}


@pytest.mark.parametrize(
    ("strategy", "kind"),
    layouts(itertools.product((*STRATEGIES, "resumed"), KINDS), OFTEN),
)
def test_two_ranks_learn_as_one_does(strategy: str, kind: str, found: Found) -> None:
    assert_same_maths(found[strategy, kind], found["single", kind], validations=0)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_new_tokens_are_trained_and_saved(kind: str, found: Found) -> None:
    outcome = found["single", kind]
    tokenizer = Tokenizer(outcome.out_dir / "final")
    ids = [tokenizer.token_id(text) for text in WRITTEN]
    (name,) = (name for name in outcome.weights() if name.endswith("embed_tokens.weight"))
    rows = outcome.weights()[name][ids]
    # They began as the same mean.
    assert (rows[0] - rows[1]).abs().max() > 1e-4


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.matrix] * (("resumed", kind) not in OFTEN))
        for kind in KINDS
    ],
)
def test_a_result_answers_and_is_merged_with_its_tokens(
    kind: str, found: Found, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = found["resumed", kind]
    outcome.complete()
    words = ["--prompt", "what is the colour of red cat", "--max_new_tokens", "4"]
    assert run(["generate", str(outcome.out_dir), *words]) == 0
    answer = capsys.readouterr().out
    if KINDS[kind][0] == "full":
        return
    # The adapter alone says which tokens its base model lacks.
    alone = tmp_path / "adapter"
    (outcome.out_dir / "final").rename(alone)
    assert run(["generate", str(alone), *words]) == 0
    assert capsys.readouterr().out.splitlines()[0] == answer.splitlines()[0]
    assert run(["merge", str(alone), "--out", str(tmp_path / "merged")]) == 0
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    (file,) = (tmp_path / "merged").glob("*.safetensors")
    embedding = load_file(file)["model.embed_tokens.weight"]
    assert config["vocab_size"] == len(embedding)
    assert Tokenizer(tmp_path / "merged").token_id(TOKENS[-1]) == len(embedding) - 1
    assert torch.isfinite(embedding).all()
