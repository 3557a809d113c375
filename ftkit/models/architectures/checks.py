"""Checks of a model before anything is built: its settings and its weights.

A number that no model has would make lists and tensors of that size. Later, settings that pass are
compared with the weights beside them, tensor by tensor. Weights that are stored quantised cannot be
trained: they are refused with the name of the method.
"""

import dataclasses
import fnmatch
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftkit.errors import UserError

_MOST_LAYERS = 2**10
"""The deepest published language models have an eighth of this."""
_MOST_EXPERTS = 2**16
"""Most experts of one layer."""
# Vocabularies reach 2^18 and layers 2^16; a list or an outline of this size is still possible.
_MOST_SIZE = 2**24
# Contexts of published models reach ten million positions (Llama 4 Scout).
_MOST_POSITIONS = 2**27
# Below Python's limit of recursion, and far above any config.json.
_MOST_NESTING = 32


_METHODS = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "EETQ",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "fp8": "FP8",
    "fp_quant": "FP-Quant",
    "gptq": "GPTQ",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "intel/auto-round": "AutoRound",
    "modelopt": "ModelOpt (NVFP4 or FP8)",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "quark": "Quark",
    "sinq": "SINQ",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
"""Usual name of each quant_method of a config.json."""
_KEYS = ("quantization_config", "compression_config")
"""Keys of a config.json with a quantised model; earlier llm-compressor wrote the second."""
_COMPRESSED = (
    *("float-quantized", "naive-quantized", "int-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
"""Formats of compressed-tensors that can be read."""
_PACKED_BITS = (1, 2, 4, 8)
"""Bits of packed integers whose words are the same in all versions of compressed-tensors: earlier
ones pack no number across two words, later ones do."""
_EIGHT_BITS = ("eetq", "fbgemm_fp8", "fp8")


@dataclasses.dataclass(frozen=True)
class _Rule:
    keys: re.Pattern[str]
    least: float
    most: float
    is_one: bool
    """True if the value must be one number; otherwise lists of numbers pass, too."""

    @property
    def text(self) -> str:
        return f"a number from {self.least:,} to {self.most:,}"

    def allows(self, value: Any) -> bool:
        """Return whether a value is possible; null and other types are left to the model."""
        if isinstance(value, list | Mapping) and not self.is_one:
            items = value.values() if isinstance(value, Mapping) else value
            return all(self.allows(item) for item in items)
        if value is None:
            return True
        # bool first: True is an int in Python.
        if isinstance(value, bool) or not isinstance(value, int | float):
            return not self.is_one
        return self.least <= value <= self.most


_RULES = tuple(
    _Rule(re.compile(keys), least, most, is_one)
    for keys, least, most, is_one in (
        (r"num_hidden_layers|n_layers?|num_layers|num_blocks", 1, _MOST_LAYERS, True),
        (r"hidden_size|vocab_size|padded_vocab_size|n_embd|d_model|head_dim", 1, _MOST_SIZE, True),
        (r"(\w+_)?max_position_embeddings|n_positions|n_ctx|block_size", -1, _MOST_POSITIONS, True),
        (r"(n|num)_\w*experts?", 0, _MOST_EXPERTS, False),
        (r"(n|num)_\w+|\w+_(size|dim|rank|width)", -1, _MOST_SIZE, False),
        (r"partial_rotary_factor|rotary_pct|rotary_percentage", 0.0, 1.0, True),
        (r"\w*(dropout|_pdrop|dropout_prob|layerdrop)", 0.0, 1.0, False),
        (r"(\w+_)?(eps|epsilon)", 0.0, 1.0, True),
        (r"rope_theta|rotary_emb_base|rope_base", 1.0, 1e30, True),
        (r"factor|low_freq_factor|high_freq_factor", 1e-9, 1e9, True),
        (r"\w*router_logit_softcapping", 0.0, 1e30, True),  # 0: none (Laguna)
        (r"\w+_softcapping|query_pre_attn_scalar|attention_scores_scalar", 1e-9, 1e30, True),
    )
)
"""The first rule that fits a key applies. Some models write -1 for an unlimited size."""
_FLAGS = frozenset(
    (
        *("tie_word_embeddings", "attention_bias", "mlp_bias"),
        *("use_sliding_window", "use_parallel_residual"),
    )
)
"""Keys of booleans: any string would count as true."""


def require_plausible(settings: Mapping[str, Any], file: Path | str) -> None:
    """Refuse settings with a number that no model has.

    Args:
        settings: the content of a config.json or model_config.yaml.
        file: the file that they were read from, for messages.

    Raises:
        UserError: names the key, its value and the values allowed.
    """
    # Also nested settings: text_config and others become configurations of their own.
    for key, value, depth in _entries(settings, 0):
        if depth > _MOST_NESTING:
            raise implausible(file, f"{key} is nested too deeply")
        rule = next((rule for rule in _RULES if rule.keys.fullmatch(key)), None)
        if rule is not None and not rule.allows(value):
            raise implausible(file, f"{key} is {shown_setting(value)}, but has to be {rule.text}")
        if key in _FLAGS and not isinstance(value, bool | None):
            raise implausible(file, f"{key} is {shown_setting(value)}, but has to be true or false")


def _entries(value: Mapping[str, Any] | list[Any], depth: int) -> Iterator[tuple[str, Any, int]]:
    """Yield every key, its value and its depth, also in nested settings."""
    keyed = value.items() if isinstance(value, Mapping) else (("a list", v) for v in value)
    for key, item in keyed:
        yield str(key), item, depth
        # One level more than is allowed, so that the caller notices.
        if isinstance(item, Mapping | list) and depth <= _MOST_NESTING:
            yield from _entries(item, depth + 1)


def shown_setting(value: Any) -> str:
    """Return a value as messages about settings show it."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def implausible(file: Path | str, problem: str) -> UserError:
    """Return the error of a file with settings that no model has."""
    return UserError(f"{file} describes no model: {problem}. Take it from the original model.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredForm:
    """How the weights of a model are stored in 4 or 8 bits."""

    method: str
    """quant_method of its config.json."""
    title: str
    """Usual name of the method, with the form."""
    dtype: str = "bfloat16"
    """Torch's name of the number format of the weights before they were stored."""
    bits: int = 4
    """Of the numbers of GPTQ."""
    block: tuple[int, int] | None = None
    """Rows and columns of FP8 weights that share a scale, if the settings say so."""
    zeros_less_one: bool = True
    """Whether GPTQ's zeros are stored less one, as its first version does."""
    is_fp8: bool = False
    """Whether all of its packed weights are floats of 8 bits with scales."""
    kept: tuple[str, ...] = ()
    """Patterns of the names of modules whose weights are stored as plain numbers."""

    @property
    def can_stay(self) -> bool:
        """Whether weights can be computed with as they are stored, and unpacked for each use."""
        return self.is_fp8 or self.method == "mxfp4"

    def keeps(self, module: str) -> bool:
        """Return whether a module's weights are plain numbers, by the settings.

        Args:
            module: its name in the files.
        """
        return any(re.search(pattern, module) for pattern in self.kept)


def stored_form(settings: Mapping[str, Any], name: str) -> StoredForm | None:
    """Return how the weights of a model are stored; None: as plain numbers.

    Args:
        settings: the content of its config.json.
        name: of the model, as the user knows it.

    Raises:
        UserError: they are stored in a form that cannot be read; names it, and what to use instead.
    """
    known = next((settings[key] for key in _KEYS if settings.get(key)), None)
    if not known:
        return None
    known = known if isinstance(known, Mapping) else {}
    method = str(known.get("quant_method") or _unnamed_method(known))
    if not _is_readable(method, known):
        raise quantized_weights(known, name)
    bits, dtype = known.get("bits", 4), settings.get("dtype") or settings.get("torch_dtype")
    # DeepSeek V4, beside quantization_config or within.
    has_fp4 = "fp4" in (known.get("expert_dtype"), settings.get("expert_dtype"))
    return StoredForm(
        method=method,
        title=_title(method, known) + (" with FP4 experts" if has_fp4 else ""),
        dtype=dtype if isinstance(dtype, str) else "bfloat16",
        bits=bits,
        block=_block(known),
        zeros_less_one=known.get("checkpoint_format") != "gptq_v2",
        is_fp8=_is_fp8(method, known) and not has_fp4,
        kept=tuple(_patterns(method, known)),
    )


def _title(method: str, known: Mapping[str, Any]) -> str:
    """Usual name of a method, with the form if it has several."""
    if method == "modelopt":
        return f"{known['quant_algo']} (ModelOpt)"
    form = f" ({known['format']})" if method == "compressed-tensors" else ""
    return f"{_METHODS[method]}{form}"


def _block(known: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale."""
    found: Any = known.get("weight_block_size")
    for weights in _weights_of_groups(known):
        if weights.get("strategy") == "group":
            found = [1, weights.get("group_size")]
        found = weights.get("block_structure") or found
    match found:
        case [int(rows), int(columns)] if min(rows, columns) > 0:
            return rows, columns
    return None


def _is_fp8(method: str, known: Mapping[str, Any]) -> bool:
    if method == "compressed-tensors":
        groups = _weights_of_groups(known)
        return bool(groups) and all(
            weights.get("type") == "float" and weights.get("num_bits") == 8 for weights in groups
        )
    return method == "fp8" or known.get("quant_algo") == "FP8"


def _patterns(method: str, known: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a name contains of a module that is not stored packed."""
    for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules"):
        names = known.get(key)
        for name in names if isinstance(names, list) else ():
            if not isinstance(name, str):
                continue
            if method == "modelopt":  # as in a shell
                yield f"^{fnmatch.translate(name)}"
            elif name.startswith("re:"):  # compressed-tensors
                with suppress(re.error):  # which the files then decide without
                    yield f"^(?:{re.compile(name.removeprefix('re:')).pattern})"
            else:  # the module, or all modules in it
                yield rf"(^|\.){re.escape(name)}(\.|$)"


def _weights_of_groups(known: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What compressed-tensors says of the weights, for each group of layers."""
    groups = known.get("config_groups")
    found = [
        group.get("weights")
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping)
    ]
    return [weights for weights in found if isinstance(weights, Mapping)]


def published_text(title: str, quantize: str | None) -> str:
    """Say in which form weights are published, and what becomes of it in memory.

    Args:
        title: of the form.
        quantize: of the recipe.
    """
    if quantize == "stored":
        return f"in {title}, kept as it is and unpacked for each use"
    held = "unpacked" if quantize is None else f"packed again as {quantize}"
    return f"in {title}, {held} while loading"


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without what they say of stored weights, as of the model in memory."""
    return {key: value for key, value in settings.items() if key not in _KEYS}


def _is_readable(method: str, known: Mapping[str, Any]) -> bool:
    if method == "gptq":
        return known.get("bits") in (2, 4, 8)
    if method == "awq":
        return known.get("bits", 4) == 4 and str(known.get("version", "gemm")).lower() == "gemm"
    if method == "compressed-tensors":
        sparsity = known.get("sparsity_config")
        sparsity = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else "dense"
        return (
            known.get("format") in _COMPRESSED
            and sparsity == "dense"
            # Rotated weights need rotated inputs, too.
            and not known.get("transform_config")
            and all(
                weights.get("type") == "float" or weights.get("num_bits", 4) in _PACKED_BITS
                for weights in _weights_of_groups(known)
            )
        )
    if method == "modelopt":
        return known.get("quant_algo") in ("FP8", "NVFP4")
    return method in ("bitsandbytes", "fp8", "mxfp4")


def quantized_weights(quantization: Mapping[str, Any], name: str) -> UserError:
    """Return the error for quantised weights that cannot be read, with what to use instead.

    Args:
        quantization: how its weights are stored, as in a config.json.
        name: of the model, as the user knows it.
    """
    method = str(quantization.get("quant_method") or _unnamed_method(quantization))
    title = _METHODS.get(method, method)
    # The format of ftkit with the nearest number of bits.
    kind = "bnb.int8" if method in _EIGHT_BITS or quantization.get("load_in_8bit") else "bnb.nf4"
    return UserError(
        f"checkpoint_dir {name} holds {title} weights in a form that ftkit does not read. "
        "Give the original model, in 16 or 32 bits, with "
        f"--quantize {kind} if memory is short: that quantises it while it is loaded."
    )


def _unnamed_method(quantization: Mapping[str, Any]) -> str:
    # Early files have no quant_method.
    if any(key.startswith(("load_in_", "bnb_", "_load_in_")) for key in quantization):
        return "bitsandbytes"
    return "quantised"
