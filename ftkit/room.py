"""Whether a run has room on its devices, before anything is downloaded or started; no torch."""

import dataclasses
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from ftkit.base.hub import find_here
from ftkit.errors import DoesNotFit, UserError
from ftkit.parsing import to_yaml
from ftkit.planning import Devices
from ftkit.recipe import Recipe
from ftkit.report.formatting import bytes_text
from ftkit.report.machine import hardware

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
        return psutil.virtual_memory().available // ranks
    import torch  # an answer only CUDA has

    return min(torch.cuda.mem_get_info(i)[0] for i in range(devices.count))


def _ask(recipe: Recipe, devices: Devices, memory_bytes: int) -> dict[str, Any]:
    """What `ftkit.plan_check` finds; {} if it finds nothing."""
    if devices.accelerator == "cpu":
        recipe = dataclasses.replace(recipe, accelerator="cpu")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "recipe.yaml"
        file.write_text(to_yaml(recipe), encoding="utf-8")
        name = devices.names[0] if devices.names else "host memory"
        words = [str(file), str(memory_bytes // 2**20), str(devices.bf16_native), name]
        answer = subprocess.run(
            [sys.executable, "-m", "ftkit.plan_check", *words],
            capture_output=True,
            text=True,
            check=False,
        )
    found: dict[str, Any] = json.loads(answer.stdout) if answer.returncode == 0 else {}
    return found
