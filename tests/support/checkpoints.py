"""Small checkpoints for tests that need no training."""

import json
import os
from pathlib import Path
from typing import Any

from ftkit.checkpoint.file_checks import describe_file
from ftkit.checkpoint.metadata import BaseIdentity, DataIdentity, Layout, Metadata
from ftkit.checkpoint.store import Store

RECIPE = """\
checkpoint_dir: base/tiny
out_dir: out/run
devices: 2
strategy: {class_path: fsdp, init_args: {}}
train: {global_batch_size: 16, epochs: 2}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.0002}}
"""
FILES = {
    "recipe.yaml": RECIPE.encode(),
    "shard-00000-of-00002.safetensors": bytes(range(256)) * 12,
    "shard-00001-of-00002.safetensors": bytes(range(256)) * 8,
    "adapter/adapter_config.json": b'{"r": 8}\n',
    "adapter/adapter_model.safetensors": bytes(range(100)),
}


def safetensors(size: int) -> bytes:
    """A file with one tensor of that many bytes."""
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"tensor": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def some_metadata(step: int, **changes: Any) -> Metadata:
    """Metadata of a made-up checkpoint."""
    values: dict[str, Any] = {
        "method": "lora",
        "step": step,
        "samples": step * 16,
        "tokens": step * 1600,
        "epochs": step / 1000,
        "training_s": step * 0.5,
        "total_steps": 2000,
        "learning_rate": 1e-4,
        "schedule": {"total_steps": 2000.0, "warmup_steps": 100.0, "final_share": 0.1},
        "loss": 1.25,
        "validation_loss": None,
        "max_seq_length": 512,
        "optimizer": "torch.optim.AdamW",
        "optimizer_scalars": {"step": float(step)},
        "rng": {"seed": 1337, "rule": "every step seeds from (seed, step, rank)"},
        "base": BaseIdentity(name="base/tiny", fingerprint="b" * 16),
        "data": DataIdentity(fingerprint="d" * 16, train_samples=16000),
        "layout": Layout(
            strategy="fsdp",
            world_size=2,
            devices=2,
            num_nodes=1,
            precision="bf16-mixed",
            micro_batch_size=4,
            accelerator="cpu",
        ),
        "versions": {"ftkit": "1.0"},
        "saved_at": "2026-01-02T03:04:05Z",
    }
    return Metadata(**(values | changes))


def write_partial(
    store: Store, step: int, files: dict[str, bytes] | None = None, **changes: Any
) -> Metadata:
    """Write all of a checkpoint but its metadata, as the ranks do; that metadata."""
    partial = store.partial(step)
    files = FILES if files is None else files
    for name, content in files.items():
        path = partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(content)
            os.fsync(file.fileno())
    entries = {name: describe_file(partial / name) for name in files}
    return some_metadata(step, files=entries, **changes)


def save(store: Store, step: int, files: dict[str, bytes] | None = None, **changes: Any) -> Path:
    """Write and commit a checkpoint."""
    return store.commit(write_partial(store, step, files, **changes))
