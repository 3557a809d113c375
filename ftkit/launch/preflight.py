"""The memory check before a run: whether it fits its devices, and what would; no torch."""

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

from ftkit.accelerators.kinds import HOST_KIND
from ftkit.config.devices import Devices, free_bytes
from ftkit.config.parsing import to_yaml
from ftkit.config.recipe import Recipe, Train
from ftkit.console.display import Display
from ftkit.console.formatting import bytes_text
from ftkit.errors import DoesNotFit, UserError
from ftkit.pretrained.hub import fetch_settings
from ftkit.pretrained.size_estimate import rough_model
from ftkit.report.peak_memory import PeakMemory
from ftkit.report.step_memory import Shortage
from ftkit.runs.job import Job
from ftkit.utils.hardware import available_host_bytes
from ftkit.utils.out_of_memory import device_line
from ftkit.utils.progress import print_notice
from ftkit.utils.units import SIZE_UNITS

_SUSPICIOUS = 0.5
"""A run that takes more than this share of a GPU by a rough estimate is looked at."""
_FULL_BYTES, _LORA_BYTES = 16, 4
"""For each parameter: weight, gradient and two moments in float32, or a weight alone."""
_WIDTH_BYTES, _INNER_BYTES = 64, 16
"""What a layer keeps of a token for the backward pass, for each number of its width and of its
MLP's; without activation checkpointing, in float32."""
_ANY_RUN_BYTES = 2 * 2**30
"""Context, logits and what the allocator holds besides."""


def with_micro_batch(recipe: Recipe, devices: Devices) -> Recipe:
    """The recipe with the largest micro-batch that fits in the free memory, if it is auto.

    Raises:
        DoesNotFit: not even one sequence does.
    """
    key = recipe.train.filled
    if key is None:
        return recipe
    memory_bytes = _free_bytes(recipe, devices)
    found = _ask_shown(recipe, devices, memory_bytes)
    if "error" in found:
        raise UserError(str(found["error"]))
    if found["fits"] is False:
        raise DoesNotFit(
            f"train.{key} is auto, but one sequence needs {_gib(found)} on each rank, "
            f"and {bytes_text(memory_bytes)} are free. ftkit plan --fit shows what would fit."
        )
    value = int(found[key])
    if found["length_source"] == "assumed":
        print_notice(f"train.{key} is {value}; sequences: {found['length']}")
    return dataclasses.replace(recipe, train=recipe.train.filled_with(value))


