"""What the programs share: the model, the samples, and how the step after a checkpoint is noted.

Nothing here needs ftkit: the programs run in environments of their own.
"""

import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

STEPS = 3
"""Done before the checkpoint."""
RATE = 3e-3
"""Learning rate at the start."""
MAX_NORM = 0.5
"""To which gradients are clipped."""
SHOWN = 8
"""Values of each parameter that are noted, at equal distances."""
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
    """[samples][tokens], all of one length; every token but the first is learned."""
    found: list[list[int]] = json.loads((directory / "samples.json").read_text())
    return found


def note_next(out: Path, loss: float, rate: float, weights: Mapping[str, Any]) -> None:
    """Write down the loss of the step after the checkpoint, and some weights after it.

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
    """Versions of those that are there."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
