"""Promises P1 and P2 for distillation, where a second model computes beside the trained one."""

import dataclasses
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import says
from rank_jobs import (
    HAS_DEEPSPEED,
    NO_EVALUATION,
    Case,
    Outcome,
    Run,
    chosen,
    layouts,
    make_run,
    needs_deepspeed,
    run_here,
)
from tiny import make_llama
from transformers_models import make_transformers_model

from ftkit.checkpoint.metadata import read_metadata
from ftkit.checkpoint.store import Store
from ftkit.errors import UserError
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import Job
from ftkit.runs.report.table import summary_text

pytestmark = pytest.mark.slow
Changes = tuple[tuple[str, Any], ...]
STAGE_3 = (("strategy.stage", 3),)
SHARED = (("strategy.context", 2),)
SHARDED = (("memory.shard_model_beside", True),)
STRATEGIES: dict[str, tuple[str, Changes]] = {
    "ddp": ("ddp", ()),
    "ddp, sharded teacher": ("ddp", SHARDED),
    "fsdp": ("fsdp", ()),
    "ZeRO-2, sharded teacher": ("deepspeed", (("strategy.stage", 2), *SHARDED)),
    "ZeRO-3": ("deepspeed", STAGE_3),
    "ddp, shared sequences": ("ddp", SHARED),
    "fsdp, shared sequences": ("fsdp", SHARED),
}
TWO = [
    pytest.param(name, marks=[needs_deepspeed] * (strategy == "deepspeed"))
    for name, (strategy, _) in STRATEGIES.items()
]
_REPEATED = ("ZeRO-2, sharded teacher", "ddp, shared sequences")
LEARNED = [("forward", name) for name in STRATEGIES if name not in _REPEATED]
LEARNED += [("reverse", "fsdp"), ("reverse", "ddp, shared sequences")]
RESUMED = [("forward", "ZeRO-3")]
"""Divergence and strategy outside the matrix; the others repeat them."""
LAYOUTS: dict[str, Changes] = {
    "one by one": (("train.micro_batch_size", 1),),
    "two": (("train.micro_batch_size", 2),),
    "five, padded": (("train.micro_batch_size", 5), ("train.padding_free", False)),
    "a number of tokens": (("train.micro_batch_size", None), ("train.micro_batch_tokens", 90)),
    "checkpointed": (("memory.activation_checkpointing", True),),
}
ROWS = ("five, padded", "a number of tokens")
COUNTED = {"ddp": 1, "ddp, sharded teacher": 2, "fsdp": 2}
"""Strategies, and how many ranks have a part of the teacher each."""
OPTIONS: dict[str, Changes] = {
    "forward": (),
    "reverse": (
        ("objective.divergence", "reverse"),
        ("objective.temperature", 2.0),
        ("objective.sft_weight", 0.5),
    ),
}
EVERYWHERE = list(itertools.product(OPTIONS, STRATEGIES))
Found = dict[tuple[str, ...], Outcome]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider and deeper model than the student, of which it is surer."""
    return make_llama(
        tmp_path_factory.mktemp("teacher") / "large",
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )


def changes_for(teacher: Path, options: str) -> Changes:
    """What differs from the recipe of all cases."""
    return (
        ("objective", "distill"),
        *OPTIONS[options],
        ("teacher", str(teacher)),
        ("train.epochs", 1),
        *NO_EVALUATION,
        ("eval.interval", 2),
    )


@pytest.fixture(scope="module")
def found(run: Run, teacher: Path, request: pytest.FixtureRequest) -> Found:
    """Runs of the selected tests, by the divergence and what they are."""
    learned, resumed = (
        {(params["options"], params["strategy"]) for params in chosen(request, test)}
        for test in (test_two_ranks_learn_as_one_does, test_a_run_resumes_under_every_strategy)
    )
    learned |= {("forward", name) for name in COUNTED}
    rows = {
        params["layout"]
        for params in chosen(request, test_the_layout_of_micro_batches_changes_nothing)
    }
    known: Found = {}
    single: dict[tuple[str, ...], Case] = {}
    double: dict[tuple[str, ...], Case] = {}
    for name in OPTIONS:
        changes = changes_for(teacher, name)
        method = "full" if name == "forward" else "lora"
        single[name,] = Case("single", method, changes=changes)
        single[name, "half"] = Case("single", method, changes=changes, stop_after=2)
        if name == "forward":
            for layout in rows:
                others = LAYOUTS[layout]
                single[name, layout] = Case("single", method, changes=(*changes, *others))
    alone = run(1, list(single.values()))
    known = {key: alone[case] for key, case in single.items()}
    for name in OPTIONS:
        case = single[name,]
        for kind, (strategy, more) in STRATEGIES.items():
            changes = case.changes + more
            if (name, kind) in learned:
                double[name, kind] = Case(strategy, case.method, changes=changes)
            if (name, kind) in resumed:
                start = known[name, "half"].out_dir
                double[name, kind, "resumed"] = Case(
                    strategy, case.method, changes=changes, start=start
                )
    sharded = double["forward", "fsdp"]
    double["forward", "half in two"] = dataclasses.replace(sharded, stop_after=2)
    in_two = run(2, list(double.values()))
    known |= {key: in_two[case] for key, case in double.items()}
    start = known["forward", "half in two"].out_dir
    merged = dataclasses.replace(single["forward",], start=start)
    return known | {("forward", "of two"): run(1, [merged])[merged]}


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert len(expected.losses) == 5
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.validation_losses == pytest.approx(expected.validation_losses, rel=1e-5)
    values = [row["cross_entropy"] for row in expected.rows]
    assert [row["cross_entropy"] for row in found.rows] == pytest.approx(values, rel=1e-5)
    weights = found.weights()
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights.pop(name), tensor, rtol=0, atol=1e-5)
    assert not weights


@pytest.mark.parametrize(
    "layout", layouts([(name,) for name in LAYOUTS], often=[(name,) for name in ROWS])
)
def test_the_layout_of_micro_batches_changes_nothing(layout: str, found: Found) -> None:
    assert_same(found["forward", layout], found["forward",])


@pytest.mark.parametrize(("options", "strategy"), layouts(EVERYWHERE, LEARNED))
def test_two_ranks_learn_as_one_does(options: str, strategy: str, found: Found) -> None:
    assert_same(found[options, strategy], found[options,])


@pytest.mark.parametrize(("options", "strategy"), layouts(EVERYWHERE, RESUMED))
def test_a_run_resumes_under_every_strategy(options: str, strategy: str, found: Found) -> None:
    assert_same(found[options, strategy, "resumed"], found[options,])


@pytest.mark.parametrize("options", OPTIONS)
def test_the_student_comes_closer_to_its_teacher(options: str, found: Found) -> None:
    losses = found[options,].losses
    assert losses[-1] < losses[0] - 0.01


def test_a_run_in_two_shards_resumes_on_one_device(found: Found) -> None:
    assert_same(found["forward", "of two"], found["forward",])


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", TWO)
def test_a_run_in_two_shards_resumes_under_every_strategy(
    strategy: str, run: Run, teacher: Path, found: Found
) -> None:
    name, more = STRATEGIES[strategy]
    start = found["forward", "half in two"].out_dir
    case = Case(name, "full", changes=changes_for(teacher, "forward") + more, start=start)
    assert_same(run(2, [case])[case], found["forward",])


def resume(half: Outcome, teacher: Path, out_dir: Path) -> Outcome:
    """Continue a run with a teacher, in this process."""
    job = Job.read(RunDirectory(half.out_dir).job)
    out_dir.mkdir()
    for name in ("metrics.csv", "validation.csv"):
        shutil.copyfile(half.out_dir / name, out_dir / name)
    job = dataclasses.replace(
        job,
        recipe=dataclasses.replace(job.recipe, teacher=str(teacher), out_dir=out_dir),
        beside=str(teacher),
        start=str(half.checkpoint),
        stop_after=None,
    )
    return run_here(job, read_metadata(half.checkpoint))


@pytest.mark.parametrize(
    ("precision", "quantize"),
    [
        ("bf16-true", "bnb.nf4"),
        pytest.param("bf16-mixed", None, marks=pytest.mark.matrix),
        pytest.param("32-true", "bnb.nf4-dq", marks=pytest.mark.matrix),
    ],
)
def test_a_sharded_teacher_teaches_the_same_in_every_format(
    precision: str, quantize: str | None, run: Run, teacher: Path
) -> None:
    """Only where its weights are differs: what it computes is equal to the bit."""
    changes = changes_for(teacher, "forward") + (("quantize", quantize),) * bool(quantize)
    whole, sharded = (
        Case("ddp", "lora", precision, changes=changes + more) for more in ((), SHARDED)
    )
    known = run(2, [whole, sharded])
    assert known[sharded].losses == pytest.approx(known[whole].losses, rel=1e-6)


def test_the_teacher_of_a_run_is_fixed_wherever_it_lies(
    found: Found, teacher: Path, tmp_path: Path
) -> None:
    half = found["forward", "half"]
    other = make_llama(tmp_path / "other")
    with pytest.raises(UserError) as refused:
        resume(half, other, tmp_path / "refused")
    assert says(str(refused.value), "teacher", str(other), "step 2", f"--teacher {teacher}")
    assert not Store(tmp_path / "refused" / "checkpoints").steps()
    moved = shutil.copytree(teacher, tmp_path / "moved")
    assert_same(resume(half, moved, tmp_path / "resumed"), found["forward",])


def test_a_run_names_its_teacher_and_counts_its_memory(found: Found, teacher: Path) -> None:
    for strategy, shards in COUNTED.items():
        resolved = found["forward", strategy].report.resolved
        assert resolved is not None and resolved.beside == str(teacher)
        assert resolved.beside_parameters and resolved.beside_rank_bytes
        assert resolved.beside_rank_bytes == resolved.beside_parameters * 4 // shards
        shown = summary_text(resolved, "full")
        assert says(shown, f"teacher: {teacher}, {resolved.beside_parameters:,} parameters")


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "mixtral"])
def test_two_ranks_learn_from_a_teacher_of_another_architecture_as_one_does(
    kind: str, run: Run, tmp_path: Path
) -> None:
    teacher = make_transformers_model(tmp_path / kind, kind, initializer_range=0.1)
    changes = changes_for(teacher, "forward")
    alone = Case("single", "full", changes=changes)
    expected = run(1, [alone])[alone]
    cases = [Case(name, "full", changes=changes) for name in ("ddp", "fsdp")]
    cases += [Case("deepspeed", "full", changes=changes + STAGE_3)] * HAS_DEEPSPEED
    for outcome in run(2, cases).values():
        assert_same(outcome, expected)
