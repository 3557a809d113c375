"""config.json of the model in a GGUF file, from its header."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ftkit.errors import UserError
from ftkit.models.architectures.checks import require_plausible
from ftkit.models.pretrained.gguf.header import GgufHeader
from ftkit.utils.damaged_files import reading

ROPE_FACTORS = "rope_freqs.weight"
"""How Llama 3.1 stretches each frequency of its rotary embedding; settings in config.json."""

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_POSITIONS = 1.0, 4.0, 8192
"""Of every Llama 3 with rope_type llama3; files hold what they come to."""
_GEMMA2_27B_LAYERS = 46
"""Its attention is scaled by the width of the model, that of smaller ones by a head's."""


@dataclass(frozen=True)
class _Family:
    """An architecture of llama.cpp that a model_type of Hugging Face computes exactly."""

    model_type: str
    class_name: str
    activation: Mapping[str, str] = field(default_factory=lambda: {"hidden_act": "silu"})


_GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("llama", "LlamaForCausalLM"),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM"),
    "gemma": _Family("gemma", "GemmaForCausalLM", _GELU),
    "gemma2": _Family("gemma2", "Gemma2ForCausalLM", _GELU),
    "phi3": _Family("phi3", "Phi3ForCausalLM"),
}
"""By general.architecture."""


def settings_of(header: GgufHeader) -> dict[str, Any]:
    """The content of config.json.

    Raises:
        UserError: ftkit cannot run this model exactly, or the header contradicts itself.
    """
    expected = "sizes and settings of one model"
    with reading(f"checkpoint_dir {header.file}", expected, advice="Convert the file again."):
        settings = _settings_of(header)
        require_plausible(settings, f"checkpoint_dir {header.file}")
    return settings


def _settings_of(header: GgufHeader) -> dict[str, Any]:
    name = header.text("general.architecture")
    family = _FAMILIES.get(name or "")
    if name is None or family is None:
        raise UserError(
            f"checkpoint_dir {header.file} is of the architecture {name}. GGUF files are read for: "
            f"{', '.join(_FAMILIES)}. Give the original model."
        )
    if header.integer("split.count", 1) > 1:
        raise UserError(
            f"checkpoint_dir {header.file} is one of {header.integer('split.count')} parts of a "
            "model. Join them first: llama-gguf-split --merge FIRST_PART OUT.gguf."
        )
    if header.integer(f"{name}.expert_count", 0):
        raise UserError(
            f"checkpoint_dir {header.file} holds a mixture of experts, which ftkit does not read "
            "from GGUF. Give the original model."
        )
    settings: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        **family.activation,
        **_sizes(header, name),
        **_positions(header, name),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    kind = header.tensors["token_embd.weight"].kind
    settings["torch_dtype"] = {"F32": "float32", "BF16": "bfloat16"}.get(kind, "float16")
    settings["pad_token_id"] = None  # else transformers has one of its own for Phi-3
    for key, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (found := f"tokenizer.ggml.{theirs}_token_id") in header.metadata:
            settings[f"{key}_token_id"] = header.integer(found)
    if name == "llama":
        settings |= {
            "attention_bias": "blk.0.attn_output.bias" in header.tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        }
    if name == "gemma2":
        settings |= _gemma2(header, settings)
    if name == "phi3":
        settings |= _phi3(header, settings)
    return settings


