"""The memory of a step, measured in real runs under every strategy."""

import dataclasses
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from orders import make_elastic_order
from rank_jobs import HAS_DEEPSPEED, NO_EVALUATION, Case, chosen, write_job
from runs import run_ranks
from tiny import make_data, make_llama

from ftkit.data.samples.sampler import ElasticOrder
from ftkit.planning.meter import SOON, DevicePeak, steps_to_measure
from ftkit.runs.job import Job
from ftkit.runs.report.report import Report, read_report
from ftkit.strategies.step_memory import Breakdown, RankStepMemory, StepMemory, StepMoments

CHECKPOINTED = ("memory.activation_checkpointing", True)
SINGLE = {
    "full": Case("single", "full"),
    "full, checkpointed": Case("single", "full", changes=(CHECKPOINTED,)),
    "full, bf16-true": Case("single", "full", "bf16-true"),
    "lora, bf16-mixed": Case("single", "lora", "bf16-mixed"),
    "qlora": Case("single", "lora", "bf16-true", changes=(("quantize", "bnb.nf4-dq"),)),
    "qlora, 8 bits": Case("single", "lora", "bf16-true", changes=(("quantize", "bnb.int8"),)),
}
TWO_RANKS = {
    "ddp": Case("ddp", "full"),
    "fsdp": Case("fsdp", "full", "bf16-mixed"),
    "fsdp, checkpointed": Case("fsdp", "full", changes=(CHECKPOINTED,)),
}
if HAS_DEEPSPEED:
    # One alone and the last: its engine stays in the process for good.
    TWO_RANKS["deepspeed"] = Case("deepspeed", "full", "bf16-mixed", changes=(CHECKPOINTED,))


LOOKED_AT = (
    "full",
    "full, checkpointed",
    "lora, bf16-mixed",
    "qlora",
    "qlora, 8 bits",
    "ddp",
    "fsdp, checkpointed",
)
"""What single tests look at; the others repeat these in the matrix."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank of a run, and those of the profiler."""

    report: Report
    witness: list[dict[str, int]]

    @property
    def memory(self) -> RankStepMemory:
        assert self.report.step_memory
        (memory,) = self.report.step_memory.ranks
        return memory

    @property
    def moments(self) -> list[Breakdown]:
        return [getattr(self.memory.moments_bytes, f.name) for f in dataclasses.fields(StepMoments)]


Found = dict[str, list[Measured]]


def measure(world_size: int, cases: dict[str, Case], directory: Path) -> Found:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
    base = make_llama(directory / "base", **sizes)
    data = make_data(directory / "records.json")
    jobs = {}  # type: ignore[var-annotated]
    for name, case in cases.items():
        out_dir = directory / f"{len(jobs)}"
        out_dir.mkdir()
        only_steps = (*NO_EVALUATION, ("checkpoint.save", False), ("train.max_steps", 4))
        case = dataclasses.replace(case, changes=(*case.changes, *only_steps))
        jobs[name] = write_job(case, world_size, out_dir, base, data)
    run_ranks(world_size, list(jobs.values()), "memory_cases.py")
    return {
        name: [
            Measured(
                read_report(Job.read(job).directory.rank(rank).report),
                json.loads((job.parent / f"witness-{rank}.json").read_text()),
            )
            for rank in range(world_size)
        ]
        for name, job in jobs.items()
    }


def needed(cases: dict[str, Case], request: pytest.FixtureRequest) -> dict[str, Case]:
    """Those that the selected tests look at."""
    names = {params["measured"] for params in chosen(request, test_nearly_every_byte_is_attributed)}
    return {name: case for name, case in cases.items() if name in {*names, *LOOKED_AT}}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Found:
    return measure(1, needed(SINGLE, request), tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Found:
    return measure(2, needed(TWO_RANKS, request), tmp_path_factory.mktemp("two"))


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> list[Measured]:
    name = request.param
    fixture = "single" if name in SINGLE else "two_ranks"
    found: list[Measured] = request.getfixturevalue(fixture)[name]
    return found


every_case = pytest.mark.parametrize(
    "measured",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LOOKED_AT else pytest.mark.matrix)
        for name in (*SINGLE, *TWO_RANKS)
    ],
    indirect=True,
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LOOKED_AT else pytest.mark.matrix)
        for name in SINGLE
    ],
)
def test_the_peak_equals_the_bytes_that_the_allocator_hands_out(single: Found, name: str) -> None:
    """One rank only: the profiler does not see what threads of gloo free."""
    (run,) = single[name]
    assert run.witness
    # On CPU bitsandbytes unpacks 8-bit weights inside an operation.
    within = 0.05 if name == "qlora, 8 bits" else 0.01
    for step in run.witness:
        assert step["tracked_bytes"] == pytest.approx(step["allocated_bytes"], rel=within)
        end_bytes = step["allocated_at_end_bytes"]
        assert step["tracked_at_end_bytes"] == pytest.approx(end_bytes, rel=0.01)


@every_case
def test_nearly_every_byte_is_attributed(measured: list[Measured]) -> None:
    for rank in measured:
        for moment in (rank.memory.peak_breakdown_bytes, *rank.moments):
            assert moment.unattributed < 0.03 * moment.total
            assert min(dataclasses.astuple(moment)) >= 0


@every_case
def test_the_peak_is_the_highest_moment(measured: list[Measured]) -> None:
    for rank in measured:
        memory = rank.memory
        assert memory.peak_bytes == memory.peak_breakdown_bytes.total
        assert memory.peak_bytes >= max(moment.total for moment in rank.moments)
        assert rank.report.resolved and 2 <= memory.step <= (rank.report.resolved.total_steps or 0)


