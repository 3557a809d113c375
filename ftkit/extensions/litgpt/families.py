"""Model families: conversion between Hugging Face's config.json and `litgpt.Config`."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from litgpt.config import Config, configs
from torch import nn

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import Fused, Naming
from ftkit.models.architectures.implementation import Settings


@dataclass(frozen=True)
class Family:
    """One model_type of Hugging Face."""

    model_type: str
    class_name: str
    naming: Naming
    settings: Callable[[Settings], dict[str, Any]]
    """config.json -> fields of `litgpt.Config` that differ from those of a plain Llama."""
    tied: bool = False
    """True if embedding and head are tied where config.json does not say."""

    @property
    def is_fused(self) -> bool:
        """True if transformers' model has layers as one that LitGPT's, as built here, has apart."""
        return bool(self.naming.fused)


@dataclass
class AttentionBiasConfig(Config):  # type: ignore[misc]
    """Configuration with biases on all four attention projections and none in the MLP.

    `litgpt.Config` has ``bias`` (everywhere) and ``attn_bias`` (all but the output projection);
    Llama's ``attention_bias`` is neither.
    """

    @property
    def mlp_class(self) -> Callable[[Config], nn.Module]:
        """Return the function that builds the MLP of this configuration."""
        return partial(_mlp_without_bias, super().mlp_class)


def litgpt_config(settings: Settings, name: str) -> Config:
    """Make the LitGPT configuration of a model that config.json describes.

    Sliding windows are not computed: positions are limited to the window, within which the model
    equals the original exactly.

    Args:
        settings: the content of config.json.
        name: of the model; chooses LitGPT's prompt style.

    Raises:
        UserError: ftkit cannot run this model exactly; names the setting.
        Exception: from LitGPT's code, for settings that do not fit each other.
    """
    family = family_of_settings(settings)
    if family is None:
        raise UserError(
            f"{name} is of model_type {settings.get('model_type')!r}, and LitGPT's code computes "
            f"Hugging Face directories of: {', '.join(FAMILIES)}. Try --model_implementation auto."
        )
    try:
        fields = _llama_settings(settings) | family.settings(settings)
        window = fields.pop("window")
        # Within the window, attention with and without it is the same.
        if window is not None:
            fields["block_size"] = min(fields["block_size"], window)
        build = AttentionBiasConfig if fields.pop("attention_bias_only") else Config
        return build(**_identity(name, family), **fields)
    except KeyError as error:
        raise UserError(f"config.json of {name} has no {error}. Download it again.") from error
    except _Unsupported as error:
        raise UserError(f"{name} cannot be run exactly: {error}. Choose another model.") from error


def within_window(config: Config) -> Config:
    """Limit the positions of a LitGPT configuration to its sliding window, as `litgpt_config` does.

    The fields of the window stay: the family depends on them, and written files have them.
    """
    if config.sliding_window_size is None:
        return config
    capped = copy.copy(config)
    capped.block_size = min(config.block_size, config.sliding_window_size)
    return capped


def window_of(config: Config, settings: Settings) -> int | None:
    """Sliding window to which the positions of a model are limited; None: there is no such limit.

    Args:
        config: from `litgpt_config` or `within_window`.
        settings: the content of config.json; empty if there is none.
    """
    window: int | None = config.sliding_window_size
    family = family_of_settings(settings)
    if family is not None:
        fields = _llama_settings(settings) | family.settings(settings)
        # One as long as the context limits nothing.
        window = fields["window"] if fields["window"] != fields["block_size"] else None
    return window if window == config.block_size else None


def family_of_settings(settings: Settings) -> Family | None:
    """Family that config.json names, if ftkit knows it."""
    model_type = settings.get("model_type")
    return FAMILIES.get(model_type) if isinstance(model_type, str) else None


def family_of_config(config: Config) -> Family | None:
    """Hugging Face family of a LitGPT configuration, if ftkit knows it."""
    # None of the families below has any of these.
    plain = not (config.latent_attention or config.n_expert or config.lm_head_bias)
    if not plain or config.norm_qk_type != "default" or not (config.norm_1 and config.norm_2):
        return None
    rms_norm = config.norm_class_name == "RMSNorm"
    if config.mlp_class_name == "GemmaMLP" and not config.norm_qk:
        return FAMILIES["gemma2" if config.post_mlp_norm else "gemma"]
    if config.mlp_class_name == "GptNeoxMLP" and config.norm_class_name == "LayerNorm":
        # Phi 1 and 2 share one norm, Falcon has no biases.
        is_neox = config.bias and not config.shared_attention_norm
        return FAMILIES["gpt_neox"] if is_neox else None
    if config.mlp_class_name != "LLaMAMLP" or not rms_norm or config.parallel_residual:
        return None
    # Only the name tells a Phi-3 from a Llama: LitGPT has the same fields for both.
    if config.name.lower().startswith(("phi-3", "phi-4")):
        return FAMILIES["phi3"]
    if config.norm_qk:
        return FAMILIES["qwen3"]
    if config.attn_bias:
        return FAMILIES["qwen2"]
    return FAMILIES["mistral" if config.sliding_window_size else "llama"]


def huggingface_settings(config: Config, family: Family) -> dict[str, Any] | None:
    """Make a config.json for a model without one; None: LitGPT's fields are not enough."""
    rope = config.rope_adjustments
    yarn = bool(rope) and "beta_fast" in rope
    # The other families have settings in config.json that do not follow from LitGPT's fields.
    if family.model_type not in ("llama", "mistral", "qwen2", "qwen3") or yarn:
        return None
    settings = shared_settings(config) | {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "hidden_act": "silu",
    }
    if family.model_type == "llama":
        settings |= {"attention_bias": config.bias, "mlp_bias": config.bias}
    if family.model_type == "mistral":
        settings["sliding_window"] = config.sliding_window_size
    if rope and "low_freq_factor" in rope:
        settings["rope_scaling"] = {
            "rope_type": "llama3",
            **{key: rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor")},
            "original_max_position_embeddings": rope["original_max_seq_len"],
        }
    elif rope or config.rope_condense_ratio != 1:
        # LitGPT has two fields for linear scaling, both of which divide positions; config.json has
        # one.
        factor = (rope or {}).get("factor", 1.0) * config.rope_condense_ratio
        settings["rope_scaling"] = {"rope_type": "linear", "factor": float(factor)}
    return settings


def shared_settings(config: Config) -> dict[str, Any]:
    """Settings that have the same keys in config.json for many families."""
    return {
        "vocab_size": config.padded_vocab_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_query_groups,
        "head_dim": config.head_size,
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": float(config.rope_base),
    }


class _Unsupported(Exception):
    """A setting with which LitGPT would compute something else."""


def _llama_settings(settings: Settings) -> dict[str, Any]:
    """Fields of `litgpt.Config` for a Llama, most of which are the same in every family."""
    attention_bias = bool(settings.get("attention_bias", False))
    mlp_bias = bool(settings.get("mlp_bias", False))
    # LitGPT has one switch for biases everywhere, and one for those of attention.
    if mlp_bias and not attention_bias:
        raise _Unsupported("mlp_bias is true and attention_bias is not")
    return {
        "block_size": settings["max_position_embeddings"],
        "window": None,
        "vocab_size": settings["vocab_size"],
        # Not padded, as LitGPT would do: the embedding in the files has exactly these rows.
        "padded_vocab_size": settings["vocab_size"],
        "n_layer": settings["num_hidden_layers"],
        "n_embd": settings["hidden_size"],
        "n_head": settings["num_attention_heads"],
        # As in LlamaConfig: missing or null, there are as many groups as heads.
        "n_query_groups": settings.get("num_key_value_heads") or settings["num_attention_heads"],
        "head_size": _head_size(settings, default=None),
        "intermediate_size": settings["intermediate_size"],
        "norm_class_name": "RMSNorm",
        "norm_eps": settings.get("rms_norm_eps", 1e-6),
        "parallel_residual": False,
        "bias": attention_bias,
        "attention_bias_only": attention_bias and not mlp_bias,
        "mlp_class_name": "LLaMAMLP",
        "rotary_percentage": 1.0,
        **_rope(settings),
    }


def _head_size(settings: Settings, default: int | None) -> int:
    """Size of a head: head_dim, or the default without that key; null: width divided by heads."""
    by_division: int = settings["hidden_size"] // settings["num_attention_heads"]
    return settings.get("head_dim", default) or by_division


def _rope(settings: Settings) -> dict[str, Any]:
    """Rotary embedding, from the keys of transformers 5 or earlier."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    # The key was `type` before it was `rope_type`.
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or settings.get("rope_theta")
    # GPT-NeoX's own key in older files.
    theta = theta or settings.get("rotary_emb_base") or 10000
    adjustments: dict[str, Any] | None = None
    if kind == "llama3":
        adjustments = {
            "factor": rope["factor"],
            "low_freq_factor": rope["low_freq_factor"],
            "high_freq_factor": rope["high_freq_factor"],
            "original_max_seq_len": rope["original_max_position_embeddings"],
        }
    elif kind == "linear":
        adjustments = {"factor": rope["factor"]}
    # A nested object has settings for each kind of layer, which is not supported here.
    elif kind != "default" or any(isinstance(value, Mapping) for value in rope.values()):
        raise _Unsupported(f"its rope_type is {kind!r}; default, linear and llama3 are known")
    return {
        # An int where possible, as in the configurations of LitGPT.
        "rope_base": int(theta) if float(theta).is_integer() else theta,
        "rope_adjustments": adjustments,
    }


def _partial_rotary(settings: Settings, default: float) -> float:
    rope = settings.get("rope_parameters") or {}
    old = settings.get("partial_rotary_factor") or settings.get("rotary_pct") or default
    return float(rope.get("partial_rotary_factor") or old)


def _silu(settings: Settings) -> dict[str, Any]:
    activation = settings.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise _Unsupported(f"its hidden_act is {activation!r}; silu is known")
    return {}


def _mistral(settings: Settings) -> dict[str, Any]:
    # A missing key means MistralConfig's default, null means no window.
    return {**_silu(settings), "window": settings.get("sliding_window", 4096)}


def _qwen_window(settings: Settings) -> int | None:
    if not settings.get("use_sliding_window", False):
        return None
    layers = settings["num_hidden_layers"]
    # Older files have no layer_types: Qwen2Config derives them as here, with the same defaults.
    kinds = settings.get("layer_types") or [
        "sliding_attention" if layer >= settings.get("max_window_layers", 28) else "full_attention"
        for layer in range(layers)
    ]
    return settings.get("sliding_window", 4096) if "sliding_attention" in kinds else None


def _qwen2(settings: Settings) -> dict[str, Any]:
    return {
        **_silu(settings),
        "window": _qwen_window(settings),
        "bias": False,
        "attn_bias": True,
        "attention_bias_only": False,
    }


def _qwen3(settings: Settings) -> dict[str, Any]:
    return {
        **_silu(settings),
        "window": _qwen_window(settings),
        "head_size": _head_size(settings, default=128),
        "norm_qk": True,
    }


def _gemma(settings: Settings) -> dict[str, Any]:
    # Gemma's first config.json says "gelu" and means its tanh approximation:
    # https://github.com/huggingface/transformers/pull/29402
    activation = settings.get("hidden_activation") or settings.get("hidden_act") or "gelu"
    if activation not in ("gelu", "gelu_pytorch_tanh"):
        raise _Unsupported(f"its activation is {activation!r}; gelu_pytorch_tanh is known")
    if settings.get("use_bidirectional_attention"):
        raise _Unsupported("its attention is bidirectional")
    return {
        "head_size": _head_size(settings, default=256),
        "mlp_class_name": "GemmaMLP",
        "gelu_approximate": "tanh",
        "scale_embeddings": True,
    }


def _gemma2(settings: Settings) -> dict[str, Any]:
    # Older files have no layer_types: in all of them every second layer is sliding.
    kinds = settings.get("layer_types") or ["sliding_attention"]
    window = settings.get("sliding_window", 4096) if "sliding_attention" in kinds else None
    return {
        **_gemma(settings),
        "window": window,
        # The defaults below are those of Gemma2Config.
        "post_attention_norm": True,
        "post_mlp_norm": True,
        "attention_scores_scalar": settings.get("query_pre_attn_scalar", 256),
        "attention_logit_softcapping": settings.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": settings.get("final_logit_softcapping", 30.0),
    }


def _phi3(settings: Settings) -> dict[str, Any]:
    return {
        **_silu(settings),
        "window": settings.get("sliding_window"),
        "norm_eps": settings.get("rms_norm_eps", 1e-5),
        "rotary_percentage": _partial_rotary(settings, default=1.0),
    }


# Activations of transformers, and the approximation of torch's GELU that computes the same.
_GELUS = {"gelu": "none", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}


def _gpt_neox(settings: Settings) -> dict[str, Any]:
    activation = settings.get("hidden_act", "gelu")
    if activation not in _GELUS:
        raise _Unsupported(f"its hidden_act is {activation!r}; {', '.join(_GELUS)} are known")
    if not settings.get("attention_bias", True):
        raise _Unsupported("its attention_bias is false")
    return {
        "norm_class_name": "LayerNorm",
        "norm_eps": settings.get("layer_norm_eps", 1e-5),
        "parallel_residual": settings.get("use_parallel_residual", True),
        "bias": True,
        "attention_bias_only": False,
        "mlp_class_name": "GptNeoxMLP",
        "gelu_approximate": _GELUS[activation],
        "rotary_percentage": _partial_rotary(settings, default=0.25),
    }


_QKV = tuple(f"transformer.h.{{}}.attn.qkv.{projection}_proj" for projection in "qkv")
# LitGPT's names of the gate and the up projection.
_GATE_UP = ("transformer.h.{}.mlp.fc_1", "transformer.h.{}.mlp.fc_2")

_LLAMA_MODULES = {
    "transformer.wte": "model.embed_tokens",
    "transformer.h.{}.norm_1": "model.layers.{}.input_layernorm",
    "transformer.h.{}.attn.qkv.q_proj": "model.layers.{}.self_attn.q_proj",
    "transformer.h.{}.attn.qkv.k_proj": "model.layers.{}.self_attn.k_proj",
    "transformer.h.{}.attn.qkv.v_proj": "model.layers.{}.self_attn.v_proj",
    "transformer.h.{}.attn.proj": "model.layers.{}.self_attn.o_proj",
    "transformer.h.{}.norm_2": "model.layers.{}.post_attention_layernorm",
    "transformer.h.{}.mlp.fc_1": "model.layers.{}.mlp.gate_proj",
    "transformer.h.{}.mlp.fc_2": "model.layers.{}.mlp.up_proj",
    "transformer.h.{}.mlp.proj": "model.layers.{}.mlp.down_proj",
    "transformer.ln_f": "model.norm",
    "lm_head": "lm_head",
}
_LLAMA_NAMES = Naming(_LLAMA_MODULES)

_QWEN3_NAMES = Naming(
    _LLAMA_MODULES
    | {
        "transformer.h.{}.attn.norm_q": "model.layers.{}.self_attn.q_norm",
        "transformer.h.{}.attn.norm_k": "model.layers.{}.self_attn.k_norm",
    }
)

_GEMMA2_NAMES = Naming(
    _LLAMA_MODULES
    | {
        # Gemma 2 has a norm after attention by the name that Llama uses for the one before the MLP.
        "transformer.h.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "transformer.h.{}.norm_2": "model.layers.{}.pre_feedforward_layernorm",
        "transformer.h.{}.post_mlp_norm": "model.layers.{}.post_feedforward_layernorm",
    }
)

_PHI3_NAMES = Naming(
    {ours: theirs for ours, theirs in _LLAMA_MODULES.items() if ours not in (*_QKV, *_GATE_UP)},
    {
        "model.layers.{}.self_attn.qkv_proj": Fused(_QKV),
        "model.layers.{}.mlp.gate_up_proj": Fused(_GATE_UP),
    },
)

_GPT_NEOX_NAMES = Naming(
    {
        "transformer.wte": "gpt_neox.embed_in",
        "transformer.h.{}.norm_1": "gpt_neox.layers.{}.input_layernorm",
        "transformer.h.{}.attn.proj": "gpt_neox.layers.{}.attention.dense",
        "transformer.h.{}.norm_2": "gpt_neox.layers.{}.post_attention_layernorm",
        "transformer.h.{}.mlp.fc": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "transformer.h.{}.mlp.proj": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
        "transformer.ln_f": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
    },
    {"gpt_neox.layers.{}.attention.query_key_value": Fused(_QKV, "heads")},
)

LITGPT_NAMES = Naming(
    {"transformer": "transformer", "lm_head": "lm_head"},
    {"transformer.h.{}.attn.qkv": Fused(_QKV)},
)
"""Parameters of a LitGPT checkpoint of any architecture."""

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", _LLAMA_NAMES, _silu),
        Family("mistral", "MistralForCausalLM", _LLAMA_NAMES, _mistral),
        Family("qwen2", "Qwen2ForCausalLM", _LLAMA_NAMES, _qwen2),
        Family("qwen3", "Qwen3ForCausalLM", _QWEN3_NAMES, _qwen3),
        Family("gemma", "GemmaForCausalLM", _LLAMA_NAMES, _gemma, tied=True),
        Family("gemma2", "Gemma2ForCausalLM", _GEMMA2_NAMES, _gemma2, tied=True),
        Family("phi3", "Phi3ForCausalLM", _PHI3_NAMES, _phi3),
        Family("gpt_neox", "GPTNeoXForCausalLM", _GPT_NEOX_NAMES, _gpt_neox),
    )
}


def _identity(name: str, family: Family) -> dict[str, Any]:
    """LitGPT's names of the model, on which prompt style and kind of norm depend."""
    # LitGPT's own spelling if it knows the model: prompt styles are chosen by it.
    known = next((c for c in configs if name == c["hf_config"]["name"]), None)
    # LitGPT gives LayerNorms no weight if the name contains "OLMo".
    lit_name = (known["name"] if known else name).replace("OLMo", "olmo")
    if family.settings not in (_gemma, _gemma2):
        # LitGPT adds one to the weights of norms if the name contains "Gemma".
        lit_name = lit_name.replace("Gemma", "gemma")
    elif "Gemma" not in lit_name:
        lit_name = f"Gemma {lit_name}"
    return {
        "name": lit_name,
        "hf_config": known["hf_config"] if known else {"org": "", "name": name},
    }


def _mlp_without_bias(build: Callable[[Config], nn.Module], config: Config) -> nn.Module:
    # The MLP alone gets a configuration without biases; attention keeps the original.
    return build(replace(config, bias=False))
