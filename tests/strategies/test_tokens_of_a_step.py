"""Promises P1 and P2 of steps that are cut by tokens: equal on any ranks, also on resume."""

import itertools
from typing import Any

import pytest
import torch
from rank_jobs import NO_EVALUATION, Case, Outcome, make_run
from transformers_models import make_transformers_model

Changes = tuple[tuple[str, Any], ...]
TOKENS: Changes = (
    *NO_EVALUATION,
    ("train.global_batch_tokens", 500),
    ("train.epochs", 2),
    # Groups of parameters, which every layout and resume must have too.
    ("optimizer.weight_decay", 0.3),
    ("train.decay_norms_and_biases", False),
)
ROWS: Changes = (("train.micro_batch_size", None), ("train.micro_batch_tokens", 250))
PADDED: Changes = (("train.micro_batch_size", 3), ("train.padding_free", False))
CASES = {
    "single": Case("single", "full", changes=TOKENS),
    "ddp": Case("ddp", "full", changes=TOKENS + ROWS),
    "fsdp": Case("fsdp", "full", changes=TOKENS + PADDED),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    run = make_run(tmp_path_factory)
    first = Case("single", "full", changes=TOKENS, stop_after=4)
    alone = run(1, [CASES["single"], first])
    resumed = Case("ddp", "full", changes=TOKENS + PADDED, start=alone[first].out_dir)
    several = run(2, [CASES["ddp"], CASES["fsdp"], resumed])
    found = {name: (alone | several)[case] for name, case in CASES.items()}
    return found | {"resumed": several[resumed]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "resumed"])
def test_every_layout_learns_the_same(runs: dict[str, Outcome], name: str) -> None:
    found, expected = runs[name], runs["single"]
    for column in ("step", "samples", "tokens", "lr"):
        values = [row[column] for row in found.rows]
        assert values == [row[column] for row in expected.rows][-len(values) :]
    assert found.losses == pytest.approx(expected.losses[-len(found.losses) :], rel=1e-5)
    weights = found.weights()
    for key, tensor in expected.weights().items():
        assert torch.allclose(weights[key], tensor, atol=1e-5), key


@pytest.mark.slow
def test_a_model_that_is_padded_learns_the_same_in_micro_batches_of_some_tokens(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    base = make_transformers_model(tmp_path_factory.mktemp("jamba"), "jamba")
    keys = (*TOKENS, ("checkpoint_dir", str(base)), ("train.epochs", 1))
    one, several = (Case("single", "full", changes=keys + more) for more in ((), ROWS))
    found = make_run(tmp_path_factory)(1, [one, several])
    assert found[several].losses == pytest.approx(found[one].losses, rel=1e-5)


@pytest.mark.slow
def test_steps_have_different_numbers_of_samples(runs: dict[str, Outcome]) -> None:
    samples = [int(row["samples"] or 0) for row in runs["single"].rows]
    assert len({after - before for before, after in itertools.pairwise(samples)}) > 2
