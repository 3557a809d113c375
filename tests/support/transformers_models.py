"""Models of many families, made tiny with transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from tiny import make_tokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 400
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_SLIDING = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT_BY_LAYER = _LATENT | {"mlp_layer_types": ["dense", "sparse"]}
del _LATENT_BY_LAYER["first_k_dense_replace"]
# With fewer heads several scores are exactly zero, and which of them topk takes depends on the
# length of the batch.
_INDEXED = _LATENT | {
    "q_lora_rank": 16,
    "index_head_dim": 8,
    "index_n_heads": 16,
    "index_topk": 4,
}
_FEW_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "mistral window": {"sliding_window": 6},
    "ministral": {"sliding_window": 6, "head_dim": 8, "layer_types": _SLIDING},
    "qwen2 window": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6, "layer_types": _SLIDING},
    "phi": {},
    "phi3": {},
    "phi3 window": {"sliding_window": 6},
    "gpt_neox": {},
    "gpt2": _GPT2,
    "gptj": _GPT2 | {"rotary_dim": 4},
    "gpt_bigcode": _GPT2,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 6, "layer_types": _SLIDING},
    "olmoe": _EXPERTS,
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 3.0},
    "stablelm": {},
    "starcoder2": {"sliding_window": 6},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 6, "layer_types": _SLIDING},
    "nemotron": {},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "exaone4": {"sliding_window": 6, "layer_types": _SLIDING},
    "seed_oss": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "arcee": {},
    "apertus": {},
    "hunyuan_v1_dense": {"head_dim": 8},
    "persimmon": {"num_key_value_heads": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 24},
    "qwen3_moe": _EXPERTS | {"head_dim": 8},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": _SLIDING,
    },
}
"""Settings of each, by model_type and what is special about it."""
NEWEST: dict[str, dict[str, Any]] = {
    "afmoe": _EXPERTS
    | {"head_dim": 8, "num_dense_layers": 1, "sliding_window": 6, "layer_types": _SLIDING},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mamba"],
        "num_hidden_layers": 4,
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
    },
    "recurrent_gemma": {
        "head_dim": 8,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "lru_width": 32,
        "attention_window_size": 6,
    },
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {
            "ffn_hidden_size": 24,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "hidden_size": 32,
        },
    },
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 6,
        "layer_types": _SLIDING,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4_text inputs": {  # as its small models: inputs for each layer, shared keys and values
        "num_hidden_layers": 4,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 6,
        "layer_types": [*_SLIDING, *_SLIDING],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gemma4_text experts": {
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 6,
        "layer_types": _SLIDING,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": [*_SLIDING, *_SLIDING],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "laurel_rank": 4,
    },
    "deepseek_v32": _INDEXED | {"head_dim": 8},
    "deepseek_v4": {
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "num_key_value_heads": 1,
        "q_lora_rank": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "hc_mult": 2,
        "sliding_window": 8,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 16,  # scores of few heads are often exactly 0: ties
        "index_head_dim": 16,
        "index_topk": 4,
        "num_nextn_predict_layers": 0,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 8,
        },
        "mlp_layer_types": ["hash_moe", "moe"],
    },
    "glm4_moe": _LATENT | {"head_dim": 8, "num_key_value_heads": 2},
    "glm4_moe_lite": _LATENT_BY_LAYER | {"q_lora_rank": 16},
    "kimi_linear": _LATENT_BY_LAYER
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_local_experts": 4,
    },
    "minimax_m2": _FEW_EXPERTS | {"head_dim": 8, "rotary_dim": 4},
    "minimax_m3_vl_text": _FEW_EXPERTS
    | {
        "head_dim": 8,
        "rotary_dim": 4,
        "mlp_layer_types": ["dense", "sparse"],
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 24,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
}
"""Those that earlier versions of transformers lack, or compute in another way."""
if Version(transformers.__version__) < Version("5.24"):
    NEWEST.clear()

_STATES = {"mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_heads": 8, "mamba_d_head": 8}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
}
_GRANITE = {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}
_INKLING = {
    "head_dim": 8,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "sliding_window_size": 6,
    "d_rel": 4,
    "rel_extent": 8,
    "log_scaling_n_floor": 4,
    "conv_kernel_size": 3,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": VOCABULARY + 8,  # the embedding has more rows than the head
    "unpadded_vocab_size": VOCABULARY,
}
MORE_MODELS: dict[str, dict[str, Any]] = {
    "apertus1p5_text": {},
    "apertus1p5_text head": {"output_vocab_size": 399},  # fewer rows than the embedding
    "axk1": _LATENT_BY_LAYER | {"q_lora_rank": 16},
    "axk2": _INDEXED | {"gated_norm_rank": 4},
    "bailing_hybrid": _LATENT_BY_LAYER
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 8,
        "num_local_experts": 4,
        "num_mtp_layers": 0,
    },
    "beam": _EXPERTS
    | {
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": _SLIDING,
        "mlp_layer_types": ["dense", "sparse"],
        "n_group": 2,
        "topk_group": 1,
    },
    "bitnet": {},
    "cohere2_moe": _EXPERTS
    | {
        "head_dim": 8,
        "logit_scale": 0.25,
        "sliding_window": 6,
        "layer_types": _SLIDING,
        "mlp_layer_types": ["dense", "sparse"],
        "prefix_dense_intermediate_size": 48,
        "num_shared_experts": 1,
    },
    "cohere_compass_text": {
        "logit_scale": 0.25,
        "sliding_window": 6,
        "layer_types": _SLIDING,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [2, 1, 1],
            },
            "full_attention": None,
        },
    },
    "ctrl": _GPT2 | {"dff": 48},
    "cwm": {"head_dim": 8, "sliding_window": 6, "layer_types": _SLIDING},
    "dots3_note_text": _INDEXED
    | {
        "head_dim": 16,
        "shared_experts_intermediate_size": 24,
        "layer_types": ["sliding_attention", "indexed_attention"],
        "sliding_window": 6,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 24,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 12,
        "swa_v_head_dim": 12,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 24,
    },
    "exaone": {},
    "exaone_moe": _EXPERTS | {"head_dim": 8, "sliding_window": 6, "layer_types": _SLIDING},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "flint": _EXPERTS
    | {
        "head_dim": 8,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [0],
        "sliding_window": 6,
        "layer_types": _SLIDING,
    },
    "granitemoeshared": _FEW_EXPERTS | {"shared_intermediate_size": 24},
    "granitemoehybrid": _STATES
    | _FEW_EXPERTS
    | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 24, "mamba_n_groups": 1},
    "jetmoe": _FEW_EXPERTS | {"kv_channels": 8},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "bamba": _STATES | {"attn_layer_indices": [1], "mamba_n_groups": 1},
    "falcon_h1": _STATES
    | {"mamba_d_ssm": 64, "mamba_n_groups": 1, "head_dim": 8, "lm_head_multiplier": 0.5},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "qwen3_next": _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 24},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 24},
    "olmo_hybrid": _LINEAR | {"linear_num_key_heads": 4, "head_dim": 8},
    "llama4_text": {
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 6,
    },
    "glm_moe_dsa": _INDEXED,
    "dots1": {**_LATENT, "head_dim": 8},
    "doge": {"keep_window_size": 256},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    "biogpt": {},
    "openai-gpt": _GPT2,
    "codegen": _GPT2 | {"rotary_dim": 4},
    "diffllama": {},
    "phimoe": _FEW_EXPERTS,
    "hy_v4": _LATENT_BY_LAYER
    | {
        "num_hidden_layers": 3,
        "q_lora_rank": 16,
        "index_head_dim": 8,
        "index_n_heads": 16,
        "index_topk": 4,
        "indexer_types": ["full", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "hc_mult": 2,
    },
    "inkling_text": _INKLING | {"mlp_layer_types": ["dense", "sparse"], "n_shared_experts": 2},
    "inkling2_text": _INKLING
    | {
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid"],
        "n_layers_per_attn_res_block": 2,
        "route_scale": 2.0,
    },
    "inkling2_loop_text": _INKLING
    | {
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 3,
        "loop_gate_rank": 4,
    },
    "minimax": _FEW_EXPERTS
    | {"layer_types": ["full_attention", "linear_attention"], "block_size": 4},
    "laguna": _EXPERTS
    | {
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": _SLIDING,
        "num_attention_heads_per_layer": [4, 2],
        "shared_expert_intermediate_size": 24,
    },
    "mimo_v2_flash": _EXPERTS
    | {
        "n_routed_experts": 4,
        "head_dim": 12,
        "v_head_dim": 8,
        "sliding_window": 6,
        "layer_types": _SLIDING,
    },
    "zaya": {
        "head_dim": 8,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "router_hidden_size": 16,
        "sliding_window": 6,
        "layer_types": ["hybrid_sliding", "hybrid"],
    },
    "lfm3": {
        "num_hidden_layers": 3,
        "head_dim": 8,
        "sliding_window": 6,
        "conv_L_cache": 3,
        "layer_types": ["conv", *_SLIDING],
    },
    "jais2": {},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 6,
    },
    "gpt_neox_japanese": {},
    "granite_swa": _GRANITE | {"sliding_window": 6, "layer_types": _SLIDING},
    "granitemoe_swa": _GRANITE
    | _FEW_EXPERTS
    | {"shared_intermediate_size": 24, "sliding_window": 6, "layer_types": _SLIDING},
    "hy_v3": _EXPERTS | {"head_dim": 8, "mlp_layer_types": ["dense", "sparse"]},
    "hyperclovax": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "internlm3": {"head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "iquestcoder": {"head_dim": 8},
    "kolibri1": _EXPERTS
    | {
        "head_dim": 8,
        "shared_expert_intermediate_size": 24,
        "sliding_window": 6,
        "layer_types": _SLIDING,
    },
    "lara_mini": _LINEAR
    | _EXPERTS
    | {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", *_SLIDING],
        "shared_expert_intermediate_size": 24,
        "sliding_window": 6,
    },
    "mellum": _EXPERTS
    | {
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": _SLIDING,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "minicpm3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "num_key_value_heads": 4,
        "dim_model_base": 16,
        "scale_emb": 2,
    },
    "ministral3": {"head_dim": 8, "sliding_window": 6},
    "nanochat": {},
    "sarvam_mla": _LATENT,
    "sarvam_moe": _LATENT | {"head_dim": 8, "num_key_value_heads": 2},
    "solar_open": _LATENT | {"head_dim": 8, "num_key_value_heads": 2},
    "vaultgemma": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 6,
        "layer_types": _SLIDING,
    },
    "youtu": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gemma4_unified_text": {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 6,
        "layer_types": [*_SLIDING, *_SLIDING],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
}
"""Those that are seldom trained, or computed slowly."""
for _later in [model for model in MORE_MODELS if model.split()[0] not in CONFIG_MAPPING]:
    del MORE_MODELS[_later]  # of a later version of transformers

PLANNED: dict[str, dict[str, Any]] = {
    "glm4_moe": {**_LATENT, "head_dim": 8, "num_key_value_heads": 2},
    "glm4_moe_lite": _LATENT | {"q_lora_rank": 16, "mlp_layer_types": ["dense", "sparse"]},
    "kimi_linear": {
        **_LATENT,
        "num_experts": 4,
        "num_shared_experts": 1,
        "num_experts_per_token": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
}
"""Those that plans of published configurations need, and no test."""


def model_type(model: str) -> str:
    """Model type of a key of MODELS, NEWEST, MORE_MODELS or PLANNED."""
    return model.split()[0]


def settings_of(model: str) -> dict[str, Any]:
    """All settings of a key of MODELS, NEWEST, MORE_MODELS or PLANNED."""
    return SIZES | (MODELS | NEWEST | MORE_MODELS | PLANNED)[model]


def make_transformers_model(directory: Path, model: str, **changes: Any) -> Path:
    """A random model in Hugging Face's layout."""
    config = transformers.AutoConfig.for_model(model_type(model), **settings_of(model) | changes)
    return save_random(directory, transformers.AutoModelForCausalLM, config)


