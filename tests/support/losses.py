"""Losses of samples, one by one and by arithmetic that anybody can follow."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from ftkit.data.dataset import DataSets, load_data
from ftkit.data.samples.sample_set import Samples
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component

SEED = 1337


def load(base: Path, data_file: Path) -> DataSets:
    component: Component = {
        "class_path": "litgpt.data.JSON",
        "init_args": {
            "json_path": str(data_file),
            "mask_prompt": True,
            "val_split_fraction": 0.2,
        },
    }
    return load_data(component, Tokenizer(base), 200)


def loss_of(model: torch.nn.Module, samples: Samples, indices: Iterable[int]) -> float:
    """Mean loss over the label tokens as transformers' model gives it, one sample at a time."""
    total, tokens = 0.0, 0
    for index in indices:
        ids, trained, *_ = samples[index]
        is_label = np.zeros(len(ids), dtype=bool)
        for first, end in trained:
            is_label[first:end] = True
        labels = torch.tensor(np.where(is_label, ids, -100)[1:], dtype=torch.long)
        with torch.no_grad():
            logits = model(torch.tensor(ids[None, :-1], dtype=torch.long)).logits[0]
        total += F.cross_entropy(logits, labels, reduction="sum").item()
        tokens += int((labels != -100).sum())
    return total / tokens
