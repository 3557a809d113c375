"""Checkpoints of other programs, and the recipe with which their runs go on."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from ftkit.checkpoint.metadata import read_metadata
from ftkit.checkpoint.stored_state import StoredState

KEPT = Path(__file__).parents[1] / "extensions/foreign_checkpoints/checkpoints"
BASE = KEPT / "base"
SHALLOW = KEPT / "base-shallow"


def recipe(directory: Path, base: Path = BASE, **train: Any) -> Path:
    """Recipe of a run that continues: base model, data, batch, clipping."""
    file = directory / "recipe.yaml"
    content = {
        "checkpoint_dir": str(base),
        "precision": "32-true",
        "accelerator": "cpu",
        "data": {"class_path": "litgpt.data.JSON", "init_args": {"path": str(base / "data")}},
        "train": {"global_batch_size": 6, "micro_batch_size": 6, "max_norm": 0.5} | train,
        "eval": {"final_validation": False, "max_new_tokens": 0},
    }
    file.write_text(json.dumps(content))
    return file


def stored_of(checkpoint: Path, kind: str) -> dict[str, Tensor]:
    """Parameters in a checkpoint of ours, or their optimizer state of a kind, by our names."""
    stored = StoredState.in_checkpoint(checkpoint, read_metadata(checkpoint))
    return {
        name.removeprefix(f"{kind}/"): stored[name].read(0, shape.numel()).view(shape)
        for name in stored.names()
        if name.startswith(f"{kind}/")
        for shape in [stored[name].shape]
    }
