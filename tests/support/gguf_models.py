"""Random models of the families that GGUF files are written of, with tokenizers of their kinds."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from sentencepiece import SentencePieceTrainer
from tiny import LLAMA, TEXT, WORDS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from ftkit.extensions.gguf.tokenizer import _cut, takes_whole_words

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
TWO_THETAS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
SCALES = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
_GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 8,
    "vocab_size_per_layer_input": LLAMA["vocab_size"],
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama-bpe", {"rope_parameters": LLAMA3} | BIASES),
    "smollm2": ("llama", "smollm", {"tie_word_embeddings": True}),
    "mistral": ("mistral", "pieces", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "qwen2", {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        "pieces",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8},
    ),
    "phi3": (
        "phi3",
        "pieces",
        {
            "pad_token_id": 0,
            "rope_parameters": LONGROPE,
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 256,
            "sliding_window": None,
        },
    ),
    "mistral_small": ("mistral", "tekken", {"head_dim": 32, "sliding_window": None}),
    "phi4": ("phi3", "dbrx", {"pad_token_id": 0, "sliding_window": None}),
    "gemma3": (
        "gemma3_text",
        "pieces",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "num_hidden_layers": 7,
            "rope_parameters": TWO_THETAS,
        },
    ),
    # As the small models: inputs of each layer, and keys and values of earlier layers.
    "gemma4": (
        "gemma4_text",
        "pieces",
        _GEMMA4
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
        },
    ),
    # As the large ones: keys that are values, too.
    "gemma4_experts": (
        "gemma4_text",
        "pieces",
        _GEMMA4
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 30.0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        "qwen2",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
    # Twice as many value heads as key heads, so that they are reordered.
    "qwen3_5": (
        "qwen3_5_text",
        "qwen35",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "llama4": (
        "llama4_text",
        "gpt-4o",
        {
            "head_dim": 32,
            "num_hidden_layers": 5,
            "intermediate_size": 48,
            "intermediate_size_mlp": 80,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "rope_parameters": LLAMA3,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        "gpt-4o",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": YARN,
        },
    ),
    "glm4": ("glm4", "llama-bpe", {"head_dim": 32, "attention_bias": True}),
    "olmo2": ("olmo2", "dbrx", {}),
    "granite": ("granite", "smollm", {"tie_word_embeddings": True} | SCALES),
    # Rows of whole blocks of 256 numbers.
    "wide": (
        "llama",
        "smollm",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
        },
    ),
}
"""Family, tokenizer (a rule of a byte-level one, or pieces: SentencePiece) and settings."""
_ADDED = ("<|im_start|>", "<|im_end|>")


def make_gguf_model(directory: Path, name: str) -> Path:
    """A model of `MODELS` in Hugging Face layout, all of whose numbers differ."""
    family, tokenizer, changes = MODELS[name]
    directory.mkdir(parents=True)
    settings = LLAMA | {"intermediate_size": 80, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(family, **settings | {"pad_token_id": None} | changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, buffer in made.named_buffers():
                if name in made.state_dict():  # such as a factor of each layer
                    buffer.mul_(0.7)
            for parameter in made.parameters():
                noise = torch.randn_like(parameter) * 0.1
                parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    made.save_pretrained(directory)
    if tokenizer == "pieces":
        _make_pieces(directory)
    else:
        _make_byte_level(directory, tokenizer)
    return directory


def _make_byte_level(directory: Path, rule: str) -> None:
    tokenizer = Tokenizer(models.BPE(ignore_merges=takes_whole_words(rule)))
    tokenizer.pre_tokenizer = _cut(rule)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT + " ".join(WORDS)] * 10, trainer)
    tokenizer.add_special_tokens(list(_ADDED))
    tokenizer.add_tokens(["plain added"])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_settings(directory, {"add_bos_token": False})


def _make_pieces(directory: Path) -> None:
    model = BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, " ".join(WORDS)] * 10),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    decoder = {"0": "<unk>", "1": "<s>", "2": "</s>", "340": _ADDED[0], "341": _ADDED[1]}
    added = {number: {"content": text, "special": True} for number, text in decoder.items()}
    added["342"] = {"content": "plain added", "special": False}
    _write_settings(directory, {"add_bos_token": True, "added_tokens_decoder": added})


def _write_settings(directory: Path, changes: dict[str, Any]) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    text = json.dumps(settings | changes)
    (directory / "tokenizer_config.json").write_text(text)
