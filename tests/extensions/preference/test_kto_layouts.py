"""Promises P1 and P2 for answers with labels, whose reference point is one of the whole step."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command
from messages import says
from rank_jobs import NO_EVALUATION, Case, Outcome, chosen, make_run, needs_deepspeed, repeated
from tiny import make_labelled, make_llama
from transformers import AutoModelForCausalLM

from ftkit.cli.app import run
from ftkit.data.dataset import load_data
from ftkit.data.samples.sample_set import Sample
from ftkit.extensions.preference.kto import mismatched
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component, Method

pytestmark = pytest.mark.slow
Changes = tuple[tuple[str, Any], ...]
Found = dict[tuple[str, str], Outcome]
ROWS: dict[str, Changes] = {
    "one by one": (("train.micro_batch_size", 1),),
    "two": (("train.micro_batch_size", 2),),
    "at once": (("train.micro_batch_size", 11),),
    "five, padded": (("train.micro_batch_size", 5), ("train.padding_free", False)),
}
KINDS: dict[str, tuple[Method, Changes]] = {
    "below the adapter": ("lora", ()),
    "full": ("full", (("reference", "BASE"),)),
    "another": ("lora", (("reference", "OTHER"),)),
    "another, full": ("full", (("reference", "OTHER"),)),
    "whole layers": (
        "lora",
        (("reference", "BASE"), ("lora_modules_to_save", "[embed_tokens]")),
    ),
    "a part": ("full", (("reference", "BASE"), ("train.only", "layers[.]1[.]"))),
    "named base": ("lora", (("reference", "BASE"),)),
}
OFTEN = ("below the adapter",)
FEW = ("full", "another", "another, full", "whole layers", "a part")
STRATEGIES: dict[str, tuple[str, Changes]] = {
    "ddp": ("ddp", ()),
    "fsdp": ("fsdp", ()),
    "ZeRO-2": ("deepspeed", (("strategy.stage", 2),)),
    "ZeRO-3": ("deepspeed", (("strategy.stage", 3),)),
}
TWO = ["ddp", "fsdp", *(pytest.param(f"ZeRO-{stage}", marks=needs_deepspeed) for stage in (2, 3))]
TERMS = ("accuracy", "chosen_reward", "rejected_reward", "reference_point")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("labelled") / "labelled.json"
    file.write_text(json.dumps(make_labelled(60)))
    return file


class Runs:
    """Runs cases of every kind."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory, labelled: Path) -> None:
        self._run = make_run(tmp_path_factory)
        self.other = make_llama(labelled.parent / "other", num_hidden_layers=1)
        self._changes: Changes = (
            *NO_EVALUATION,
            ("objective", "kto"),
            ("objective.beta", 0.5),
            ("objective.undesirable_weight", 1.5),
            ("data.json_path", str(labelled)),
            ("data.mask_prompt", None),
            ("eval.interval", 3),
            ("eval.final_validation", True),
            # Adam's usual eps lets it turn the rounding of tiny gradients into steps of 1e-5.
            ("optimizer.eps", 1e-5),
        )

    def case(self, kind: str, strategy: str = "single", more: Changes = (), **keys: Any) -> Case:
        method, changes = KINDS[kind]
        name, of_strategy = STRATEGIES.get(strategy, (strategy, ()))
        other = str(self.other)
        own = tuple((key, other if value == "OTHER" else value) for key, value in changes)
        all_changes = (*self._changes, *own, *of_strategy, *more)
        return Case(name, method, changes=all_changes, **keys)

    def of(self, world_size: int, cases: dict[tuple[str, str], Case]) -> Found:
        found = self._run(world_size, list(cases.values()))
        return {name: found[case] for name, case in cases.items()}


