"""The model in a GGUF file: its config.json, and its tensors under Hugging Face's names."""

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from ftkit.errors import UserError
from ftkit.extensions.gguf.families import Rule, named_tensors
from ftkit.extensions.gguf.header import BLOCKS, GgufHeader, GgufTensor
from ftkit.models.architectures.checks import require_plausible
from ftkit.utils.damaged_files import reading

ROPE_FACTORS = "rope_freqs.weight"
"""Factors of the frequencies in Llama 3.1's rotary embedding; config.json has settings for them."""

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_POSITIONS = 1.0, 4.0, 8192
"""Settings of every Llama 3 with rope_type llama3; files only hold the resulting factors."""
_GEMMA2_27B_LAYERS = 46
"""Gemma 2 27B, whose attention is scaled by the model's width; in smaller ones, by a head's."""

_CHUNK_NUMBERS = 2**22
"""Numbers in memory at a time, unless a row has more."""
_WORK_BYTES = 16
"""Most bytes for each of these numbers in any format, with its source and its result."""
_PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F64": "F32"}
"""Kinds of plain numbers, and what they are written as; all others are written as F16."""
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
# All ones in these bits mean infinity or NaN.
_EXPONENT_OF_BF16 = 0x7F80


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
"""Families by general.architecture."""


def settings_of(header: GgufHeader) -> dict[str, Any]:
    """Build config.json from the header.

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
        # llama.cpp takes the embedding as head where the file has none.
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    # Quantised weights become float16, and so do those of float16.
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


def config_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json for `settings_of`.

    It is what the model's own says: transformers keeps numbers that follow from others, of which
    the settings of Phi-3 know nothing, and the model would have another fingerprint.
    """
    follows = dict[str, Any]()
    if settings["model_type"] == "phi3":
        per_head = settings["hidden_size"] // settings["num_attention_heads"]
        follows = {"head_dim": per_head, "partial_rotary_factor": 1.0}
    return {k: v for k, v in settings.items() if k not in follows or follows[k] != v}


