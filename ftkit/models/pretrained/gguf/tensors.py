"""Tensors of a GGUF file: under which names Hugging Face has them, and their numbers."""

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from ftkit.errors import UserError
from ftkit.models.pretrained.gguf.header import BLOCKS, GgufHeader, GgufTensor
from ftkit.models.pretrained.gguf.settings import ROPE_FACTORS

_CHUNK_NUMBERS = 2**22
"""How many are in memory at a time, unless a row has more."""
_WORK_BYTES = 16
"""Of each of these, with what they are made of and what is made of them: at most, of all kinds."""
_PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F64": "F32"}
"""Kinds of plain numbers, and what they are written as; all others are written as F16."""
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_EXPONENT_OF_BF16 = 0x7F80


@dataclass(frozen=True, kw_only=True)
class ConvertedTensor:
    """A tensor as a safetensors file holds it."""

    name: str
    """Hugging Face's."""
    source: GgufTensor
    dtype: str
    """F32, F16 or BF16."""
    change: Callable[[np.ndarray], np.ndarray] | None
    """What makes the numbers in Hugging Face's order and convention of those in the file."""
    rows_together: int
    """Which `change` has to see at one time."""

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.source.shape) * _BYTES[self.dtype]

    @property
    def memory_bytes(self) -> int:
        """Of its conversion, at most."""
        rows, row_numbers = _rows(self.source)
        return min(self._chunk_rows, rows) * row_numbers * _WORK_BYTES

    @property
    def _chunk_rows(self) -> int:
        _, row_numbers = _rows(self.source)
        together = self.rows_together
        return max(_CHUNK_NUMBERS // row_numbers // together, 1) * together

    def chunks(self, header: GgufHeader, stream: BinaryIO) -> Iterator[bytes]:
        """Its numbers, some rows at a time.

        Args:
            header: of the file.
            stream: the file, open for reading.

        Raises:
            UserError: the file has become shorter, or holds what is no finite number.
        """
        rows, _ = _rows(self.source)
        row_bytes = self.source.nbytes // rows
        step = self._chunk_rows
        for first in range(0, rows, step):
            count = min(step, rows - first)
            stream.seek(self.source.start + first * row_bytes)
            raw = stream.read(count * row_bytes)
            if len(raw) != count * row_bytes:
                raise header.error(f"it ends within {self.source.name}")
            numbers = np.frombuffer(raw, np.uint8).reshape(count, row_bytes)
            values = self._converted(numbers)
            if not _is_finite(values):
                raise header.error(f"{self.source.name} holds what is no finite number")
            yield values.tobytes()

    def _converted(self, raw: np.ndarray) -> np.ndarray:
        """Numbers, [rows, numbers of a row]; BF16 as the bits of each."""
        kind = self.source.kind
        if kind in _PLAIN:
            dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}[kind]
            values = raw.view(dtype)
        else:
            from gguf.constants import GGMLQuantizationType
            from gguf.quants import dequantize

            values = dequantize(raw, GGMLQuantizationType[kind])
        if self.change is not None:
            values = self.change(values)
        if self.dtype == "BF16":
            return values
        with np.errstate(over="ignore", invalid="ignore"):  # it is looked at afterwards
            return values.astype({"F32": "<f4", "F16": "<f2"}[self.dtype], copy=False)


def converted_tensors(header: GgufHeader, settings: Mapping[str, Any]) -> list[ConvertedTensor]:
    """Every tensor of a model, in the order of its layers.

    Raises:
        UserError: one is missing, unexpected or of another shape; or the package gguf is, which
            unpacks quantised ones.
    """
    family = settings["model_type"]
    head_size = settings["head_dim"]
    expected = tensor_names(settings)
    found = []
    for name, (their_name, shape) in expected.items():
        tensor = header.tensors.get(name)
        if tensor is None:
            raise header.error(f"it lacks {name}")
        if tensor.shape != shape:
            raise header.error(
                f"{name} has shape {list(tensor.shape)}, but its settings say {list(shape)}"
            )
        is_rotated = family == "llama" and name.split(".")[2:3] in (["attn_q"], ["attn_k"])
        shifted = family.startswith("gemma") and name.endswith("norm.weight")
        found.append(_converted_tensor(header, tensor, their_name, head_size, is_rotated, shifted))
    unknown = header.tensors.keys() - expected.keys() - {ROPE_FACTORS}
    if unknown:
        raise UserError(
            f"checkpoint_dir {header.file} holds {min(unknown)}, which ftkit knows in no "
            f"{family}. Give the original model."
        )
    kinds = {tensor.source.kind for tensor in found} - _PLAIN.keys()
    if kinds and importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"checkpoint_dir {header.file} is quantised ({', '.join(sorted(kinds))}), which needs "
            "the package gguf. Install it: pip install 'ftkit[gguf]'."
        )
    return found