def require_room(recipe: Recipe, devices: Devices, command: Sequence[str]) -> None:
    """Refuse a run on GPUs that certainly cannot fit, and say so where it may not.

    A plan takes seconds, and is made where the model is large for the device; other runs start
    at once.

    Raises:
        DoesNotFit: says what would fit.
    """
    memory_bytes = _gpu_bytes(devices, _ranks(recipe, devices))
    if memory_bytes is None or not _is_worth_a_look(recipe, memory_bytes):
        return
    found = _ask_shown(recipe, devices, memory_bytes)
    if found.get("fits", True) is None:
        print(
            f"memory may not be enough: this run needs {bytes_text(found['low_bytes'])} to "
            f"{bytes_text(found['high_bytes'])} of {bytes_text(memory_bytes)} on each GPU "
            f"(sequences: {found['length']})",
            flush=True,
        )
    if found.get("fits") is not False:
        return
    lines = [
        f"This run needs at least {_gib(found)} on each GPU, which has {bytes_text(memory_bytes)}.",
        f"Sequences: {found['length']}.",
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
        available_bytes = _bytes_in(_CAPACITY, message) or _gpu_bytes(devices, ranks)
    recipe = dataclasses.replace(job.recipe, checkpoint_dir=job.base, devices=ranks)
    found: dict[str, Any] = {}
    if available_bytes is not None:
        found = _ask(recipe, devices, available_bytes, failed=True, timeout_s=_ADVICE_S)
    return Shortage(
        held_bytes=held_bytes,
        asked_bytes=_bytes_in(_ASKED, message),
        available_bytes=available_bytes,
        predicted_peak_bytes=found.get("peak_bytes"),
        predicted_for=found.get("length"),
        changes=[
            f"{change['title']}: {_command(job.command, change)}"
            for change in found.get("changes", ())
            if change["fits"]
        ],
    )


def shortage_text(shortage: Shortage, accelerator: str, message: str) -> str:
    """The same for people; `message` is how the run ended."""
    parts = []
    if shortage.held_bytes is not None:
        parts.append(f"{bytes_text(shortage.held_bytes)} were held")
    if shortage.asked_bytes is not None:
        parts.append(f"{bytes_text(shortage.asked_bytes)} more were asked for")
    if shortage.available_bytes is not None:
        where = "free for each rank" if accelerator == "cpu" else "on each GPU"
        parts.append(f"{bytes_text(shortage.available_bytes)} are {where}")
    lines = [f"memory: {', '.join(parts)}"] if parts else []
    if shortage.asked_bytes is None and device_line(message):  # not from torch's allocator
        lines.append(
            "the driver had no more to give: CUDA, libraries and other programs take memory beside "
            "the tensors"
        )
    if shortage.predicted_peak_bytes is not None:
        predicted = bytes_text(shortage.predicted_peak_bytes)
        lines.append(f"predicted: {predicted} in tensors (sequences: {shortage.predicted_for})")
    if shortage.changes:
        lines.append("what would fit, the cheapest in speed first:")
        lines += [f"  {change}" for change in shortage.changes]
    return "\n".join(lines)


def _bytes_in(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    return found and int(float(found[1]) * SIZE_UNITS.get(found[2], 1))


def _is_worth_a_look(recipe: Recipe, memory_bytes: int) -> bool:
    """Whether a run may be too large, judged generously by the settings of its model alone.

    So it is the same whether the weights are on this machine or not.
    """
    name = recipe.checkpoint_dir
    if name.startswith("random:"):
        return True
    fetch_settings(name, token=recipe.access_token)
    model = rough_model(name)
    if model is None:
        return True
    train = recipe.train
    length = min(train.max_seq_length or model.context, model.context)
    number_bytes = _FULL_BYTES if recipe.method == "full" else _LORA_BYTES
    inner_width = model.inner_width * model.experts_per_token
    layer_bytes = _WIDTH_BYTES * model.width + _INNER_BYTES * inner_width
    needed_bytes = (
        model.parameters * number_bytes
        + _most_positions(train, length) * model.layers * layer_bytes
        + _ANY_RUN_BYTES
    )
    return needed_bytes > _SUSPICIOUS * memory_bytes


def _most_positions(train: Train, length: int) -> int:
    """Of a micro-batch of sequences of this length; auto may take the whole batch."""
    size, tokens, sequences = (
        train.micro_batch_size,
        train.micro_batch_tokens,
        train.global_batch_size,
    )
    if size is None and tokens is None:
        size = 1
    if isinstance(size, int):
        sequences = min(size, sequences)
    if isinstance(tokens, int):
        return min(sequences * length, max(tokens, length))
    return sequences * length


def _command(command: Sequence[str], change: dict[str, Any]) -> str:
    words = list(command)
    if change["method"] == "lora":
        words = ["finetune" if word == "finetune_full" else word for word in words]
    for key, value in change["overrides"]:
        words += [f"--{key}", value]
    return shlex.join(words)


def _gib(found: dict[str, Any]) -> str:
    return bytes_text(int(found["low_bytes"]))


def _ranks(recipe: Recipe, devices: Devices) -> int:
    """Ranks on this machine; there is no plan yet."""
    if isinstance(recipe.devices, int):
        return recipe.devices
    return 1 if devices.accelerator == HOST_KIND else devices.count


def _gpu_bytes(devices: Devices, ranks: int) -> int | None:
    """Memory of the smallest GPU that is used; None: there is none, or it is not known."""
    return min(devices.memory_bytes[:ranks], default=None)


def _free_bytes(recipe: Recipe, devices: Devices) -> int:
    """What each rank may take now."""
    ranks = _ranks(recipe, devices)
    if devices.accelerator == "cpu":
        return available_host_bytes(ranks)
    return min(free_bytes(min(ranks, devices.count), devices.accelerator))


def _ask_shown(recipe: Recipe, devices: Devices, memory_bytes: int) -> dict[str, Any]:
    """What `_ask` finds, before a run, with a line that moves: it takes seconds."""
    with (
        Display(None, stream=sys.stderr) as display,
        display.phase("predicting memory", brief=True),
    ):
        return _ask(recipe, devices, memory_bytes)


def _ask(
    recipe: Recipe,
    devices: Devices,
    memory_bytes: int,
    *,
    failed: bool = False,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """What `ftkit.planner.check` finds; {} if it finds nothing, or not in time."""
    if devices.accelerator == "cpu":
        recipe = dataclasses.replace(recipe, accelerator="cpu")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "recipe.yaml"
        file.write_text(to_yaml(recipe), encoding="utf-8")
        name = devices.names[0] if devices.names else "host memory"
        words = [str(file), str(memory_bytes // 2**20), str(devices.bf16_native), name]
        try:
            answer = subprocess.run(
                [sys.executable, "-m", "ftkit.planner.check", *words, str(failed)],
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return {}
    found: dict[str, Any] = json.loads(answer.stdout) if answer.returncode == 0 else {}
    return found
