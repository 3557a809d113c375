"""Models that see, made tiny with transformers: a language model, and what lies beside it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers_models import MORE_MODELS, NEWEST, SIZES, model_type, save_random

_TEXT = SIZES | {"head_dim": 8}
_SLIDING = ["sliding_attention", "full_attention"]
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_CLIP = _VISION | {"model_type": "clip_vision_model"}
_SIGLIP = _VISION | {"model_type": "siglip_vision_model"}
_PIXTRAL = _VISION | {"model_type": "pixtral", "head_dim": 8}
_QWEN2 = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 8}
_QWEN3 = _VISION | {
    "depth": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
_AXES = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [1, 0, 1],
        "partial_rotary_factor": 0.5,
    },
}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_MISTRAL4 = _TEXT | _LATENT | {"model_type": "mistral4", "first_k_dense_replace": 1, "head_dim": 16}
_IMAGE = {"image_token_id": 399}
_SIGNS = _IMAGE | {
    "video_token_id": 398,
    "vision_start_token_id": 397,
    "vision_end_token_id": 396,
}


def _made_of(text: str, vision: dict[str, Any], **others: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"model_type": text}
    return {"text_config": _TEXT | settings, "vision_config": vision} | _IMAGE | others


MODELS: dict[str, dict[str, Any]] = {
    "dots3_note": {
        "text_config": SIZES | MORE_MODELS.get("dots3_note_text", {}),
        "vision_config": _VISION
        | {
            "mlp_layer_types": ["dense", "sparse"],
            "moe_intermediate_size": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "adapter_in_dim": 16,
            "adapter_out_dim": 32,
        },
        "audio_config": {
            "whisper_config": {
                "d_model": 16,
                "encoder_attention_heads": 2,
                "encoder_layers": 2,
                "encoder_ffn_dim": 24,
                "num_mel_bins": 16,
                "max_source_positions": 64,
            },
            "downsample_hidden_size": 8,
            "adapter_input_size": 16,
            "adapter_out_dim": 32,
        },
        "image_token_id": 399,
        "video_token_id": 398,
        "audio_token_id": 397,
    },
    "gemma3": {
        "text_config": _TEXT | {"sliding_window": 6, "layer_types": _SLIDING},
        "vision_config": _SIGLIP,
        "mm_tokens_per_image": 4,
        "image_token_index": 399,
    },
    "llama4": {
        "text_config": _TEXT
        | {
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 6,
            "no_rope_layers": [1, 0],
            "interleave_moe_layer_step": 2,
        },
        "vision_config": _VISION
        | {
            "intermediate_size": 64,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        "image_token_index": 399,
    },
    "qwen2_vl": {"text_config": _TEXT | _AXES, "vision_config": _QWEN2} | _SIGNS,
    "qwen2_5_vl": {
        "text_config": _TEXT | _AXES,
        "vision_config": _VISION
        | {"depth": 2, "out_hidden_size": 32, "fullatt_block_indexes": [1]},
    }
    | _SIGNS,
    "qwen3_vl": {
        "text_config": _TEXT | _AXES | {"tie_word_embeddings": True},
        "vision_config": _QWEN3,
        "tie_word_embeddings": True,
    }
    | _SIGNS,
    "qwen3_vl_moe": {
        "text_config": _TEXT | _AXES | _EXPERTS,
        "vision_config": _QWEN3,
    }
    | _SIGNS,
    "qwen3_5": {
        "text_config": _TEXT | _LINEAR,
        "vision_config": _QWEN3 | {"deepstack_visual_indexes": []},
    }
    | _SIGNS,
    "qwen3_5_moe": {
        "text_config": _TEXT
        | _LINEAR
        | _EXPERTS
        | {"shared_expert_intermediate_size": 24, "head_dim": 16},
        "vision_config": _QWEN3 | {"deepstack_visual_indexes": []},
    }
    | _SIGNS,
    "mistral3": _made_of("mistral", _PIXTRAL, tie_word_embeddings=False),
    "llava": _made_of("llama", _CLIP),
    "llava_next": _made_of("mistral", _CLIP, image_grid_pinpoints=[[16, 16]]),
    "llava_onevision": _made_of("qwen2", _SIGLIP, image_grid_pinpoints=[[16, 16]]),
    "internvl": _made_of("qwen2", _VISION | {"image_size": [16, 16], "patch_size": [8, 8]}),
    "idefics3": _made_of("llama", _VISION),
    "smolvlm": _made_of("llama", _VISION),
    "got_ocr2": _made_of(
        "qwen2",
        _VISION
        | {"image_size": 64, "output_channels": 8, "mlp_dim": 24, "global_attn_indexes": [1]},
    ),
    "aya_vision": _made_of("cohere2", _SIGLIP),
    "glm4v": {"text_config": _TEXT | _AXES, "vision_config": _QWEN3} | _SIGNS,
    "gemma4": {
        "text_config": _TEXT
        | {
            "num_hidden_layers": 4,
            "global_head_dim": 16,
            "sliding_window": 6,
            "layer_types": [*_SLIDING, *_SLIDING],
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 400,
            "pad_token_id": 0,
        },
        "vision_config": _VISION | {"head_dim": 8, "num_key_value_heads": 2},
        "audio_config": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [8, 4],
            "output_proj_dims": 16,
        },
        "image_token_id": 399,
        "video_token_id": 398,
        "audio_token_id": 397,
    },
    "gemma4_unified": {
        "text_config": _TEXT
        | {
            "global_head_dim": 16,
            "sliding_window": 6,
            "layer_types": _SLIDING,
            "use_bidirectional_attention": "vision",
            "pad_token_id": 0,
        },
        "vision_config": {
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "model_patch_size": 8,
            "mm_embed_dim": 16,
            "mm_posemb_size": 8,
            "output_proj_dims": 32,
        },
        "audio_config": {"audio_embed_dim": 16},
        "image_token_id": 399,
        "video_token_id": 398,
        "audio_token_id": 397,
    },
    "gemma3n": {
        "text_config": SIZES | NEWEST.get("gemma3n_text", {}),
        "vision_config": {
            "architecture": "test_efficientnet",
            "hidden_size": 16,
            "vocab_offset": 392,
            "vocab_size": 4,
        },
        "audio_config": {
            "hidden_size": 16,
            "input_feat_size": 16,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 2,
            "sscp_conv_channel_size": [8, 4],
            "vocab_offset": 396,
            "vocab_size": 4,
        },
        "image_token_id": 395,
        "audio_token_id": 399,
    },
    "mllama": {
        "text_config": _TEXT | {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
        "vision_config": _VISION
        | {
            "num_channels": 3,
            "num_global_layers": 1,
            "attention_heads": 2,
            "max_num_tiles": 1,
            "vision_output_dim": 32,
            "intermediate_layers_indices": [0],
            "supported_aspect_ratios": [[1, 1]],
        },
        "image_token_index": 400,
    },
    "mistral3 of mistral4": {
        "text_config": _MISTRAL4,
        "vision_config": _PIXTRAL,
        "tie_word_embeddings": False,
    }
    | _IMAGE,
    # Its text model alone, which transformers 5.24 lists among those that see.
    "mistral4": _MISTRAL4,
    "kimi_k25": {
        "text_config": _TEXT
        | _LATENT
        | {"model_type": "deepseek_v3", "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        "vision_config": _VISION | {"pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2},
        "projection_hidden_size": 16,
        "tie_word_embeddings": False,
    }
    | _SIGNS,
    "minimax_m3_vl": {
        "text_config": SIZES
        | NEWEST.get("minimax_m3_vl_text", {})
        | {"layer_types": ["full_attention", "minimax_m3_sparse"]},
        "vision_config": _VISION,
        "projector_hidden_size": 16,
        "image_token_index": 399,
        "video_token_index": 398,
    },
    "emu3": {
        "text_config": SIZES | {"pad_token_id": 2},
        "vq_config": {
            "codebook_size": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "attn_resolutions": [1],
            "hidden_size": 32,
            "temporal_downsample_factor": 2,
        },
        "vocabulary_map": {"<image>": 399}
        | {f"<|visual token {i:06d}|>": 380 + i for i in range(8)},
    },
    "fuyu": {
        "text_config": SIZES | {"model_type": "persimmon", "num_key_value_heads": 4},
        "image_size": 16,
        "patch_size": 8,
    }
    | _IMAGE,
    "phi4_multimodal": SIZES
    | {
        "pad_token_id": 0,
        "vision_config": _VISION | {"crop_size": 16, "image_token_id": 399},
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_blocks": 2,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 8,
            "input_size": 16,
            "bias_max_distance": 8,
            "audio_token_id": 398,
        },
    },
    "lfm2_vl": {
        "text_config": _TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        "vision_config": _VISION | {"model_type": "siglip2_vision_model", "num_patches": 4},
        "projector_hidden_size": 16,
    }
    | _IMAGE,
}
"""Settings of each, by model_type and that of its text."""
SELDOM: dict[str, dict[str, Any]] = {
    "cohere2_vision": _made_of("cohere2", _SIGLIP, alignment_intermediate_size=24),
    "vipllava": _made_of("llama", _CLIP, vision_feature_layers=[-1], image_token_index=399),
    "deepseek_vl": _made_of("llama", _SIGLIP),
    "idefics2": _made_of(
        "mistral",
        _VISION,
        perceiver_config={
            "hidden_size": 32,
            "resampler_n_latents": 2,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 8,
            "num_key_value_heads": 1,
        },
    ),
    "aria": {
        "text_config": _TEXT
        | {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2}
        | {"moe_num_shared_experts": 1},
        "vision_config": _VISION | {"model_type": "idefics3_vision"},
        "projector_patch_to_query_dict": {"4": 2},
        "image_token_index": 399,
    },
    "llava_next_video": _made_of(
        "llama",
        _CLIP,
        image_grid_pinpoints=[[16, 16]],
        image_token_index=399,
        video_token_index=398,
    ),
    "video_llava": _made_of("llama", _CLIP, image_token_index=399, video_token_index=398),
    "glm4v_moe": {
        "text_config": _TEXT
        | {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [1, 1, 0],
                "partial_rotary_factor": 0.5,
            },
        },
        "vision_config": _QWEN3,
    }
    | _SIGNS,
    "exaone4_5": {
        "text_config": _TEXT
        | {"model_type": "exaone4", "sliding_window": 6, "layer_types": _SLIDING},
        "vision_config": _VISION
        | {
            "depth": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
            "num_key_value_heads": 1,
        },
    }
    | _SIGNS,
    "lighton_ocr": _made_of("qwen3", _PIXTRAL),
    "video_llama_3": {
        "text_config": _TEXT | {"model_type": "qwen2"},
        "vision_config": _VISION,
    }
    | _SIGNS,
}
"""Those that are seldom trained."""
for model, settings in list((MODELS | SELDOM).items()):
    # Earlier versions of transformers lack some, and the vision tower of Gemma 3n is timm's.
    types = {model_type(model), settings.get("text_config", {}).get("model_type")} - {None}
    if types - set(CONFIG_MAPPING) or (model == "gemma3n" and find_spec("timm") is None):
        (SELDOM if model in SELDOM else MODELS).pop(model)
PLANNED: dict[str, dict[str, Any]] = {
    "mistral3 of ministral3": _made_of("ministral3", _PIXTRAL, tie_word_embeddings=False),
    "gemma4 experts": MODELS["gemma4"]
    | {"text_config": SIZES | NEWEST.get("gemma4_text experts", {}) | {"pad_token_id": 0}},
}
"""Those that plans of published configurations need, and no test."""
SOME = ("gemma3", "llama4", "qwen2_5_vl", "qwen3_vl", "mistral3", "llava")
"""Those that differ most."""
MORE = ("gemma3n", "gemma4", "qwen3_5_moe", "mllama")
"""Those whose language models take something else beside tokens, or have other layers."""
EACH = (
    *SOME,
    *(pytest.param(model, marks=pytest.mark.slow) for model in MODELS if model in MORE),
    *(
        pytest.param(model, marks=pytest.mark.matrix)
        for model in MODELS | SELDOM
        if model not in (*SOME, *MORE)
    ),
)
"""All, as cases of a test; those outside the matrix have every kind of layer."""


def _auto_class(config: transformers.PretrainedConfig) -> Any:
    # Phi-4's language model is the class that has encoders, too.
    is_causal = config.model_type == "phi4_multimodal"
    return getattr(
        transformers, "AutoModelForCausalLM" if is_causal else "AutoModelForImageTextToText"
    )


def make_multimodal_model(directory: Path, model: str) -> Path:
    """A random model in Hugging Face's layout."""
    settings = (MODELS | SELDOM | PLANNED)[model]
    config = transformers.AutoConfig.for_model(**{"model_type": model_type(model)} | settings)
    save_random(directory, _auto_class(config), config)
    (directory / "preprocessor_config.json").write_text('{"image_processor_type": "Any"}\n')
    return directory


def multimodal_model(directory: Path) -> transformers.PreTrainedModel:
    """The whole model of a directory, loaded by transformers; its attention step by step."""
    config = transformers.AutoConfig.from_pretrained(directory)
    model: Any = _auto_class(config).from_pretrained(directory, attn_implementation="eager")
    if model.config.model_type == "llama4":
        # Transformers 5.24 reads this attribute of an output, which does not have it.
        model.language_model.register_forward_hook(
            lambda module, inputs, output: setattr(output, "image_outputs", None)
        )
    return model.eval()
