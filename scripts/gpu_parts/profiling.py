"""A part that profiles single steps: which kernels run, and how long the GPU waits."""

import gc
import io
import time
from pathlib import Path
from typing import Any

from gpu_parts.correctness import PLAIN
from gpu_parts.part import Found, Scene

KERNELS = 25
"""Number of kernels that are listed."""
ATTENTION = ("flash", "fmha", "attention", "sdpa", "cudnn")
"""Words in the names of kernels of attention."""


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
    rows = profiled.key_averages()
    if scene.dry:
        found.check("profile", passed=len(rows) > 0, said=f"{len(rows)} operations")
        return
    on_device = [row for row in rows if row.self_device_time_total > 0]
    on_device.sort(key=lambda row: -row.self_device_time_total)
    busy_s = sum(row.self_device_time_total for row in on_device) / 1e6
    listed = {row.key: [row.count, row.self_device_time_total / 1e6] for row in on_device[:KERNELS]}
    found.figure("kernels: count, seconds", listed)
    found.figure("seconds", {"whole": took_s, "on the device": busy_s})
    waits = {
        row.key: row.count for row in rows if "Synchronize" in row.key or row.key == "aten::item"
    }
    found.figure("waits", waits)
    named = sorted({row.key for row in on_device if any(a in row.key.lower() for a in ATTENTION)})
    fast = any("flash" in name.lower() or "cudnn" in name.lower() for name in named)
    found.check("attention is flash", passed=fast, said="; ".join(named)[:400])
    launches = sum(row.count for row in rows if "LaunchKernel" in row.key)
    found.check("kernels launched", passed=None, said=launches)
    profiled.export_chrome_trace(str(scene.results / "trace.json.gz"))


def _train(scene: Scene) -> None:
    """Train in this process, because the profiler sees no other."""
    from ftkit.recipe.devices import find_devices
    from ftkit.recipe.parsing import read_recipe
    from ftkit.runs.job import Job
    from ftkit.training.journal import Journal
    from ftkit.training.loop import StopRequest
    from ftkit.training.rank import run_job
    from ftkit.training.recorder import Recorder
    from ftkit.utils.console.display import Display

    out = scene.directory / "out"
    values: dict[str, Any] = PLAIN | {
        "checkpoint_dir": "random:pythia-14m" if scene.dry else "random:tiny-llama-1.1b",
        "out_dir": out,
        "accelerator": scene.accelerator,
        "precision": "bf16-true",
        "train__global_batch_size": 2 if scene.dry else 8,
        "train__micro_batch_size": 2 if scene.dry else 8,
        "train__max_steps": 2 if scene.dry else 6,
        "train__max_seq_length": 64 if scene.dry else 512,
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
    with (
        Display(out, stream=io.StringIO()) as display,
        Recorder(job.new_report(), state, job.plan, began_s=job.began_s) as recorder,
    ):
        run_job(job, None, StopRequest(), Journal(display, recorder))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
