"""Models whose linear layers are stored in FP8, as several publishers write them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


class Style(NamedTuple):
    """How a publisher stores a model."""

    config: dict[str, Any]
    """Its quantization_config."""
    end: str = "_scale_inv"
    """What follows the name of a weight in that of its scales."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: those of a whole row."""
    has_one: bool = False
    """Whether a weight has one scale."""
    scales: torch.dtype = torch.float32
    """Number format of the scales: E8M0 has powers of two alone."""
    kept: str = "nothing"
    """A regular expression for the names of weights that are plain."""
    has_inputs: bool = False
    """Whether activations have scales of their own."""
    linear: tuple[str, ...] = ("_proj.weight", "_proj_with_mqa.weight")
    """Ends of the names of linear layers and experts."""
    in_fp4: str = "nothing"
    """A regular expression for the names of weights in FP4, with a power of two for 32 of a row."""


def _compressed(**weights: Any) -> dict[str, Any]:
    known = {"num_bits": 8, "type": "float", "symmetric": True} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": known}},
    }


STYLES = {
    "rows": Style({"quant_method": "fp8"}),
    "DeepSeek V3": Style(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [20, 24]}, block=(20, 24)
    ),
    "DeepSeek V3.1": Style(
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [16, 16]},
        block=(16, 16),
        scales=torch.float8_e8m0fnu,
    ),
    "Qwen": Style(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp", "o_proj"],
            "weight_block_size": [16, 16],
        },
        block=(16, 16),
        kept=r"layers\.0\.mlp\.|o_proj",
    ),
    "Mistral": Style(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        has_one=True,
        has_inputs=True,
    ),
    "llm-compressor": Style(
        _compressed(strategy="channel") | {"ignore": ["lm_head", "re:.*down_proj$"]},
        end="_scale",
        scales=torch.bfloat16,
        kept=r"down_proj",
        has_inputs=True,
    ),
    "llm-compressor, blocks": Style(
        _compressed(strategy="block", block_structure=[16, 24]), end="_scale", block=(16, 24)
    ),
    "ModelOpt": Style(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*layers.1.self_attn*"]},
        end="_scale",
        has_one=True,
        kept=r"layers\.1\.self_attn",
        has_inputs=True,
    ),
}
MIXED = {
    "DeepSeek V4": Style(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
            "weight_block_size": [16, 16],
        },
        end=".scale",
        block=(16, 16),
        scales=torch.float8_e8m0fnu,
        linear=tuple(
            f".{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_b", "w1", "w2", "w3")
        ),
        in_fp4=r"\.experts\.\d",
    ),
}
"""Those that do not have all packed weights in FP8, and names of one family."""


def in_fp8(base: Path, directory: Path, style: str = "rows") -> tuple[Path, Path]:
    """Copies of a model: with its linear layers in FP8, and with what these stand for."""
    pytest.importorskip("ftkit.extensions.packed_weights")
    known = (STYLES | MIXED)[style]
    packed, plain = directory / "packed", directory / "plain"
    stored: dict[str, Tensor] = {}
    meant = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if not name.endswith(known.linear) or re.search(known.kept, name):
            stored[name] = meant[name] = weight
            continue
        scale = name.replace(".weight", known.end) if known.end[0] == "." else f"{name}{known.end}"
        if re.search(known.in_fp4, name):
            stored[name], stored[scale], meant[name] = _in_fp4(weight)
            continue
        scales = _scales(weight.float(), known)
        factors = _spread(scales.float(), weight, known)
        stored[name] = (weight.float() / factors).to(torch.float8_e4m3fn)
        stored[scale] = scales.reshape(()) if known.has_one else scales
        meant[name] = (stored[name].float() * factors).to(weight.dtype)
        if known.has_inputs:
            own = "activation_scale" if known.end == "_scale_inv" else "input_scale"
            stored[name.replace("weight", own)] = torch.tensor(0.5)
    for place, content in ((packed, stored), (plain, meant)):
        shutil.copytree(base, place)
        save_file(content, place / "model.safetensors", {"format": "pt"})
    file = packed / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"quantization_config": known.config}))
    return packed, plain


def _scales(weight: Tensor, style: Style) -> Tensor:
    """[blocks of rows, blocks of columns] of a weight."""
    rows, columns = _block(weight, style)
    blocks = [part.split(columns, 1) for part in weight.split(rows)]
    largest = torch.tensor([[block.abs().max().item() for block in row] for row in blocks])
    if style.scales == torch.float8_e8m0fnu:  # rounded up
        largest = (largest / 448).log2().ceil().exp2() * 448
    return (largest / 448).to(style.scales)


def _in_fp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two numbers in each byte, the scales of each 32 in a row, and the weight they stand for."""
    groups = weight.float().unflatten(1, (-1, 32))
    scales = (groups.abs().amax(-1) / 6).log2().ceil().exp2()
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat((positive, -positive))
    codes = (groups / scales[..., None] - table[:, None, None, None]).abs().argmin(0)
    meant = (table[codes] * scales[..., None]).flatten(1).to(weight.dtype)
    codes = codes.flatten(1).to(torch.uint8)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
    return packed, scales.to(torch.float8_e8m0fnu), meant


def _spread(scales: Tensor, weight: Tensor, style: Style) -> Tensor:
    """[rows, columns] of the scales of a weight."""
    rows, columns = _block(weight, style)
    each = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return each[: weight.size(0), : weight.size(1)]


def _block(weight: Tensor, style: Style) -> tuple[int, int]:
    if style.has_one:
        return weight.size(0), weight.size(1)
    return style.block or (1, weight.size(1))