def _sizes(header: GgufHeader, name: str) -> dict[str, Any]:
    width = _positive(header, f"{name}.embedding_length")
    heads = _positive(header, f"{name}.attention.head_count")
    layers = _positive(header, f"{name}.block_count")
    # A damaged number of layers would make a table of that length.
    if layers > len(header.tensors):
        raise header.error(f"it has {layers:,} layers and {len(header.tensors):,} tensors")
    # Rotary embeddings need pairs, and the families here have values as long as keys.
    head_size = _positive(header, f"{name}.attention.key_length", width // heads)
    if head_size % 2 or header.integer(f"{name}.attention.value_length", head_size) != head_size:
        raise header.error(f"its keys of {head_size} numbers are odd, or not as long as its values")
    rotated = header.integer(f"{name}.rope.dimension_count", head_size)
    if rotated != head_size and name != "phi3":
        raise UserError(
            f"checkpoint_dir {header.file} rotates {rotated} of the {head_size} numbers of a key, "
            f"which ftkit does not support for {name}. Give the original model."
        )
    # The vocabulary is the number of its rows, which may be more than there are tokens.
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
    """Settings of the rotary embedding."""
    base = header.number(f"{name}.rope.freq_base", 10000.0)
    factors = [tensor for tensor in header.tensors if tensor.startswith("rope_factors")]
    kind = header.text(f"{name}.rope.scaling.type") or "none"
    scaling: dict[str, Any] | None = None
    # rope_factors_long and _short belong to longrope; yarn is a type.
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
    """Settings from which the factors in the file follow."""
    tensor = header.tensors[ROPE_FACTORS]
    if tensor.kind != "F32" or len(tensor.shape) != 1:
        raise header.error(f"its {ROPE_FACTORS} is not a row of F32")
    # The factors are as many as pairs in a head: a few hundred bytes.
    found = np.fromfile(header.file, "<f4", tensor.shape[0], offset=tensor.start)
    # The lowest frequencies are divided by the whole factor.
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
    # The file holds factors, config.json the three numbers that they follow from.
    if not np.allclose(found, expected, rtol=1e-4):
        raise UserError(
            f"checkpoint_dir {header.file} stretches its positions otherwise than Llama 3 does. "
            "Give the original model."
        )
    return scaling


def _llama3_factor(frequency: float, factor: float, positions: int) -> float:
    """Factor by which Llama 3 divides a frequency of its rotary embedding."""
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
        # GGUF does not have this number; llama.cpp decides in the same way.
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


@dataclass(frozen=True, kw_only=True)
class ConvertedTensor:
    """A tensor to be written to a safetensors file, and how to convert it."""

    name: str
    """Hugging Face's name."""
    source: GgufTensor
    dtype: str
    """F32, F16 or BF16."""
    change: Callable[[np.ndarray], np.ndarray] | None
    """Converts numbers of the file to Hugging Face's order and convention."""
    rows_together: int
    """Number of rows that `change` needs together."""

    @property
    def nbytes(self) -> int:
        """Size once written."""
        return math.prod(self.source.shape) * _BYTES[self.dtype]

    @property
    def memory_bytes(self) -> int:
        """Peak host memory of its conversion."""
        rows, row_numbers = _rows(self.source)
        return min(self._chunk_rows, rows) * row_numbers * _WORK_BYTES

    @property
    def _chunk_rows(self) -> int:
        _, row_numbers = _rows(self.source)
        together = self.rows_together
        # At least one group of rows that change together, however long they are.
        return max(_CHUNK_NUMBERS // row_numbers // together, 1) * together

    def chunks(self, header: GgufHeader, stream: BinaryIO) -> Iterator[bytes]:
        """Convert some rows at a time; yield their bytes.

        Args:
            header: of the file.
            stream: the file, open for reading.

        Raises:
            UserError: the file has become shorter, or has a value that is not finite.
        """
        rows, _ = _rows(self.source)
        row_bytes = self.source.nbytes // rows
        step = self._chunk_rows
        for first in range(0, rows, step):
            count = min(step, rows - first)
            stream.seek(self.source.start + first * row_bytes)
            # Quantised blocks never cross the end of a row, so that any rows can be converted
            # alone.
            raw = stream.read(count * row_bytes)
            if len(raw) != count * row_bytes:
                raise header.error(f"it ends within {self.source.name}")
            numbers = np.frombuffer(raw, np.uint8).reshape(count, row_bytes)
            values = self._converted(numbers)
            # After the cast: a number beyond float16 becomes infinity there.
            if not _is_finite(values):
                raise header.error(f"{self.source.name} has a value that is not finite")
            yield values.tobytes()

    def _converted(self, raw: np.ndarray) -> np.ndarray:
        """Return numbers, [rows, numbers of a row]; BF16 as the bits of each."""
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
        with np.errstate(over="ignore", invalid="ignore"):  # `chunks` checks the result
            return values.astype({"F32": "<f4", "F16": "<f2"}[self.dtype], copy=False)


def converted_tensors(header: GgufHeader, settings: Mapping[str, Any]) -> list[ConvertedTensor]:
    """Return every tensor of a model, in the order of its layers.

    Raises:
        UserError: a tensor is missing, unexpected or of another shape; or tensors are quantised and
            the package gguf, which unpacks them, is not installed.
    """
    family = settings["model_type"]
    head_size = settings["head_dim"]
    expected = named_tensors(settings)
    found = []
    for name, (their_name, shape, rule) in expected.items():
        tensor = header.tensors.get(name)
        if tensor is None:
            raise header.error(f"it lacks {name}")
        if tensor.shape != shape:
            raise header.error(
                f"{name} has shape {list(tensor.shape)}, but its settings say {list(shape)}"
            )
        found.append(_converted_tensor(header, tensor, their_name, head_size, rule))
    # A tensor that is left out could change the results.
    unknown = header.tensors.keys() - expected.keys() - {ROPE_FACTORS}
    if unknown:
        raise UserError(
            f"checkpoint_dir {header.file} holds {min(unknown)}, which ftkit does not "
            f"expect in {family}. Give the original model."
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
    rule: Rule,
) -> ConvertedTensor:
    # A vector has rows of one number here, which no block fits.
    if len(tensor.shape) == 1 and BLOCKS[tensor.kind][1] > 1:
        raise header.error(f"{tensor.name} is of {tensor.kind}, which is for matrices")
    dtype = _PLAIN.get(tensor.kind, "F16")
    change: Callable[[np.ndarray], np.ndarray] | None = None
    if rule == "pairs":
        change = partial(_halves_after_each_other, head_size=head_size)
    if rule == "plus one":
        if tensor.kind not in ("F32", "F64"):
            raise header.error(f"{tensor.name} is of {tensor.kind}, not F32")
        change = _without_one
    return ConvertedTensor(
        name=name,
        source=tensor,
        dtype=dtype,
        change=change,
        # A head's rows are reordered among themselves.
        rows_together=head_size if rule == "pairs" else 1,
    )


def _halves_after_each_other(values: np.ndarray, head_size: int) -> np.ndarray:
    """Reorder the rows of rotated heads, [heads x head_size, numbers], for Hugging Face."""
    # llama.cpp stores the two numbers of a rotated pair side by side, Hugging Face stores the first
    # numbers of all pairs before the second ones.
    pairs = values.reshape(-1, head_size // 2, 2, values.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _without_one(values: np.ndarray) -> np.ndarray:
    """Subtract one: Gemma's norms multiply by 1 + weight, which is the number in the file."""
    return values - 1


def _is_finite(values: np.ndarray) -> bool:
    if values.dtype.kind == "u":
        return bool(((values & _EXPONENT_OF_BF16) != _EXPONENT_OF_BF16).all())
    return bool(np.isfinite(values).all())


def _rows(tensor: GgufTensor) -> tuple[int, int]:
    """Number of rows, and numbers in each; a vector has rows of one number."""
    if len(tensor.shape) == 1:
        return tensor.shape[0], 1
    return math.prod(tensor.shape[:-1]), tensor.shape[-1]
