"""Promises P1 and P2 for reward models, and what other programs make of the results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from rank_jobs import NO_EVALUATION, Case, Outcome, chosen, make_run, needs_deepspeed, repeated
from tiny import make_pairs
from transformers import AutoModelForSequenceClassification

from ftkit.cli.app import run
from ftkit.data.dataset import load_data
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component, Method

pytestmark = pytest.mark.slow
Changes = tuple[tuple[str, Any], ...]
Found = dict[tuple[str, ...], Outcome]
ADAPTED: Changes = (("lora_head", False), ("lora_dropout", 0.05), ("optimizer.lr", 2e-3))
ROWS: dict[str, Changes] = {
    "one by one": (("train.micro_batch_size", 1),),
    "two": (("train.micro_batch_size", 2),),
    "five": (("train.micro_batch_size", 5),),
    "padded": (("train.padding_free", False),),
}
TERMS = ("accuracy", "margin", "chosen_reward", "rejected_reward")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pairs") / "pairs.json"
    file.write_text(json.dumps(make_pairs(60)))
    return file


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, pairs: Path, request: pytest.FixtureRequest
) -> Found:
    """Runs of the selected tests, by what they are."""
    rows = {params["how"] for params in chosen(request, test_micro_batches_change_nothing)}
    ranks = {params["strategy"] for params in chosen(request, test_two_ranks_learn_as_one_does)}
    run_cases = make_run(tmp_path_factory)
    changes: Changes = (
        *NO_EVALUATION,
        ("objective", "reward"),
        ("objective.center_weight", 0.1),
        ("data.json_path", str(pairs)),
        ("data.mask_prompt", None),
        ("optimizer.lr", 1e-3),
        ("optimizer.eps", 1e-5),  # so that Adam makes no steps of gradients that are rounding
        ("eval.interval", 2),
        ("eval.final_validation", True),
    )

    def case(strategy: str, method: Method, more: Changes = (), **keys: Any) -> Case:
        # The embedding of the base model is its head too, which a reward model does not have.
        return Case(strategy, method, changes=(*changes, *more), tied=True, **keys)

    single: dict[tuple[str, ...], Case] = {
        ("full",): case("single", "full"),
        ("lora",): case("single", "lora", ADAPTED),
        **{(name,): case("single", "full", more) for name, more in ROWS.items() if name in rows},
        ("half", "full"): case("single", "full", stop_after=4),
        ("half", "lora"): case("single", "lora", ADAPTED, stop_after=4),
    }
    alone = run_cases(1, list(single.values()))
    known = {name: alone[one] for name, one in single.items()}
    double: dict[tuple[str, ...], Case] = {}
    for strategy in ranks - {"resumed"}:
        double[strategy, "full"] = case(strategy, "full")
    for strategy in ranks - {"resumed", "ddp"}:
        double[strategy, "lora"] = case(strategy, "lora", ADAPTED)
    if "resumed" in ranks:
        start = known["half", "full"].out_dir
        double["resumed", "full"] = case("deepspeed", "full", start=start)
        start = known["half", "lora"].out_dir
        double["resumed", "lora"] = case("fsdp", "lora", ADAPTED, start=start)
    in_two = run_cases(2, list(double.values()))
    return known | {name: in_two[one] for name, one in double.items()}


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.validation_losses == pytest.approx(expected.validation_losses, rel=1e-5)
    assert len(found.validation_losses) == 5
    for name in (*TERMS, "grad_norm"):
        values = [float(row[name] or 0) for row in expected.rows]
        assert [float(row[name] or 0) for row in found.rows] == pytest.approx(values, rel=1e-4)
    weights = found.weights()
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights.pop(name), tensor, rtol=0, atol=1e-5)
    assert not weights


@pytest.mark.parametrize("how", ["two", "padded", *repeated("one by one", "five")])
def test_micro_batches_change_nothing(how: str, found: Found) -> None:
    assert_same(found[how,], found["full",])


@pytest.mark.parametrize(
    "strategy",
    ["fsdp", pytest.param("resumed", marks=needs_deepspeed), *repeated("ddp", "deepspeed")],
)
def test_two_ranks_learn_as_one_does(strategy: str, found: Found) -> None:
    assert_same(found[strategy, "full"], found["full",])
    if strategy != "ddp":
        assert_same(found[strategy, "lora"], found["lora",])


def scores(model: Any, base: Path, pairs: Path) -> list[float]:
    """Mean reward of the chosen and of the rejected answers of the validation records."""
    part: Component = {
        "class_path": "JSON",
        "init_args": {"path": str(pairs), "val_split_fraction": 0.2},
    }
    samples = load_data(part, Tokenizer(base), 200, preference="pairs").val
    of_answers = [
        [model(torch.tensor(one.ids[None], dtype=torch.long)).logits.item() for one in both]
        for both in map(samples.sequences, range(len(samples)))
    ]
    return [sum(of_half) / len(samples) for of_half in zip(*of_answers, strict=True)]


def rewards(outcome: Outcome) -> list[float | None]:
    terms = outcome.report.terms
    return [terms[name].validation_last for name in ("chosen_reward", "rejected_reward")]


@torch.no_grad()
def test_other_programs_give_the_same_rewards(found: Found, pairs: Path, tmp_path: Path) -> None:
    full, lora = found["full",], found["lora",]
    base = full.out_dir / "final"
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        base, output_loading_info=True
    )
    assert not any(loading.values()), loading
    assert scores(model, base, pairs) == pytest.approx(rewards(full), abs=1e-5)

    adapter = lora.out_dir / "final"
    model = AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=1)
    assert scores(model, adapter, pairs) == pytest.approx(rewards(lora), abs=1e-5)

    assert run(["merge", str(lora.out_dir), "--out", str(tmp_path / "merged")]) == 0
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not any(loading.values()), loading
    assert scores(model, adapter, pairs) == pytest.approx(rewards(lora), abs=1e-5)


@pytest.mark.parametrize("kind", ["full", "lora", "checkpoint"])
def test_results_are_evaluated_as_in_their_run(
    kind: str, found: Found, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = found["lora" if kind == "lora" else "full",]
    outcome.complete()
    named = outcome.checkpoint if kind == "checkpoint" else outcome.out_dir
    assert run(["evaluate", str(named), "--format", "json"]) == 0
    values = json.loads(capsys.readouterr().out)
    terms = {name: term.validation_last for name, term in outcome.report.terms.items()}
    assert values["loss"] == pytest.approx(outcome.validation_losses[-1], rel=1e-6)
    assert values["terms"] == pytest.approx(terms, rel=1e-6)
    assert values["perplexity"] is None and values["exact_match"] is None


def test_the_better_answers_are_learned(found: Found) -> None:
    for method in ("full", "lora"):
        accuracy = found[method,].report.terms["accuracy"]
        assert (accuracy.validation_last or 0) > 0.9
