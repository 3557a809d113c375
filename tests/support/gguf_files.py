"""GGUF files of tiny models, written by llama.cpp's own package."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

CONTROL, NORMAL = 3, 1
"""Kinds of tokens."""
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def write_gguf(model: Path, file: Path, kind: str = "F32", **changes: Any) -> Path:
    """The model of a Hugging Face directory as a GGUF file.

    Args:
        model: a directory with a byte-level tokenizer.
        file: is written.
        kind: number format of its matrices; vectors are F32.
        changes: of the metadata, with "." written as "__"; None leaves a key out.
    """
    settings = json.loads((model / "config.json").read_text())
    name = settings["model_type"]
    metadata = {**_sizes(settings, name), **byte_level_tokenizer(model)}
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    tensors = _tensors(model, settings, name)
    return write_raw_gguf(file, name, metadata, tensors, kind)


def write_raw_gguf(
    file: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kind: str = "F32",
) -> Path:
    """A GGUF file of what it is to hold; None in the metadata leaves a key out."""
    writer = gguf.GGUFWriter(str(file), architecture)
    for key, value in metadata.items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    number = gguf.GGMLQuantizationType[kind]
    for tensor_name, values in tensors.items():
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(tensor_name, np.ascontiguousarray(values, np.float32))
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), number)
            writer.add_tensor(tensor_name, packed, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def byte_level_tokenizer(model: Path) -> dict[str, Any]:
    """The metadata of a byte-level tokenizer."""
    content = json.loads((model / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    special = {token["id"] for token in content["added_tokens"]}
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
    ]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [
            CONTROL if i in special else NORMAL for i in range(len(tokens))
        ],
        "tokenizer.ggml.bos_token_id": vocabulary["<s>"],
        "tokenizer.ggml.eos_token_id": vocabulary["</s>"],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TEMPLATE,
    }


def patched(
    content: bytes, tensor: str, *, kind: int | None = None, start: int | None = None
) -> bytes:
    """A file whose header lies about a tensor: its type, or where it begins."""
    place = content.index(struct.pack("<Q", len(tensor)) + tensor.encode()) + 8 + len(tensor)
    dimensions = struct.unpack_from("<I", content, place)[0]
    place += 4 + 8 * dimensions
    changed = bytearray(content)
    if kind is not None:
        struct.pack_into("<I", changed, place, kind)
    if start is not None:
        struct.pack_into("<Q", changed, place + 4, start)
    return bytes(changed)


def _sizes(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    width, heads = settings["hidden_size"], settings["num_attention_heads"]
    head_size = settings.get("head_dim") or width // heads
    rope = settings.get("rope_parameters") or {}
    sizes = {
        "context_length": settings["max_position_embeddings"],
        "vocab_size": settings["vocab_size"],
        "embedding_length": width,
        "block_count": settings["num_hidden_layers"],
        "feed_forward_length": settings["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": settings["num_key_value_heads"],
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "attention.layer_norm_rms_epsilon": settings["rms_norm_eps"],
        "rope.dimension_count": int(head_size * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    if name == "gemma2":
        sizes |= {
            "attention.sliding_window": settings["sliding_window"],
            "attn_logit_softcapping": settings["attn_logit_softcapping"],
            "final_logit_softcapping": settings["final_logit_softcapping"],
        }
    return {f"{name}.{key}": value for key, value in sizes.items()}


def _tensors(model: Path, settings: Mapping[str, Any], name: str) -> dict[str, np.ndarray]:
    """As llama.cpp's converter writes them."""
    numbers = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[name], settings["num_hidden_layers"])
    found = {}
    for their_name, values in load_file(model / "model.safetensors").items():
        stem, _, suffix = their_name.rpartition(".")
        if name == "llama" and ("q_proj" in stem or "k_proj" in stem):
            heads = settings["num_attention_heads" if "q_proj" in stem else "num_key_value_heads"]
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if name.startswith("gemma") and stem.endswith("norm"):
            values = values + 1
        found[f"{names.get_name(stem)}.{suffix}"] = values
    return found
