"""Memory that a failed run lacked, and what would have fit."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from ftkit.errors import device_line
from ftkit.launch import preflight
from ftkit.planning.gpus import Gpu, device_here, free_here, ranks_here
from ftkit.recipe.batches import MicroBatch
from ftkit.recipe.devices import Devices
from ftkit.recipe.recipe import Recipe
from ftkit.runs.report.report import PeakMemory
from ftkit.strategies.step_memory import Shortage
from ftkit.utils.accelerators.kinds import HOST_KIND
from ftkit.utils.console.formatting import SIZE_UNITS, bytes_text

_REQUESTED = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
_CAPACITY = re.compile(r"total capacity of ([\d.]+) (bytes|KiB|MiB|GiB)")
"""In torch's messages: the size that did not fit, and (on CUDA) the total."""
_ADVICE_S = 60.0
"""Seconds that the end of a run may take to find what would fit."""


def find_shortage(
    recipe: Recipe,
    devices: Devices,
    command: Sequence[str],
    peak: PeakMemory | None,
    message: str,
    chosen: MicroBatch | None = None,
) -> Shortage:
    """Memory that a failed run lacked, and what would fit.

    Args:
        recipe: of the run, all of which is planned again.
        devices: of this machine.
        command: the command line, to which changes are added.
        peak: highest memory of the rank that ran out of memory.
        message: its error.
        chosen: micro-batch of the run, if the recipe left it open.
    """
    ranks = ranks_here(recipe.devices, devices)
    device = device_here(ranks, devices)
    # Host memory is shared with other programs: what is free now was the limit, not the total.
    if devices.accelerator == HOST_KIND:
        held_bytes = (peak.host_bytes or peak.rss_bytes) if peak else None
        device = free_here(ranks, devices)
    else:
        held_bytes = peak.allocated_bytes if peak else None
        # torch names the memory of the card, also of one that nothing else knows.
        if capacity := _bytes_in(_CAPACITY, message):
            known = device or Gpu(name="GPU", memory_bytes=0, bf16=devices.bf16_native)
            device = dataclasses.replace(known, memory_bytes=capacity)
    available_bytes = None if device is None else device.memory_bytes
    found: dict[str, Any] = {}
    if device is not None:
        found = preflight.check(
            recipe, devices, device, chosen=chosen, failed=True, timeout_s=_ADVICE_S
        )
    return Shortage(
        held_bytes=held_bytes,
        asked_bytes=_bytes_in(_REQUESTED, message),
        available_bytes=available_bytes,
        predicted_peak_bytes=found.get("peak_bytes"),
        predicted_for=found.get("length"),
        changes=[
            f"{change['title']}: {preflight.changed_command(command, change)}"
            for change in found.get("changes", ())
            if change["fits"]
        ],
    )


def shortage_text(shortage: Shortage, accelerator: str, message: str) -> str:
    """Text for the user; `message` is the error that ended the run."""
    parts = []
    if shortage.held_bytes is not None:
        parts.append(f"{bytes_text(shortage.held_bytes)} were held")
    if shortage.asked_bytes is not None:
        parts.append(f"{bytes_text(shortage.asked_bytes)} more were requested")
    if shortage.available_bytes is not None:
        where = "free for each rank" if accelerator == "cpu" else "on each GPU"
        parts.append(f"{bytes_text(shortage.available_bytes)} are {where}")
    lines = [f"memory: {', '.join(parts)}"] if parts else []
    if shortage.asked_bytes is None and device_line(message):  # not from torch's allocator
        lines.append(
            "the driver had no memory left: CUDA, libraries and other programs also use memory"
        )
    if shortage.predicted_peak_bytes is not None:
        predicted = bytes_text(shortage.predicted_peak_bytes)
        lines.append(f"predicted: {predicted} in tensors (sequences: {shortage.predicted_for})")
    if shortage.changes:
        lines.append("changes that would make it fit, those that cost the least speed first:")
        lines += [f"  {change}" for change in shortage.changes]
    return "\n".join(lines)


def _bytes_in(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    return found and int(float(found[1]) * SIZE_UNITS.get(found[2], 1))
