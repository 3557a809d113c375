"""GgufMetadata of a GGUF file: what llama.cpp has to know of a model, from its config.json.

Keys and their meaning: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; which of them a
family has, and what of it llama.cpp computes otherwise, as in llama.cpp of July 2026 (the source
package of llama-cpp-python 0.3.36).
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ftkit.errors import UserError

GgufMetadata = dict[str, Any]
"""Whole numbers, floats, booleans, texts, and lists of one kind, by GGUF's keys."""

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "phi3": "phi3",
}
"""What llama.cpp calls the families that are written, by model_type."""
_GEMMA2_27B_LAYERS = 46
"""By which llama.cpp tells it: its attention is scaled by the width of the model."""
_DEFAULT_THETA = 10000.0


def complete_settings(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings of a model that GGUF files are written of, with what they leave to defaults.

    Args:
        settings: the content of config.json.
        name: of the model, for messages.

    Raises:
        UserError: the family is not written, or llama.cpp would compute another model.
    """
    family = settings.get("model_type")
    if family not in ARCHITECTURES:
        raise UserError(
            f"{name} is of the family {family}, but GGUF files are written of "
            f"{', '.join(ARCHITECTURES)}. Try --format hf, and llama.cpp's own "
            "convert_hf_to_gguf.py."
        )
    from transformers import AutoConfig

    plain = {key: value for key, value in settings.items() if key != "auto_map"}
    found: dict[str, Any] = AutoConfig.for_model(**plain).to_dict()
    found["head_dim"] = (
        found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
    )
    found["num_key_value_heads"] = found.get("num_key_value_heads") or found["num_attention_heads"]
    for reason in _obstacles(found):
        raise UserError(f"{name} {reason}, which llama.cpp does not compute. Try another --format.")
    return found


def _obstacles(settings: Mapping[str, Any]) -> list[str]:
    """What of a model llama.cpp would compute otherwise."""
    family, rope = settings["model_type"], settings["rope_parameters"]
    kind = rope.get("rope_type", "default")
    known = {"llama": ("linear", "llama3"), "mistral": ("linear", "llama3"), "phi3": ("longrope",)}
    activation = settings.get("hidden_activation") or settings["hidden_act"]
    expected = "gelu_pytorch_tanh" if family == "gemma2" else "silu"
    found = []
    if activation != expected:
        found.append(f"has the activation {activation}")
    if kind not in ("default", *known.get(family, ("linear",))):
        found.append(f"stretches its positions by {kind}")
    if settings.get("use_sliding_window"):
        found.append("has a sliding window (use_sliding_window)")
    if family in ("qwen3", "gemma2") and settings.get("attention_bias"):
        found.append("has biases in its attention")
    if family == "gemma2":
        found += _obstacles_of_gemma2(settings)
    if family != "phi3" and rope.get("partial_rotary_factor", 1.0) != 1.0:
        found.append("rotates a part of each key (partial_rotary_factor)")
    return found


def _obstacles_of_gemma2(settings: Mapping[str, Any]) -> list[str]:
    by_width = settings["num_hidden_layers"] == _GEMMA2_27B_LAYERS
    per_head = settings["hidden_size"] // settings["num_attention_heads"]
    scalar = per_head if by_width else settings["head_dim"]
    found = []
    if settings["query_pre_attn_scalar"] != scalar:
        found.append(f"has query_pre_attn_scalar {settings['query_pre_attn_scalar']}, not {scalar}")
    if not settings.get("attn_logit_softcapping") or not settings.get("final_logit_softcapping"):
        found.append("has no soft caps")
    if not settings["tie_word_embeddings"]:
        found.append("has a head apart from its embedding")
    return found


def model_metadata(settings: Mapping[str, Any]) -> GgufMetadata:
    """What llama.cpp has to know of a model, by its keys.

    Args:
        settings: from `complete_settings`.
    """
    family, rope = settings["model_type"], settings["rope_parameters"]
    of_layers: GgufMetadata = {
        "block_count": settings["num_hidden_layers"],
        "context_length": settings["max_position_embeddings"],
        "embedding_length": settings["hidden_size"],
        "feed_forward_length": settings["intermediate_size"],
        "attention.head_count": settings["num_attention_heads"],
        "attention.head_count_kv": settings["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(settings["rms_norm_eps"]),
    }
    theta = float(rope.get("rope_theta") or _DEFAULT_THETA)
    if family != "gemma2" or theta != _DEFAULT_THETA:
        of_layers["rope.freq_base"] = theta
    width_of_heads = settings["hidden_size"] // settings["num_attention_heads"]
    if family not in ("phi3", "qwen2") or settings["head_dim"] != width_of_heads:
        of_layers["attention.key_length"] = settings["head_dim"]
        of_layers["attention.value_length"] = settings["head_dim"]
    if rope.get("rope_type") == "linear":
        of_layers["rope.scaling.type"] = "linear"
        of_layers["rope.scaling.factor"] = float(rope["factor"])
    if family in ("llama", "mistral"):
        of_layers["vocab_size"] = settings["vocab_size"]
        of_layers["rope.dimension_count"] = settings["head_dim"]
    if family == "gemma2":
        of_layers |= {
            "attn_logit_softcapping": float(settings["attn_logit_softcapping"]),
            "final_logit_softcapping": float(settings["final_logit_softcapping"]),
            "attention.sliding_window": settings["sliding_window"],
        }
    if family == "phi3":
        of_layers |= _of_phi3(settings)
    architecture = ARCHITECTURES[family]
    return {f"{architecture}.{key}": value for key, value in of_layers.items()}


def _of_phi3(settings: Mapping[str, Any]) -> GgufMetadata:
    rope = settings["rope_parameters"]
    longest = settings["max_position_embeddings"]
    first = _first_length(settings)
    found: GgufMetadata = {
        "rope.scaling.original_context_length": first,
        "rope.dimension_count": int(settings["head_dim"] * rope.get("partial_rotary_factor", 1.0)),
        # Zero and not none, by which llama.cpp knows a Phi-4.
        "attention.sliding_window": settings.get("sliding_window") or 0,
    }
    if rope.get("rope_type") == "longrope":
        scale = longest / first
        factor = math.sqrt(1 + math.log(scale) / math.log(first)) if scale > 1 else 1.0
        found["rope.scaling.attn_factor"] = factor
    return found


def _first_length(settings: Mapping[str, Any]) -> int:
    """Positions that a Phi-3 was made for before they were stretched."""
    rope = settings["rope_parameters"]
    found = rope.get("original_max_position_embeddings") or settings.get(
        "original_max_position_embeddings"
    )
    return int(found or settings["max_position_embeddings"])


def rotary_factors(settings: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Tensors that stretch each frequency of the rotary embedding, by llama.cpp's names.

    Args:
        settings: from `complete_settings`.
    """
    rope = settings["rope_parameters"]
    kind = rope.get("rope_type", "default")
    if kind == "longrope":
        return {
            f"rope_factors_{name}.weight": np.asarray(rope[f"{name}_factor"], np.float32)
            for name in ("long", "short")
        }
    if kind != "llama3":
        return {}
    size = settings["head_dim"]
    frequencies = float(rope["rope_theta"]) ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    positions = rope["original_max_position_embeddings"]
    lengths = 2 * math.pi / frequencies
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (positions / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = np.where(lengths > positions / low, rope["factor"], between)
    factors = np.where(lengths < positions / high, 1.0, factors)
    return {"rope_freqs.weight": factors.astype(np.float32)}