def _converted_tensor(
    header: GgufHeader,
    tensor: GgufTensor,
    name: str,
    head_size: int,
    is_rotated: bool,
    shifted: bool,
) -> ConvertedTensor:
    if len(tensor.shape) == 1 and BLOCKS[tensor.kind][1] > 1:
        raise header.error(f"{tensor.name} is of {tensor.kind}, which is for matrices")
    dtype = _PLAIN.get(tensor.kind, "F16")
    change: Callable[[np.ndarray], np.ndarray] | None = None
    if is_rotated:
        change = partial(_halves_after_each_other, head_size=head_size)
    if shifted:
        if tensor.kind not in ("F32", "F64"):
            raise header.error(f"{tensor.name} is of {tensor.kind}, not F32")
        change = _without_one
    return ConvertedTensor(
        name=name,
        source=tensor,
        dtype=dtype,
        change=change,
        rows_together=head_size if is_rotated else 1,
    )


def _halves_after_each_other(values: np.ndarray, head_size: int) -> np.ndarray:
    """Rows of rotated heads in the order of Hugging Face.

    llama.cpp has the two numbers of each pair beside each other, Hugging
    Face the first of all pairs before the second of all.

    Args:
        values: [heads x head_size, numbers].
        head_size: rows of a head.
    """
    pairs = values.reshape(-1, head_size // 2, 2, values.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _without_one(values: np.ndarray) -> np.ndarray:
    """Gemma's norms multiply by one more than their weight; llama.cpp stores that."""
    return values - 1


def _is_finite(values: np.ndarray) -> bool:
    if values.dtype.kind == "u":
        return bool(((values & _EXPONENT_OF_BF16) != _EXPONENT_OF_BF16).all())
    return bool(np.isfinite(values).all())


def _rows(tensor: GgufTensor) -> tuple[int, int]:
    """Rows, and the numbers of each; a vector is one of rows of one number."""
    if len(tensor.shape) == 1:
        return tensor.shape[0], 1
    return math.prod(tensor.shape[:-1]), tensor.shape[-1]


def tensor_names(settings: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Hugging Face's name and the shape of every tensor of a model, by llama.cpp's name.

    Args:
        settings: of config.json, with sizes of heads and all switches said.
    """
    width, inner = settings["hidden_size"], settings["intermediate_size"]
    family, vocabulary = settings["model_type"], settings["vocab_size"]
    head_size = settings["head_dim"]
    queries = settings["num_attention_heads"] * head_size
    keys = settings["num_key_value_heads"] * head_size
    block: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn_norm.weight": ("input_layernorm.weight", (width,)),
        "attn_output.weight": ("self_attn.o_proj.weight", (width, queries)),
        "ffn_down.weight": ("mlp.down_proj.weight", (width, inner)),
    }
    if family == "phi3":
        block |= {
            "attn_qkv.weight": ("self_attn.qkv_proj.weight", (queries + 2 * keys, width)),
            "ffn_up.weight": ("mlp.gate_up_proj.weight", (2 * inner, width)),
        }
    else:
        block |= {
            "attn_q.weight": ("self_attn.q_proj.weight", (queries, width)),
            "attn_k.weight": ("self_attn.k_proj.weight", (keys, width)),
            "attn_v.weight": ("self_attn.v_proj.weight", (keys, width)),
            "ffn_gate.weight": ("mlp.gate_proj.weight", (inner, width)),
            "ffn_up.weight": ("mlp.up_proj.weight", (inner, width)),
        }
    if family == "gemma2":
        block |= {
            "post_attention_norm.weight": ("post_attention_layernorm.weight", (width,)),
            "ffn_norm.weight": ("pre_feedforward_layernorm.weight", (width,)),
            "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", (width,)),
        }
    else:
        block |= {"ffn_norm.weight": ("post_attention_layernorm.weight", (width,))}
    if family == "qwen3":
        block |= {
            "attn_q_norm.weight": ("self_attn.q_norm.weight", (head_size,)),
            "attn_k_norm.weight": ("self_attn.k_norm.weight", (head_size,)),
        }
    if family == "qwen2" or settings.get("attention_bias"):
        block |= {
            "attn_q.bias": ("self_attn.q_proj.bias", (queries,)),
            "attn_k.bias": ("self_attn.k_proj.bias", (keys,)),
            "attn_v.bias": ("self_attn.v_proj.bias", (keys,)),
        }
    if settings.get("attention_bias"):
        block |= {"attn_output.bias": ("self_attn.o_proj.bias", (width,))}
    if settings.get("mlp_bias"):
        block |= {
            "ffn_gate.bias": ("mlp.gate_proj.bias", (inner,)),
            "ffn_up.bias": ("mlp.up_proj.bias", (inner,)),
            "ffn_down.bias": ("mlp.down_proj.bias", (width,)),
        }
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocabulary, width))
    }
    for layer in range(settings["num_hidden_layers"]):
        for name, (their_name, shape) in block.items():
            expected[f"blk.{layer}.{name}"] = (f"model.layers.{layer}.{their_name}", shape)
    expected["output_norm.weight"] = ("model.norm.weight", (width,))
    if not settings["tie_word_embeddings"]:
        expected["output.weight"] = ("lm_head.weight", (vocabulary, width))
    return expected
