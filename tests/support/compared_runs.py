"""Runs of every outcome as directories with reports and rows, made without any training."""

import dataclasses
import fcntl
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ftkit.recipe.parsing import recipe_as_dict
from ftkit.recipe.recipe import Method
from ftkit.recipe.recipe_sections import recipe_type
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.metrics import MetricsWriter, ValidationWriter
from ftkit.runs.report.report import (
    Loss,
    OutcomeName,
    PeakMemory,
    PhaseTimes,
    Progress,
    RankMemory,
    Report,
    Resolved,
    Resumed,
    TermValues,
    Throughput,
    write_report,
)
from ftkit.strategies.step_memory import (
    Breakdown,
    PredictedStep,
    RankStepMemory,
    StepMemory,
    StepMoments,
)
from ftkit.utils.hardware import Hardware, InstalledGpu

GIB = 2**30
REASONS: dict[OutcomeName, str] = {
    "completed": "all 2 epochs done",
    "stopped": "--stop_after 10",
    "interrupted": "Ctrl+C",
    "out_of_memory": "CUDA out of memory. Tried to allocate 2.00 GiB",
    "failed": "data.json does not exist",
}


def make_run(
    out: Path,
    outcome: OutcomeName = "completed",
    *,
    method: Method = "lora",
    steps: int = 40,
    total_steps: int = 40,
    step_s: float = 0.5,
    peak_bytes: int | None = 10 * GIB,
    final_loss: float = 0.5,
    validated: bool = True,
    resumed: bool = False,
    gpu: bool = True,
    write: bool = True,
    **keys: Any,
) -> Report:
    """A run with rows and, but for write, its report; dots of keys are two underscores."""
    initial = recipe_type(method)(checkpoint_dir="base", out_dir=out)
    recipe = recipe_as_dict(initial) | {"precision": keys.pop("precision", None)}
    for key, value in keys.items():
        section, _, name = key.partition("__")
        place = recipe[section].get("init_args", recipe[section]) if name else recipe
        place[name or section] = value
    out.mkdir(parents=True)
    losses = [final_loss + 2 * math.exp(-6 * step / total_steps) for step in range(1, steps + 1)]
    with MetricsWriter(out / "metrics.csv") as rows:
        for step, loss in enumerate(losses, 1):
            rows.write(
                step=step, samples=step * 16, loss=loss, lr=0.1, grad_norm=None, tokens=2000,
                tokens_per_s=2000 / step_s,
            )  # fmt: skip
    with ValidationWriter(out / "validation.csv") as rows:
        for step in range(10, steps + 1, 10) if validated else ():
            rows.write(step=step, samples=step * 16, val_loss=losses[step - 1] + 0.1)
    (out / "recipe.yaml").write_text("checkpoint_dir: base\n")
    memory = RankMemory(
        rank=0,
        allocated_bytes=peak_bytes if gpu else None,
        reserved_bytes=peak_bytes and (peak_bytes + GIB if gpu else None),
        host_bytes=3 * GIB if gpu else peak_bytes,
    )
    speed = Throughput(
        tokens_per_s=2000 / step_s,
        samples_per_s=16 / step_s,
        steps_per_s=1 / step_s,
        window_steps=steps,
        window_s=steps * step_s,
        tokens_per_s_per_device=2000 / step_s,
    )
    report = Report(
        outcome=outcome,
        exit_reason=REASONS[outcome],
        exit_code=0,
        phase="training",
        started_at="2026-01-02T03:04:05Z",
        finished_at="2026-01-02T03:05:05Z",
        method=method,
        recipe=recipe,
        resolved=Resolved(
            base_model="base",
            accelerator="cuda" if gpu else "cpu",
            device="NVIDIA A100" if gpu else "AMD EPYC",
            devices=1,
            world_size=1,
            strategy="single",
            precision=recipe["precision"] or "bf16-mixed",
            total_steps=total_steps,
        ),
        hardware=Hardware(
            memory_bytes=64 * GIB,
            gpus=[InstalledGpu(name="NVIDIA A100", memory_bytes=24 * GIB)] if gpu else [],
        ),
        phases_s=PhaseTimes(training=steps * step_s, total=steps * step_s + 5),
        progress=Progress(steps=steps, samples=steps * 16, epochs=1.0),
        throughput=speed if steps else None,
        peak_memory=PeakMemory.of([memory]) if peak_bytes else None,
        step_memory=_step_memory(peak_bytes) if peak_bytes and steps else None,
        loss=Loss(
            first=losses[0] if losses else None,
            last=losses[-1] if losses else None,
            validation_last=losses[-1] + 0.1 if losses and validated else None,
        ),
        resumed=Resumed(from_step=20, checkpoint="c", strategy="single", world_size=1)
        if resumed
        else None,
    )
    if write:
        write_report(report, out)
    return report


def _step_memory(peak_bytes: int) -> StepMemory:
    parts = Breakdown(
        parameters=2 * GIB,
        gradients=GIB,
        optimizer_state=2 * GIB,
        activations=peak_bytes - 11 * GIB // 2,
        temporaries=GIB // 2,
    )
    rank = RankStepMemory(
        rank=0,
        step=2,
        peak_bytes=parts.total,
        peak_breakdown_bytes=parts,
        moments_bytes=StepMoments(),
    )
    predicted = PredictedStep(
        peak_bytes=parts.total + GIB // 4,
        peak_breakdown_bytes=parts,
        error_fraction=GIB / 4 / parts.total,
    )
    return StepMemory(ranks=[rank], predicted=predicted)


def note_in_ranks(out: Path, *reports: Report) -> None:
    """Write the reports of the ranks of a run that is at work."""
    run = RunDirectory(out)
    for rank, report in enumerate(reports):
        write_report(report, run.rank(rank).path)
    run.lock.touch()


@contextmanager
def at_work(out: Path) -> Iterator[None]:
    """The run's lock, as its supervisor holds it."""
    with RunDirectory(out).lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_all(root: Path) -> None:
    """A run of every kind."""
    make_run(root / "one", train__micro_batch_size=1, step_s=0.8, peak_bytes=8 * GIB)
    make_run(root / "four", train__micro_batch_size=4, step_s=0.5, peak_bytes=14 * GIB)
    make_run(
        root / "eight", "out_of_memory", train__micro_batch_size=8, steps=0, peak_bytes=23 * GIB
    )
    make_run(
        root / "ctrl-c", "interrupted", train__micro_batch_size=2, steps=12, peak_bytes=9 * GIB
    )


def with_terms(report: Report, out: Path) -> None:
    """Give a run what DPO reports beside its loss."""
    names = ("accuracy", "chosen_reward", "rejected_reward", "margin", "chosen_logps", "nll")
    terms = {name: TermValues(last=0.5, validation_last=0.5) for name in names}
    write_report(dataclasses.replace(report, terms=terms), out)