def base_of(outcome: Outcome) -> Path:
    return Path(outcome.report.recipe["checkpoint_dir"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, labelled: Path) -> Runs:
    return Runs(tmp_path_factory, labelled)


@pytest.fixture(scope="module")
def found(runs: Runs, request: pytest.FixtureRequest) -> Found:
    """Runs of the usual kinds that the selected tests need, by kind and what they are."""
    ways = {params["how"] for params in chosen(request, test_no_layout_changes_what_is_learned)}
    rows, strategies = ([name for name in names if name in ways] for names in (ROWS, STRATEGIES))
    single = {(kind, "alone"): runs.case(kind) for kind in OFTEN}
    single |= {(kind, name): runs.case(kind, more=ROWS[name]) for kind in OFTEN for name in rows}
    single |= {(kind, "half"): runs.case(kind, stop_after=4) for kind in OFTEN}
    for kind in ("full", "named base"):
        single[kind, "alone"] = runs.case(kind)
    known = runs.of(1, single)
    double = {(kind, name): runs.case(kind, name) for kind in OFTEN for name in strategies}
    for kind in OFTEN:
        start = known[kind, "half"].out_dir
        double[kind, "resumed"] = runs.case(kind, "fsdp", start=start)
    double["full", "ddp"] = runs.case("full", "ddp")
    sharded = (("memory.shard_model_beside", True),)
    double["full", "sharded reference"] = runs.case("full", "ddp", sharded)
    double["full", "half in two"] = runs.case("full", "fsdp", stop_after=4)
    known |= runs.of(2, double)
    start = known["full", "half in two"].out_dir
    return known | runs.of(1, {("full", "of two"): runs.case("full", start=start)})


@pytest.fixture(scope="module")
def more(runs: Runs, found: Found) -> Found:
    """Runs of the other kinds, and all ways to resume."""
    single = {(kind, "alone"): runs.case(kind) for kind in FEW}
    single |= {(kind, name): runs.case(kind, more=ROWS[name]) for kind in FEW for name in ROWS}
    single |= {(kind, "half"): runs.case(kind, stop_after=4) for kind in FEW}
    known = found | runs.of(1, single)
    double = {(kind, name): runs.case(kind, name) for kind in FEW for name in STRATEGIES}
    for name in STRATEGIES:
        double["full", f"half under {name}"] = runs.case("full", name, stop_after=4)
    known |= runs.of(2, double)
    double = {
        (kind, f"half to {name}"): runs.case(kind, name, start=known[kind, "half"].out_dir)
        for kind in (*OFTEN, *FEW)
        for name in STRATEGIES
    }
    for before in STRATEGIES:
        start = known["full", f"half under {before}"].out_dir
        for name in STRATEGIES:
            double["full", f"{before} to {name}"] = runs.case("full", name, start=start)
    known |= runs.of(2, double)
    single = {}
    for before in STRATEGIES:
        start = known["full", f"half under {before}"].out_dir
        single["full", f"{before} to single"] = runs.case("full", start=start)
    return known | runs.of(1, single)


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)
    assert outcome.validation_losses == pytest.approx(expected.validation_losses, rel=1e-5)
    assert len(outcome.validation_losses) == 3
    for name in (*TERMS, "grad_norm"):
        values = [float(row[name] or 0) for row in expected.rows]
        found = [float(row[name] or 0) for row in outcome.rows]
        # A reward near 0 is the difference of two sums of tens of nats.
        assert found == pytest.approx(values, rel=1e-4, abs=1e-5), name
    weights = outcome.weights()
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights.pop(name), tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "how",
    [
        *("two", "five, padded", "fsdp", pytest.param("ZeRO-3", marks=needs_deepspeed), "resumed"),
        *repeated("one by one", "at once", "ddp", "ZeRO-2"),
    ],
)
@pytest.mark.parametrize("kind", OFTEN)
def test_no_layout_changes_what_is_learned(kind: str, how: str, found: Found) -> None:
    assert_same(found[kind, how], found[kind, "alone"])


def test_a_run_in_two_shards_resumes_on_one_device(found: Found) -> None:
    assert_same(found["full", "of two"], found["full", "alone"])