def save_random(directory: Path, kind: Any, config: transformers.PretrainedConfig) -> Path:
    """Save a model of one of transformers' Auto classes; weights are large enough to tell apart."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = kind.from_config(config)
        with torch.no_grad():
            for parameter in made.parameters():
                noise = torch.randn_like(parameter) * 0.1
                parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
            for name, buffer in made.named_buffers():
                if name.endswith("tid2eid"):  # two experts for each token
                    rows, columns = (torch.arange(size) for size in buffer.shape)
                    buffer.copy_((rows[:, None] + columns) % 4)
    directory.mkdir(parents=True, exist_ok=True)
    made.save_pretrained(directory)
    make_tokenizer(directory)
    return directory


def transformers_model(directory: Path) -> transformers.PreTrainedModel:
    """The model of a directory, loaded by transformers; its attention step by step."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager"
    ).eval()


def make_in_mxfp4(directory: Path, **changes: Any) -> Path:
    """A gpt-oss whose experts are random floats of 4 bits, as its files have them."""
    pytest.importorskip("ftkit.extensions.packed_weights")
    sizes = {"intermediate_size": 64} | changes
    make_transformers_model(directory, "gpt_oss", **sizes)
    file = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(5)

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(torch.uint8)

    stored = {}
    for name, tensor in load_file(file).items():
        if tensor.ndim == 3:
            experts, columns, rows = tensor.shape
            groups = (experts, rows, columns // 32)
            stored[f"{name}_blocks"] = drawn(0, 256, *groups, 16)
            stored[f"{name}_scales"] = drawn(119, 124, *groups)
        else:
            stored[name] = tensor
    save_file(stored, file, {"format": "pt"})
    config = directory / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"quantization_config": {"quant_method": "mxfp4"}}))
    return directory
