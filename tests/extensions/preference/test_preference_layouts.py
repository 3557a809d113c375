"""Promises P1 and P2 for preference pairs, whose losses depend on a reference model.

Below an adapter the reference is computed in every step; for all others once, before the first.
"""

import json
import math
from typing import Any

import pytest
import torch
from rank_jobs import DEEPSPEED, NO_EVALUATION, Case, Outcome, make_run, needs_deepspeed
from tiny import make_llama, make_pairs

from ftkit.extensions.other_models.reference_values import read_values
from ftkit.recipe.recipe import Method

pytestmark = pytest.mark.slow
STRATEGIES = ("ddp", "fsdp", DEEPSPEED)
Changes = tuple[tuple[str, Any], ...]
Found = dict[tuple[str, ...], Outcome]
Cases = dict[tuple[str, ...], Case]
DPO: Changes = (("objective", "dpo"), ("objective.beta", 0.5))
KINDS: dict[str, tuple[Method, Changes]] = {
    "adapter": ("lora", DPO),
    "full": ("full", DPO),
    "orpo": ("full", (("objective", "orpo"), ("objective.weight", 0.5))),
    # One gradient is as small as what rounding leaves: see eps in rank_jobs.py.
    "simpo": ("lora", (("objective", "simpo"), ("optimizer.eps", 1e-6))),
    "per token, with SFT": ("lora", (*DPO, ("objective.loss", "ipo"), ("objective.sft_weight", 1))),
    "robust": ("lora", (*DPO, ("objective.loss", "robust"), ("objective.label_noise", 0.1))),
    "whole layers": ("lora", (*DPO, ("lora_modules_to_save", "[embed_tokens]"))),
    "a part": ("full", (*DPO, ("train.only", "layers[.]1[.]"))),
    "another model": ("lora", (*DPO, ("reference", "OTHER"))),
    "another, quantised": (
        "lora",
        (
            *DPO,
            ("reference", "OTHER"),
            ("quantize", "bnb.nf4"),
            # On some CPUs a gradient is what rounding leaves, of which Adam would make steps of
            # 1e-5 below its usual eps of 1e-8.
            ("optimizer.eps", 1e-6),
        ),
    ),
}
OFTEN = ("adapter", "full")
FEW = [kind for kind in KINDS if kind not in OFTEN]
ALONE: Changes = (("train.micro_batch_size", 1),)
PADDED: Changes = (("train.micro_batch_size", 5), ("train.padding_free", False))
LAYOUTS: dict[str, Changes] = {
    "two pairs": (("train.micro_batch_size", 2),),
    "tokens": (("train.micro_batch_size", None), ("train.micro_batch_tokens", 90)),
    "checkpointed": (("memory.activation_checkpointing", True),),
}


