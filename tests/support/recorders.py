"""A recorder that is fed with steps that no run has trained."""

import time
from collections.abc import Mapping
from pathlib import Path

from ftkit.checkpoint.metadata import Metadata
from ftkit.models.routing import Routing
from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import read_recipe
from ftkit.runs.job import Job
from ftkit.runs.report.meters import PARTS, StepRecord
from ftkit.training.recorder import Recorder

SAMPLES_PER_EPOCH = 100


def make_recorder(
    tmp_path: Path,
    start: Metadata | None = None,
    devices: int = 1,
    routing: Routing | None = None,
    checkpoint: Path | None = None,
    changes: tuple[str, ...] = (),
    objective: str = "sft",
) -> Recorder:
    recipe = read_recipe(
        [],
        [
            ("checkpoint_dir", "base"),
            ("out_dir", str(tmp_path / "out")),
            ("devices", str(devices)),
            ("objective", objective),
            ("accelerator", "cpu"),
        ],
        method="lora",
    )
    job = Job(
        recipe=recipe,
        devices=Devices(accelerator="cpu", count=2),
        base="base",
        command=(),
        started_at_s=time.time(),
        start=None if checkpoint is None else str(checkpoint),
        changes=changes,
    )
    state = job.directory.rank(0)
    state.path.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(job.new_report(start), state, job.plan, began_s=job.began_s, start=start)
    recorder.expect(
        lambda samples: samples / SAMPLES_PER_EPOCH, 1.0, routing or Routing((), 0, None)
    )
    return recorder


def step_record(step: int, terms: Mapping[str, float] | None = None) -> StepRecord:
    return StepRecord(
        terms=terms or {},
        step=step,
        samples=10,
        tokens=1000,
        label_tokens=300,
        padded_tokens=100,
        micro_steps=2,
        loss=10.0 / step,
        learning_rate=1e-3,
        gradient_norm=1.0,
        duration_s=0.5,
        parts_s=dict.fromkeys(PARTS, 0.1),
    )


def train(recorder: Recorder, steps: range, imbalance: float | None = None) -> None:
    recorder.enter("training")
    for step in steps:
        recorder.on_step(step_record(step), imbalance)
