"""The number format of each tensor: what llama.cpp's converter and llama-quantize choose.

As in conversion/base.py and src/llama-quant.cpp of llama.cpp of July 2026 (llama-cpp-python
0.3.36). q4_k_m and q5_k_m are mixtures: the matrices that suffer most have six bits.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ftkit.extensions.gguf.header import BLOCKS
from ftkit.extensions.publish.commands import GgufNumbers

FILE_TYPES: Mapping[GgufNumbers, int] = {
    "f32": 0,
    "f16": 1,
    "q8_0": 7,
    "q4_k_m": 15,
    "q5_k_m": 17,
    "q6_k": 18,
    "bf16": 32,
}
"""general.file_type: of most tensors; llama.cpp's llama_ftype."""
MIXTURES: Mapping[GgufNumbers, str] = {"q4_k_m": "Q4_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K"}
"""Formats that differ between matrices, with that of most of them."""
_WITH_OTHER_WIDTHS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What holds rows that are no whole blocks of 256 numbers."""
_VALUES = re.compile(r"attn_(v|qkv|kv_b)\.weight")
_IN_FLOAT32 = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight", "sinks.weight")
"""Endings of the names of weights that are never packed."""
_WEIGHTS = (".weight", ".lora_a", ".lora_b")
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_WHOLE = ("per_layer_model_proj.weight",)
"""Matrices that llama-quantize leaves as they are."""
_LAYERS_OF_70B, _MIXTRAL_EXPERTS = 80, 8
"""Numbers by which llama.cpp recognises these models."""


def kinds_of(
    shapes: Mapping[str, tuple[int, ...]], numbers: GgufNumbers, settings: Mapping[str, Any]
) -> dict[str, str]:
    """Choose the format of each tensor.

    Args:
        shapes: as torch has them, by llama.cpp's names.
        numbers: requested number format.
        settings: of the model, from `complete_settings`.

    Returns:
        keys of `BLOCKS`, by name.
    """
    most = MIXTURES.get(numbers, numbers.upper())
    mixed = _mixture(shapes, settings, most) if numbers in MIXTURES else {}
    return {
        name: "F32" if _is_small(name, shape) else _fitting(mixed.get(name, most), shape[-1])
        for name, shape in shapes.items()
    }


def _is_small(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is never packed: vectors, norms, and what chooses experts."""
    return len(shape) < 2 or not name.endswith(_WEIGHTS) or name.endswith(_IN_FLOAT32)


def _fitting(kind: str, columns: int) -> str:
    """Return a format whose blocks divide rows; none of its blocks spans two of them."""
    if columns % BLOCKS[kind][1]:
        kind = _WITH_OTHER_WIDTHS.get(kind, kind)
    return "F16" if columns % BLOCKS[kind][1] else kind


def _mixture(
    shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any], most: str
) -> dict[str, str]:
    """Formats other than that of most matrices, by name (llama_tensor_get_type_impl)."""
    packed = [name for name, shape in shapes.items() if not _is_small(name, shape)]
    heads = ("output.weight",) if "output.weight" in shapes else _EMBEDDINGS
    found = dict.fromkeys(heads, "Q6_K") | dict.fromkeys(_WHOLE, "F16")
    values = sorted((name for name in packed if _VALUES.search(name)), key=_layer)
    experts = expert_count(settings)
    if most != "Q6_K":
        layers = settings["num_hidden_layers"]
        downs = sorted((name for name in packed if "ffn_down" in name), key=_layer)
        found |= {n: "Q6_K" for i, n in enumerate(values) if _is_sensitive(i, len(values))}
        for number, name in enumerate(downs):
            # With experts a layer may have several; else they are counted.
            if _is_sensitive(_layer(name) if experts > 1 else number, layers):
                found[name] = "Q6_K"
    if most == "Q4_K" and _is_70b(settings):
        # Eight heads share these matrices, so that they are small.
        found |= {name: "Q5_K" for name in values if name not in found}
    if experts == _MIXTRAL_EXPERTS:
        found |= dict.fromkeys([*values, *_ending(packed, "attn_k.weight")], "Q8_0")
        if most == "Q4_K":
            found |= dict.fromkeys(_ending(packed, "attn_output.weight"), "Q5_K")
    return found


def expert_count(settings: Mapping[str, Any]) -> int:
    """Number of experts in a layer; 0: the model has none."""
    return int(settings.get("num_local_experts") or settings.get("num_experts") or 0)


def _ending(names: Iterable[str], end: str) -> list[str]:
    return [name for name in names if name.endswith(end)]


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def _is_sensitive(layer: int, layers: int) -> bool:
    """Return whether a layer has more bits: the first and last eighth, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _is_70b(settings: Mapping[str, Any]) -> bool:
    """Return whether llama.cpp takes a model for one of 70 billion parameters, by its layers."""
    if settings["num_hidden_layers"] != _LAYERS_OF_70B:
        return False
    is_grouped = settings["num_attention_heads"] != settings["num_key_value_heads"]
    return settings["model_type"] == "qwen2" or (
        settings["model_type"] in ("llama", "mistral") and is_grouped
    )
