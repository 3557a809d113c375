"""Shared by the programs: the samples, and the record of the step after a checkpoint.

Nothing here needs ftkit: the programs run in environments of their own.
"""

import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

STEPS = 3
"""Steps before the checkpoint."""
RATE = 3e-3
"""Learning rate at the start."""
MAX_NORM = 0.5
"""Norm to which gradients are clipped."""
SHOWN = 8
"""Values of each parameter that are recorded, equally spaced."""
PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "deepspeed",
    "lightning",
    "litgpt",
)


def read_samples(directory: Path) -> list[list[int]]:
    """Read the samples, [samples][tokens], of one length; all tokens but the first are labels."""
    found: list[list[int]] = json.loads((directory / "samples.json").read_text())
    return found


def note_next(out: Path, loss: float, rate: float, weights: Mapping[str, Any]) -> None:
    """Record the loss of the step after the checkpoint, and some weights after that step.

    Args:
        out: directory of the case.
        loss: over all samples.
        rate: learning rate of the step.
        weights: by name, whole.
    """
    values = {}
    for name, tensor in weights.items():
        flat = tensor.detach().float().flatten()
        places = [i * (flat.numel() - 1) // (SHOWN - 1) for i in range(SHOWN)]
        values[name] = [float(flat[place]) for place in places]
    content = {
        "step": STEPS + 1,
        "loss": loss,
        "learning_rate": rate,
        "weights": values,
        "versions": installed(PACKAGES),
    }
    rows = [f" {json.dumps(name)}: {json.dumps(content[name])}" for name in sorted(content)]
    (out / "next.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