def _sizes(header: GgufHeader, name: str) -> dict[str, Any]:
    width = _positive(header, f"{name}.embedding_length")
    heads = _positive(header, f"{name}.attention.head_count")
    layers = _positive(header, f"{name}.block_count")
    if layers > len(header.tensors):
        raise header.error(f"it has {layers:,} layers and {len(header.tensors):,} tensors")
    head_size = _positive(header, f"{name}.attention.key_length", width // heads)
    if head_size % 2 or header.integer(f"{name}.attention.value_length", head_size) != head_size:
        raise header.error(f"its keys of {head_size} numbers are odd, or not as long as its values")
    rotated = header.integer(f"{name}.rope.dimension_count", head_size)
    if rotated != head_size and name != "phi3":
        raise UserError(
            f"checkpoint_dir {header.file} rotates {rotated} of the {head_size} numbers of a key, "
            f"which ftkit knows in no {name}. Give the original model."
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise header.error("it has no token_embd.weight")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": _positive(header, f"{name}.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": header.integer(f"{name}.attention.head_count_kv", heads) or heads,
        "head_dim": head_size,
        "max_position_embeddings": _positive(header, f"{name}.context_length"),
        "rms_norm_eps": header.number(f"{name}.attention.layer_norm_rms_epsilon"),
    }


def _positions(header: GgufHeader, name: str) -> dict[str, Any]:
    """The rotary embedding."""
    base = header.number(f"{name}.rope.freq_base", 10000.0)
    factors = [tensor for tensor in header.tensors if tensor.startswith("rope_factors")]
    kind = header.text(f"{name}.rope.scaling.type") or "none"
    scaling: dict[str, Any] | None = None
    if factors or kind not in ("none", "linear"):
        raise UserError(
            f"checkpoint_dir {header.file} stretches its positions by "
            f"{factors[0] if factors else kind}, which ftkit does not read from GGUF. Give the "
            "original model."
        )
    if kind == "linear":
        scaling = {"rope_type": kind, "factor": header.number(f"{name}.rope.scaling.factor")}
    elif ROPE_FACTORS in header.tensors:
        scaling = _llama3(header, name, base)
    return {"rope_theta": base, "rope_scaling": scaling}


def _llama3(header: GgufHeader, name: str, base: float) -> dict[str, Any]:
    """Settings that come to exactly the factors in the file."""
    tensor = header.tensors[ROPE_FACTORS]
    if tensor.kind != "F32" or len(tensor.shape) != 1:
        raise header.error(f"its {ROPE_FACTORS} is no row of F32")
    found = np.fromfile(header.file, "<f4", tensor.shape[0], offset=tensor.start)
    factor = round(float(found.max()), 3)  # 8 or 32
    positions = header.integer(f"{name}.rope.scaling.original_context_length", _LLAMA3_POSITIONS)
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": positions,
    }
    expected = [
        _llama3_factor(base ** (-i / len(found)), factor, positions) for i in range(len(found))
    ]
    if not np.allclose(found, expected, rtol=1e-4):
        raise UserError(
            f"checkpoint_dir {header.file} stretches its positions otherwise than Llama 3 does. "
            "Give the original model."
        )
    return scaling


def _llama3_factor(frequency: float, factor: float, positions: int) -> float:
    """By how much Llama 3 divides a frequency of its rotary embedding."""
    wavelength = 2 * math.pi / frequency
    if wavelength < positions / _LLAMA3_HIGH:
        return 1.0
    if wavelength > positions / _LLAMA3_LOW:
        return factor
    smooth = (positions / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    return 1 / ((1 - smooth) / factor + smooth)


def _gemma2(header: GgufHeader, settings: Mapping[str, Any]) -> dict[str, Any]:
    by_width = settings["num_hidden_layers"] == _GEMMA2_27B_LAYERS
    per_head = settings["hidden_size"] // settings["num_attention_heads"]
    return {
        "query_pre_attn_scalar": per_head if by_width else settings["head_dim"],
        "sliding_window": header.integer("gemma2.attention.sliding_window", 4096),
        "attn_logit_softcapping": header.number("gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.number("gemma2.final_logit_softcapping", 30.0),
    }


def _phi3(header: GgufHeader, settings: Mapping[str, Any]) -> dict[str, Any]:
    rotated = header.integer("phi3.rope.dimension_count", settings["head_dim"])
    return {
        "sliding_window": header.integer("phi3.attention.sliding_window", 0) or None,
        "partial_rotary_factor": rotated / settings["head_dim"],
    }


def _positive(header: GgufHeader, key: str, default: int | None = None) -> int:
    value = header.integer(key, default)
    if value == 0:
        raise header.error(f"its {key} is 0")
    return value
