"""Predicted memory of samples with images equals that of real runs, counted tensor by tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import NO_EVALUATION, Case, write_job
from runs import run_ranks
from seeing_models import KINDS, save_model, write_chats

from ftkit.runs.job import Job
from ftkit.runs.report.report import read_report

pytestmark = pytest.mark.slow

SCALE = 4
"""Images of 64 to 256 pixels: towers and activations are far larger than what is constant."""
SETTINGS: dict[str, Any] = {
    **dict(NO_EVALUATION),
    "data.json_path": None,
    "data.mask_prompt": None,
    "data.val_split_fraction": 0,
    "data.chat_template": "tokenizer",
    "train.global_batch_size": 8,
    "train.epochs": 3,
    "train.max_seq_length": 1800,
    "checkpoint.save": False,
}
SINGLE = {
    "full": Case("single", "full", changes=(("train.micro_batch_size", 4),)),
    "LoRA": Case("single", "lora", "bf16-true", (("train.micro_batch_size", 2),)),
}
TWO_RANKS = {"fsdp x2": Case("fsdp", "full", changes=(("train.micro_batch_size", 2),))}

Errors = dict[tuple[str, str], dict[str, float]]


def measured(directory: Path, world_size: int, cases: dict[str, Case]) -> Errors:
    data = directory / "chats.jsonl"
    write_chats(data, scale=SCALE)
    jobs = {}
    for kind in KINDS:
        base = directory / kind
        save_model(kind, base, SCALE)
        for name, case in cases.items():
            out_dir = directory / f"{kind}-{name}"
            out_dir.mkdir()
            changes = SETTINGS | {"data.path": str(data)} | dict(case.changes)
            changed = Case(case.strategy, case.method, case.precision, tuple(changes.items()))
            jobs[kind, name] = write_job(changed, world_size, out_dir, base, data)
    run_ranks(world_size, list(jobs.values()), "counted_cases.py")
    return {name: errors_of(job, world_size) for name, job in jobs.items()}


def errors_of(job: Path, world_size: int) -> dict[str, float]:
    run = Job.read(job).directory
    peaks = [run.rank(rank).path / "peak.json" for rank in range(world_size)]
    counted_bytes = [sum(json.loads(peak.read_text()).values()) for peak in peaks]
    memory = read_report(run.rank(0).report).step_memory
    assert memory is not None and memory.predicted is not None and memory.heaviest is not None
    measured = memory.ranks[0]
    reported_bytes = measured.peak_bytes - measured.peak_breakdown_bytes.unattributed
    return {
        "step": measured.micro_step,
        "counted": memory.predicted.peak_bytes / counted_bytes[0] - 1,
        "reported": memory.predicted.peak_bytes / reported_bytes - 1,
        "heaviest": memory.heaviest.peak_bytes / max(counted_bytes) - 1,
        "peak": memory.predicted.peak_bytes,
        "bd": str(memory.predicted.peak_breakdown_bytes)
        + str(measured.peak_breakdown_bytes)
        + str([json.loads(p.read_text()) for p in peaks])
        + str(measured.micro_batch),
        "unattributed": measured.peak_breakdown_bytes.unattributed / measured.peak_bytes,
    }


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Errors]:
    found: dict[int, Errors] = {}

    def of(name: str) -> Errors:
        ranks, cases = (1, SINGLE) if name in SINGLE else (2, TWO_RANKS)
        if ranks not in found:
            found[ranks] = measured(tmp_path_factory.mktemp(f"x{ranks}"), ranks, cases)
        return found[ranks]

    return of


@pytest.mark.parametrize("name", [*SINGLE, *TWO_RANKS])
@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_with_images_is_predicted_within_2_percent(
    errors: Callable[[str], Errors], kind: str, name: str
) -> None:
    found = errors(name)[kind, name]
    assert abs(found["reported"]) < 0.02
    assert abs(found["counted"]) < 0.02
    # All sequences would have the most images, and every token loss.
    assert found["heaviest"] > -0.02