class Runs:
    """Runs cases of every kind, with a reference that none finds in the cache."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._run = make_run(tmp_path_factory, "uncached_cases.py")
        directory = tmp_path_factory.mktemp("pairs")
        file = directory / "pairs.json"
        file.write_text(json.dumps(make_pairs(40)))
        self._other = str(make_llama(directory / "other", num_hidden_layers=1))
        self._common: Changes = (
            ("data.json_path", str(file)),
            ("data.mask_prompt", None),
            ("train.epochs", 1),
            *NO_EVALUATION,
            ("eval.interval", 2),
            # The first pass of all is then one without the adapter.
            ("eval.initial_validation", True),
        )

    def case(self, strategy: str, kind: str, *more: tuple[str, Any], **options: Any) -> Case:
        method, changes = KINDS[kind]
        own = [(key, self._other if value == "OTHER" else value) for key, value in changes]
        return Case(strategy, method, changes=(*self._common, *own, *more), **options)

    def of(self, world_size: int, cases: Cases) -> Found:
        found = self._run(world_size, list(cases.values()))
        return {name: found[case] for name, case in cases.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


@pytest.fixture(scope="module")
def found(runs: Runs) -> Found:
    """Runs of the usual kinds, by kind and what they are."""
    single: Cases = {(kind,): runs.case("single", kind) for kind in OFTEN}
    single |= {(kind, "half"): runs.case("single", kind, stop_after=1) for kind in OFTEN}
    single |= {(kind, "alone"): runs.case("single", kind, *ALONE) for kind in OFTEN}
    single |= {(kind, "padded"): runs.case("single", kind, *PADDED) for kind in OFTEN}
    known = runs.of(1, single)
    names = ("ddp", "fsdp", "deepspeed")
    double: Cases = {(kind, name): runs.case(name, kind) for kind in OFTEN for name in names}
    for kind, name in (("adapter", "deepspeed"), ("full", "fsdp")):
        start = known[kind, "half"].out_dir
        double[kind, name, "resumed"] = runs.case(name, kind, start=start)
    return known | runs.of(2, double)


@pytest.fixture(scope="module")
def more(runs: Runs, found: Found) -> Found:
    """Runs of the other kinds, layouts, and ways to resume."""
    single: Cases = {(kind,): runs.case("single", kind) for kind in FEW}
    single |= {(kind, "half"): runs.case("single", kind, stop_after=1) for kind in FEW}
    single |= {(kind, "alone"): runs.case("single", kind, *ALONE) for kind in FEW}
    single |= {(kind, "padded"): runs.case("single", kind, *PADDED) for kind in FEW}
    for kind in KINDS:
        single |= {(kind, n): runs.case("single", kind, *LAYOUTS[n]) for n in LAYOUTS}
    known = found | runs.of(1, single)
    names = ("ddp", "fsdp", "deepspeed")
    double: Cases = {(kind, name): runs.case(name, kind) for kind in FEW for name in names}
    for kind in KINDS:
        start = known[kind, "half"].out_dir
        for name in names:
            double[kind, name, "resumed"] = runs.case(name, kind, start=start)
    return known | runs.of(2, double)


def assert_same(found: Outcome, expected: Outcome, within: float = 1e-5) -> None:
    assert len(expected.losses) == 3
    assert found.losses == pytest.approx(expected.losses, rel=within)
    assert found.validation_losses == pytest.approx(expected.validation_losses, rel=within)
    weights = found.weights()
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights.pop(name), tensor, rtol=0, atol=1e-5)
    assert not weights


@pytest.mark.parametrize("layout", ["alone", "padded"])
@pytest.mark.parametrize("kind", OFTEN)
def test_the_layout_of_micro_batches_changes_nothing(kind: str, layout: str, found: Found) -> None:
    assert_same(found[kind, layout], found[kind,])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", OFTEN)
def test_two_ranks_learn_as_one_does(kind: str, strategy: str, found: Found) -> None:
    assert_same(found[kind, strategy], found[kind,])


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [pytest.param("adapter", "deepspeed", marks=needs_deepspeed), ("full", "fsdp")],
)
def test_a_run_resumes_under_another_strategy(kind: str, strategy: str, found: Found) -> None:
    assert_same(found[kind, strategy, "resumed"], found[kind,])


@pytest.mark.parametrize("kind", OFTEN)
def test_training_begins_at_the_reference(kind: str, found: Found) -> None:
    losses = found[kind,].losses
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert losses[-1] < losses[0] - 0.01


def test_a_checkpoint_has_the_reference_where_a_later_session_could_not_compute_it(
    found: Found,
) -> None:
    files = {kind: found[kind,].checkpoint / "reference.safetensors" for kind in OFTEN}
    assert not files["adapter"].exists()
    values = read_values(files["full"])
    assert sorted(one.shape for one in values.values()) == [(8, 2), (32, 2)]
    for strategy in ("ddp", "fsdp"):
        others = read_values(found["full", strategy].checkpoint / "reference.safetensors")
        for name, expected in values.items():
            assert others.pop(name) == pytest.approx(expected, rel=1e-6)
        assert not others


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, layout) for kind in OFTEN for layout in LAYOUTS),
        *((kind, layout) for kind in FEW for layout in ("alone", "padded", *LAYOUTS)),
    ],
)
def test_further_layouts_change_nothing(kind: str, layout: str, more: Found) -> None:
    assert_same(more[kind, layout], more[kind,])


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", FEW)
def test_two_ranks_learn_as_one_does_for_every_kind(kind: str, strategy: str, more: Found) -> None:
    assert_same(more[kind, strategy], more[kind,])


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_every_kind_resumes_under_every_strategy(
    kind: str, strategy: str, more: Found
) -> None:
    assert_same(more[kind, strategy, "resumed"], more[kind,])


@pytest.mark.matrix
def test_training_begins_elsewhere_than_at_another_model(more: Found) -> None:
    assert more["whole layers",].losses[0] == pytest.approx(math.log(2), rel=1e-6)
    for kind in ("another model", "another, quantised"):
        assert abs(more[kind,].losses[0] - math.log(2)) > 0.01
