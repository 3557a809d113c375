"""A part that profiles single steps: where their time goes, and how long the GPU waits."""

import gc
import io
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from gpu_parts.correctness import PLAIN
from gpu_parts.measuring import LENGTH, long_records
from gpu_parts.part import Found, Scene

KERNELS = 25
"""Number of kernels that are listed."""
KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa", "cudnn"),
    "copies": ("memcpy", "memset", "copy", "catarray"),
    "products": ("gemm", "gemv", "nvjet", "xmma", "cutlass", "splitk", "::mm", "addmm", "::bmm"),
}
"""Words in the names of what runs, by kind; the first kind with one of them counts."""
OTHERS, IDLE = "element-wise and sums", "idle"
STEP = "a step of the profile"
"""Name of a step in the profile."""
SEQUENCES, STEPS = 8, 6


class Ran(NamedTuple):
    """Something that ran on the device."""

    name: str
    began_us: float
    ended_us: float


def kernels(scene: Scene, found: Found) -> None:
    """Profile steps of a full fine-tune with torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if not scene.dry:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        began_s = time.perf_counter()
        _train(scene)
        took_s = time.perf_counter() - began_s
    on_cpu = [event for event in profiled.events() if not _is_of_device(event)]
    # The last one: nothing is allocated, and its memory is not followed.
    step = max((e.time_range for e in on_cpu if e.name == STEP), key=lambda span: span.start)
    if scene.dry:  # operations contain each other: each counts without those in it
        ran = [
            Ran(e.name, e.time_range.start, e.time_range.start + e.self_cpu_time_total)
            for e in on_cpu
            if not e.is_user_annotation
        ]
    else:
        ran = [
            Ran(e.name, e.time_range.start, e.time_range.end)
            for e in profiled.events()
            if _is_of_device(e) and not e.is_user_annotation
        ]
    times_s = by_kind(ran, step.start, step.end)
    found.figure("a step by kind, seconds", times_s | {"whole": (step.end - step.start) / 1e6})
    rows = profiled.key_averages()
    if scene.dry:
        found.check("profile", passed=times_s["products"] > 0, said=f"{len(rows)} operations")
        return
    # Only kernels: operations and annotations have the times of the kernels that they start.
    on_device = [
        row
        for row in rows
        if _is_of_device(row) and not row.is_user_annotation and row.self_device_time_total > 0
    ]
    on_device.sort(key=lambda row: -row.self_device_time_total)
    busy_s = sum(row.self_device_time_total for row in on_device) / 1e6
    listed = {row.key: [row.count, row.self_device_time_total / 1e6] for row in on_device[:KERNELS]}
    found.figure("kernels: count, seconds", listed)
    found.figure("seconds", {"whole": took_s, "on the device": busy_s})
    waits = {
        row.key: row.count for row in rows if "Synchronize" in row.key or row.key == "aten::item"
    }
    found.figure("waits", waits)
    named = sorted({row.key for row in on_device if kind_of(row.key) == "attention"})
    fast = any("flash" in name.lower() or "cudnn" in name.lower() for name in named)
    found.check("attention is flash", passed=fast, said="; ".join(named)[:400])
    launches = sum(row.count for row in rows if "LaunchKernel" in row.key)
    found.check("kernels launched", passed=None, said=launches)
    profiled.export_chrome_trace(str(scene.results / "trace.json.gz"))


def _is_of_device(event: Any) -> bool:
    """Whether an event of the profile, or a sum of some, is of the GPU and not of its host."""
    return str(event.device_type.name) != "CPU"


def kind_of(name: str) -> str:
    """Kind of a kernel or an operation, by its name."""
    lower = name.lower()
    return next((kind for kind, words in KINDS.items() if any(w in lower for w in words)), OTHERS)


def by_kind(ran: Iterable[Ran], began_us: float, ended_us: float) -> dict[str, float]:
    """Seconds of a step by kind of what ran, and in which nothing did.

    Kinds that ran at the same time count each, so that the sum may be longer than the step. The
    profiler slows the host, which makes the device wait longer than without it.

    Args:
        ran: on the device, in and outside the step.
        began_us: start of the step.
        ended_us: its end.
    """
    times_us = dict.fromkeys((*KINDS, OTHERS, IDLE), 0.0)
    busy_until_us = began_us
    for one in sorted(ran, key=lambda one: one.began_us):
        if began_us <= one.began_us < ended_us:
            times_us[kind_of(one.name)] += one.ended_us - one.began_us
            times_us[IDLE] += max(0.0, one.began_us - busy_until_us)
            busy_until_us = max(busy_until_us, one.ended_us)
    times_us[IDLE] += max(0.0, ended_us - busy_until_us)
    return {kind: time_us / 1e6 for kind, time_us in times_us.items()}


def _train(scene: Scene) -> None:
    """Train in this process, because the profiler sees no other."""
    from torch.profiler import record_function

    from ftkit.recipe.devices import find_devices
    from ftkit.recipe.parsing import read_recipe
    from ftkit.runs.job import Job
    from ftkit.training.journal import Journal
    from ftkit.training.loop import StopRequest
    from ftkit.training.rank import run_job
    from ftkit.training.recorder import Recorder
    from ftkit.training.step import TrainStep
    from ftkit.utils.console.display import Display

    out = scene.directory / "out"
    sequences = 2 if scene.dry else SEQUENCES
    values: dict[str, Any] = PLAIN | {
        "data__path": long_records(scene, sequences * STEPS),
        "data__mask_prompt": False,
        "checkpoint_dir": "random:pythia-14m" if scene.dry else "random:tiny-llama-1.1b",
        "out_dir": out,
        "accelerator": scene.accelerator,
        "precision": "bf16-true",
        "train__global_batch_size": sequences,
        "train__micro_batch_size": sequences,
        "train__max_steps": 2 if scene.dry else STEPS,
        "train__max_seq_length": 64 if scene.dry else LENGTH,
        "checkpoint__save": False,
    }
    words = [(key.replace("__", "."), _text(value)) for key, value in values.items()]
    recipe = read_recipe([], words, method="full")
    job = Job(
        recipe=recipe,
        devices=find_devices(recipe.accelerator, recipe.devices),
        base=recipe.checkpoint_dir,
        command=(),
        started_at_s=time.time(),
    )
    state = job.directory.rank(0)
    Path(state.path).mkdir(parents=True)
    gc.collect()
    run_step = TrainStep.run

    def named(*arguments: Any) -> Any:
        with record_function(STEP):
            return run_step(*arguments)

    with (
        patch.object(TrainStep, "run", named),
        Display(out, stream=io.StringIO()) as display,
        Recorder(job.new_report(), state, job.plan, began_s=job.began_s) as recorder,
    ):
        run_job(job, None, StopRequest(), Journal(display, recorder))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
