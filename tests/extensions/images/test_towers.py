"""Towers whose weights are not the numbers that the model needs are refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import message_of, says
from safetensors.torch import load_file, save_file
from seeing_models import draw_images, save_model

from ftkit.cli.app import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and pictures."""
    folder = tmp_path_factory.mktemp("seen")
    draw_images(folder / "images", 1)
    save_model("llava", folder / "llava")
    return folder


WEIGHT = "vision_tower.encoder.layers.0.mlp.fc1.weight"


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (lambda weight: weight.to(torch.float8_e4m3fn), {}, ("torch.float8_e4m3fn", "scales")),
        (
            lambda weight: weight.to(torch.float8_e4m3fn),
            {"quantization_config": {"quant_method": "fp8"}},
            ("torch.float8_e4m3fn", "scales"),
        ),
        (lambda weight: (100 * weight).to(torch.int8), {}, ("torch.int8", "scales")),
        (lambda weight: weight[:-1].clone(), {}, ("[23, 16]", "[24, 16]")),
        (lambda weight: None, {}, ("lack", "Download")),
    ],
    ids=["FP8", "FP8 without scales", "integers", "shape", "missing"],
)
def test_a_tower_that_cannot_be_computed_is_refused_by_name(
    change: Any, settings: dict[str, Any], words: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(folder / "llava", base)
    weights = load_file(base / "model.safetensors")
    weight = change(weights.pop(WEIGHT))
    changed = {} if weight is None else {WEIGHT: weight}
    save_file(weights | changed, base / "model.safetensors", {"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | settings))
    image = str(folder / "images/0.png")
    said = message_of(run, ["generate", str(base), "--image", image, "--prompt", "what"])
    assert says(said, f"model.{WEIGHT}", *words)
