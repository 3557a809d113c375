"""The tower's work counts where steps are laid out, and in the share of the device's peak."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import transformers
from seeing_models import FIRST, save_model

from ftkit.models.flops import flops_per_token, mean_flops_per_token, media_cost
from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.pretrained.base_model import read_blueprint
from ftkit.planning.media import waiting_bytes, with_encoder
from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import make_plan
from ftkit.strategies.step_memory import MediaSize, MicroBatchSize

TOWERS = {
    "llava": "model.vision_tower",
    "gemma3": "model.vision_tower",
    "qwen2_5_vl": "model.visual",
    "idefics3": "model.vision_model",
}


def outlined(directory: Path, kinds: tuple[str, ...] = ("image",)) -> LanguageModel:
    recipe = read_recipe([], [("checkpoint_dir", str(directory))], method="full")
    plan = make_plan(recipe, Devices(accelerator="cpu", count=1))
    base = with_encoder(read_blueprint(str(directory)), plan, kinds)
    return outline(base, recipe, torch.float32, torch.float32)


@pytest.mark.parametrize("kind", FIRST)
def test_a_patch_costs_a_forward_pass_through_the_tower(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path)
    model = outlined(tmp_path)
    whole = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    layers = whole.get_submodule(TOWERS[kind]).modules()
    weights = sum(
        layer.weight.numel()
        for layer in layers
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d)
    )
    assert model.body.media_flops == 2 * weights
    assert outlined(tmp_path, kinds=()).body.media_flops == 0
    lengths, labels, patches = np.array([100, 50]), np.array([10, 5]), np.array([64, 0])
    without = mean_flops_per_token(model, lengths, labels)
    found = mean_flops_per_token(model, lengths, labels, media_sizes=patches)
    assert found - without == pytest.approx(2 * weights * 64 / 150)
    # A patch is as much work as so many tokens.
    tokens = media_cost(model, label_fraction=0.1)
    per_token = flops_per_token(model, attention_length=0, label_fraction=0.1)
    assert tokens * per_token == pytest.approx(2 * weights)


def test_pixels_of_micro_batches_that_are_read_ahead_take_host_memory(tmp_path: Path) -> None:
    save_model("gemma3", tmp_path)
    base = read_blueprint(str(tmp_path))
    media = MediaSize(kind="image", lengths=(20, 20), sizes=(16, 16, 16))
    size = MicroBatchSize(sequences=2, positions=20, targets=40, tokens=40, media=media)
    # Of 32 x 32 pixels in float32, and where the four tokens of each image are.
    read = 3 * (32 * 32 * 3 * 4 + 4 * 8)
    assert waiting_bytes(base, size, is_copied=False) == 2 * read
    assert waiting_bytes(base, size, is_copied=True) == 3 * read
    assert waiting_bytes(base, dataclasses.replace(size, media=None), is_copied=True) == 0
