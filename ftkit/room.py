"""Whether a run has room on its devices, before anything is downloaded or started; no torch."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftkit.base.hub import find_here
from ftkit.errors import DoesNotFit, UserError
from ftkit.job import Job
from ftkit.parsing import to_yaml
from ftkit.planning import Devices
from ftkit.recipe import Recipe
from ftkit.report.formatting import bytes_text
from ftkit.report.machine import available_host_bytes, hardware
from ftkit.report.memory import Shortage
from ftkit.report.report import PeakMemory

_SUSPICIOUS = 0.5
"""A base model on this machine whose weights take more than this share of a GPU is looked at."""


def with_micro_batch(recipe: Recipe, devices: Devices) -> Recipe:
    """The recipe with the largest micro-batch that fits in the free memory, if it is auto.

    Raises:
        DoesNotFit: not even one sequence does.
    """
    if recipe.train.micro_batch_size != "auto":
        return recipe
    memory_bytes = _free_bytes(recipe, devices)
    found = _ask(recipe, devices, memory_bytes)
    if "error" in found:
        raise UserError(str(found["error"]))
    if found["fits"] is False:
        raise DoesNotFit(
            f"train.micro_batch_size is auto, but one sequence needs {_gib(found)} on each rank, "
            f"and {bytes_text(memory_bytes)} are free. ftkit plan --fit shows what would fit."
        )
    train = dataclasses.replace(recipe.train, micro_batch_size=int(found["micro_batch_size"]))
    return dataclasses.replace(recipe, train=train)


def require_room(recipe: Recipe, devices: Devices, command: Sequence[str]) -> None:
    """Refuse a run on GPUs that certainly cannot fit.

    A plan takes seconds. It is made if the base model has still to be downloaded, or if its
    weights are large for the device; other runs start at once.

    Raises:
        DoesNotFit: says what would fit.
    """
    memory_bytes = _gpu_bytes(devices)
    if memory_bytes is None or not _is_worth_a_look(recipe, memory_bytes):
        return
    found = _ask(recipe, devices, memory_bytes)
    if found.get("fits") is not False:
        return
    lines = [
        f"This run needs at least {_gib(found)} on each GPU, which has {bytes_text(memory_bytes)}.",
        "Nothing was started; --force tries it all the same.",
    ]
    if found["changes"]:
        lines.append("What would fit, the cheapest in speed first:")
    for change in found["changes"]:
        lines.append(f"  {change['title']}: {_command(command, change)}")
    raise DoesNotFit("\n".join(lines))


_ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
_CAPACITY = re.compile(r"total capacity of ([\d.]+) (bytes|KiB|MiB|GiB)")
"""In torch's messages: what did not fit, and (on CUDA) what there is."""
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ADVICE_S = 60.0
"""How long the end of a run may take for advice; it goes without after that."""


def find_shortage(job: Job, peak: PeakMemory | None, message: str) -> Shortage:
    """How much memory was missing in a run that has ended for it, and what would fit.

    Args:
        job: what was run.
        peak: highest memory of the rank that ran out of it.
        message: how it ended.
    """
    devices, ranks = job.devices, job.plan.devices
    if devices.accelerator == "cpu":
        held_bytes = (peak.host_bytes or peak.rss_bytes) if peak else None
        available_bytes: int | None = available_host_bytes(ranks)
    else:
        held_bytes = peak.allocated_bytes if peak else None
        available_bytes = _bytes_in(_CAPACITY, message) or _gpu_bytes(devices)
    recipe = dataclasses.replace(job.recipe, checkpoint_dir=job.base, devices=ranks)
    found: dict[str, Any] = {}
    if available_bytes is not None:
        found = _ask(recipe, devices, available_bytes, failed=True, timeout_s=_ADVICE_S)
    return Shortage(
        held_bytes=held_bytes,
        asked_bytes=_bytes_in(_ASKED, message),
        available_bytes=available_bytes,
        predicted_peak_bytes=found.get("peak_bytes"),
        changes=[
            f"{change['title']}: {_command(job.command, change)}"
            for change in found.get("changes", ())
            if change["fits"]
        ],
    )


def shortage_text(shortage: Shortage, accelerator: str) -> str:
    """The same for people."""
    parts = []
    if shortage.held_bytes is not None:
        parts.append(f"{bytes_text(shortage.held_bytes)} were held")
    if shortage.asked_bytes is not None:
        parts.append(f"{bytes_text(shortage.asked_bytes)} more were asked for")
    if shortage.available_bytes is not None:
        where = "free for each rank" if accelerator == "cpu" else "on each GPU"
        parts.append(f"{bytes_text(shortage.available_bytes)} are {where}")
    lines = [f"memory: {', '.join(parts)}"]
    if shortage.predicted_peak_bytes is not None:
        predicted = bytes_text(shortage.predicted_peak_bytes)
        lines.append(f"predicted for sequences of full length: {predicted} in tensors")
    if shortage.changes:
        lines.append("what would fit, the cheapest in speed first:")
        lines += [f"  {change}" for change in shortage.changes]
    return "\n".join(lines)


def _bytes_in(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    return found and int(float(found[1]) * _UNITS[found[2]])


def _is_worth_a_look(recipe: Recipe, memory_bytes: int) -> bool:
    name = recipe.checkpoint_dir
    if name.startswith("random:"):
        return True
    try:
        directory = find_here(name)
    except UserError:
        return False
    if directory is None:
        return True
    sizes = (path.stat().st_size for path in directory.iterdir() if path.is_file())
    return sum(sizes) > _SUSPICIOUS * memory_bytes


def _command(command: Sequence[str], change: dict[str, Any]) -> str:
    words = list(command)
    if change["method"] == "lora":
        words = ["finetune" if word == "finetune_full" else word for word in words]
    for key, value in change["overrides"]:
        words += [f"--{key}", value]
    return shlex.join(words)


def _gib(found: dict[str, Any]) -> str:
    return bytes_text(int(found["low_bytes"]))


def _gpu_bytes(devices: Devices) -> int | None:
    """Memory of the smallest GPU; None: there is none, or its driver does not say."""
    sizes = [gpu.memory_bytes for gpu in hardware().gpus if gpu.memory_bytes]
    return min(sizes) if devices.accelerator == "cuda" and sizes else None


def _free_bytes(recipe: Recipe, devices: Devices) -> int:
    """What each rank may take now."""
    if devices.accelerator == "cpu":
        ranks = recipe.devices if isinstance(recipe.devices, int) else 1
        return available_host_bytes(ranks)
    import torch  # an answer only CUDA has

    return min(torch.cuda.mem_get_info(i)[0] for i in range(devices.count))


def _ask(
    recipe: Recipe,
    devices: Devices,
    memory_bytes: int,
    *,
    failed: bool = False,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """What `ftkit.plan_check` finds; {} if it finds nothing, or not in time."""
    if devices.accelerator == "cpu":
        recipe = dataclasses.replace(recipe, accelerator="cpu")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "recipe.yaml"
        file.write_text(to_yaml(recipe), encoding="utf-8")
        name = devices.names[0] if devices.names else "host memory"
        words = [str(file), str(memory_bytes // 2**20), str(devices.bf16_native), name]
        try:
            answer = subprocess.run(
                [sys.executable, "-m", "ftkit.plan_check", *words, str(failed)],
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return {}
    found: dict[str, Any] = json.loads(answer.stdout) if answer.returncode == 0 else {}
    return found