def test_a_reference_is_sharded_beside_a_model_that_is_whole(found: Found) -> None:
    whole, sharded = found["full", "ddp"], found["full", "sharded reference"]
    assert sharded.losses == pytest.approx(whole.losses, rel=1e-6)
    assert_same(sharded, found["full", "alone"])
    on_rank = [one.report.resolved.beside_rank_bytes or 0 for one in (whole, sharded)]
    assert on_rank[1] == -(-on_rank[0] // 2)


def test_a_base_that_is_named_as_the_reference_changes_nothing(found: Found) -> None:
    """It is another model in memory, with the weights of the one below the adapter."""
    named, below = found["named base", "alone"], found["below the adapter", "alone"]
    assert_same(named, below)
    resolved = [one.report.resolved for one in (named, below)]
    assert [one and one.beside_key for one in resolved] == ["reference", None]


@pytest.mark.matrix
@pytest.mark.parametrize("how", [*ROWS, *TWO])
@pytest.mark.parametrize("kind", FEW)
def test_no_layout_changes_what_other_kinds_learn(kind: str, how: str, more: Found) -> None:
    assert_same(more[kind, how], more[kind, "alone"])


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", TWO)
@pytest.mark.parametrize("kind", [*OFTEN, *FEW])
def test_a_run_of_every_kind_resumes_under_every_strategy(
    kind: str, strategy: str, more: Found
) -> None:
    assert_same(more[kind, f"half to {strategy}"], more[kind, "alone"])


@pytest.mark.matrix
@pytest.mark.parametrize("after", [*TWO, "single"])
@pytest.mark.parametrize("before", TWO)
def test_a_run_resumes_from_every_strategy(before: str, after: str, more: Found) -> None:
    assert_same(more["full", f"{before} to {after}"], more["full", "alone"])


def test_the_reference_point_is_not_always_zero(found: Found) -> None:
    for kind in OFTEN:
        points = [float(row["reference_point"] or 0) for row in found[kind, "alone"].rows]
        assert points[0] == pytest.approx(0, abs=1e-6), "it begins at the reference"
        assert max(points) > 0.05


@pytest.mark.parametrize(
    "kind", [*OFTEN, *(pytest.param(kind, marks=pytest.mark.matrix) for kind in FEW)]
)
def test_validation_is_the_formula_on_models_of_transformers(
    kind: str, request: pytest.FixtureRequest, runs: Runs, labelled: Path, tmp_path: Path
) -> None:
    found: Found = request.getfixturevalue("found" if kind in OFTEN else "more")
    outcome = found[kind, "alone"]
    outcome.complete()
    result = outcome.out_dir / "final"
    if KINDS[kind][0] == "lora":
        result = tmp_path / "merged"
        assert run(["merge", str(outcome.out_dir), "--out", str(result)]) == 0
    base = base_of(outcome)
    reference = runs.other if kind.startswith("another") else base
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (result, reference)]

    @torch.no_grad()
    def ratio(sample: Sample) -> float:
        ids = torch.tensor(sample.ids[None], dtype=torch.long)
        first = int(sample.trained[0, 0])
        logs = [model(ids).logits[0, :-1].log_softmax(1) for model in models]
        chosen = [log.gather(1, ids[0, 1:, None])[first - 1 :].sum().item() for log in logs]
        return chosen[0] - chosen[1]

    part: Component = {
        "class_path": "JSON",
        "init_args": {"path": str(labelled), "val_split_fraction": 0.2},
    }
    samples = load_data(part, Tokenizer(base), 200, preference="labels").val
    known = [samples[i] for i in range(len(samples))]
    shifted = [mismatched(known[i], known[i - 1], 200) for i in range(len(known))]
    point = max(float(np.mean([ratio(one) for one in shifted])), 0)

    def loss(sample: Sample) -> float:
        assert sample.target is not None
        distance = (ratio(sample) - point) * (1 if sample.target[0] else -1)
        weight = 1 if sample.target[0] else 1.5
        return weight * (1 - 1 / (1 + math.exp(-0.5 * distance)))

    expected = np.mean([loss(one) for one in known])
    assert outcome.validation_losses[-1] == pytest.approx(expected, rel=1e-5)
    terms = outcome.report.terms
    assert terms["reference_point"].validation_last == pytest.approx(point, abs=1e-4)


@pytest.mark.parametrize(
    ("count", "keys", "words"),
    [
        pytest.param(
            26,
            {"train.global_batch_size": 5, "data.val_split_fraction": 0.2},
            ["5, has one example", "--train.max_steps 4"],
            id="last step",
        ),
        pytest.param(
            21,
            {"train.global_batch_size": 4, "data.val_split_fraction": 0.05},
            ["one validation record", "data.val_split_fraction"],
            id="validation",
        ),
    ],
)
def test_an_example_without_another_is_refused(
    count: int, keys: dict[str, Any], words: list[str], ftkit: Command, tiny_base: Path
) -> None:
    settings = {"data.path": "few.json", "train.epochs": 1, "eval.max_new_tokens": 0, **keys}
    given = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    file = tiny_base.with_name(f"few-{count}.json")
    file.write_text(json.dumps(make_labelled(count)))
    given[1] = str(file)
    command = ["finetune", str(tiny_base), "--objective", "kto", "--data", "JSON", *given]
    ended = ftkit(*command, "--accelerator", "cpu", "--precision", "32-true")
    assert ended.returncode == 2
    assert says(ended.stderr, *words)