def numbers(report: Report) -> tuple[int, int]:
    resolved = report.resolved
    assert resolved and resolved.parameters and resolved.trainable_parameters
    return resolved.parameters, resolved.trainable_parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "full, checkpointed", "lora, bf16-mixed"])
def test_each_category_equals_a_count_by_hand(single: Found, name: str) -> None:
    (run,) = single[name]
    parameters, trained = numbers(run.report)
    before, after_forward, after_backward, after_optimizer = run.moments
    for moment in run.moments:
        assert moment.parameters == pytest.approx(4 * parameters, rel=0.05)  # rotary tables too
        assert moment.optimizer_state == pytest.approx(8 * trained, rel=0.01)  # counts of steps too
    assert after_backward.gradients == 4 * trained
    assert after_optimizer.gradients == 0
    assert after_forward.activations > 100 * before.activations


@pytest.mark.slow
def test_computing_again_trades_activations_for_temporaries(
    single: Found,
) -> None:
    (plain,), (again,) = single["full"], single["full, checkpointed"]
    _, kept, _, _ = plain.moments
    _, fewer, _, _ = again.moments
    assert fewer.activations < kept.activations / 2
    assert again.memory.peak_bytes < plain.memory.peak_bytes
    temporary = again.memory.peak_breakdown_bytes.temporaries
    assert temporary > plain.memory.peak_breakdown_bytes.temporaries
    assert again.report.loss == plain.report.loss


@pytest.mark.slow
def test_packed_weights_and_their_scales_are_parameters(single: Found) -> None:
    (four,), (eight,), (whole,) = (
        single[n] for n in ("qlora", "qlora, 8 bits", "lora, bf16-mixed")
    )
    sizes = [run.moments[0].parameters for run in (four, eight, whole)]
    assert all(2 * smaller > larger > smaller for smaller, larger in pairwise(sizes[:2]))
    assert sizes[2] > 2 * sizes[1]


@pytest.mark.slow
def test_a_rank_of_fsdp_holds_its_share(two_ranks: Found) -> None:
    for rank in two_ranks["fsdp, checkpointed"]:
        parameters, _ = numbers(rank.report)
        before, _, after_backward, _ = rank.moments
        assert before.parameters == pytest.approx(4 * parameters / 2, rel=0.05)
        assert before.optimizer_state == pytest.approx(8 * parameters / 2, rel=0.05)
        assert after_backward.gradients == pytest.approx(4 * parameters / 2, rel=0.05)


@pytest.mark.slow
def test_buckets_of_ddp_stay_between_steps(two_ranks: Found) -> None:
    for rank in two_ranks["ddp"]:
        parameters, _ = numbers(rank.report)
        assert rank.moments[-1].gradients == 4 * parameters


# --- Which steps --------------------------------------------------------------------------------


def order(lengths: list[int], *, steps: int, start: int = 0) -> ElasticOrder:
    return make_elastic_order(
        np.array(lengths),
        np.array(lengths),
        seed=0,
        global_batch_size=2,
        micro_batch_size=1,
        total_samples=2 * steps,
        start_step=start,
        start_samples=2 * start,
    )


def where_the_longest_is(steps: int) -> tuple[ElasticOrder, int]:
    """An order, and the step with its longest sample."""
    of = order([10] * (2 * steps - 1) + [30], steps=steps)
    (largest,) = (s for s in range(steps) if 2 * steps - 1 in of.samples(s))
    assert of.largest_micro_batch(largest) == 30
    return of, largest


def test_the_step_with_the_largest_micro_batch_is_measured() -> None:
    of, largest = where_the_longest_is(steps=SOON)
    assert largest > 1
    assert steps_to_measure(of) == {largest}


def test_unless_it_comes_soon_the_second_step_is_measured_before() -> None:
    of, largest = where_the_longest_is(steps=6 * SOON)
    assert largest >= SOON
    assert steps_to_measure(of) == {1, largest}


def test_steps_before_the_start_are_not_measured() -> None:
    found = steps_to_measure(order([10] * 20, steps=10, start=4))
    assert found == {5}


def test_a_single_step_is_measured_and_no_step_is_allowed() -> None:
    assert steps_to_measure(order([10] * 20, steps=1)) == {0}
    assert steps_to_measure(order([10] * 20, steps=4, start=4)) == set()


def test_a_cpu_has_no_allocator_statistics() -> None:
    peak = DevicePeak(torch.device("cpu"))
    peak.restart()
    assert (peak.now(), peak.within(), peak.allocated_bytes, peak.reserved_bytes) == (None,) * 4
    assert peak.requested_bytes is None


def test_the_highest_of_each_kind_of_device_memory_outlives_a_measured_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = {"requested": 900, "allocated": 1000, "reserved": 1100}

    def reset() -> None:
        peaks.update(dict.fromkeys(peaks, 10))

    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: peaks["allocated"])
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda: peaks["reserved"])
    stats = "requested_bytes.all.peak"
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda: {stats: peaks["requested"]})
    peak = DevicePeak(torch.device("cuda", 0))
    peak.restart()
    assert peak.within() == 10
    assert (peak.requested_bytes, peak.allocated_bytes, peak.reserved_bytes) == (900, 1000, 1100)


def test_the_fullest_of_several_ranks_is_shown() -> None:
    def rank(number: int, peak_bytes: int) -> StepMemory:
        part: dict[str, Any] = {
            "peak_breakdown_bytes": Breakdown(parameters=peak_bytes),
            "moments_bytes": StepMoments(),
        }
        return StepMemory(
            ranks=[RankStepMemory(rank=number, step=2, peak_bytes=peak_bytes, **part)]
        )

    merged = StepMemory.of([rank(0, 5), None, rank(2, 7)])
    assert merged and [part.rank for part in merged.ranks] == [0, 2]
    assert merged.fullest.rank == 2
    assert StepMemory.of([None]) is None
