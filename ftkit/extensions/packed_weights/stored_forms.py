"""Published forms of weights in 4 or 8 bits, as the settings of models describe them."""

import fnmatch
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ftkit.models.pretrained.stored_forms import METHODS, FormRow, StoredForm

_COMPRESSED = (
    *("float-quantized", "naive-quantized", "int-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
"""Formats of compressed-tensors that can be read."""
_PACKED_BITS = (1, 2, 4, 8)
"""Bits of packed integers whose words are the same in all versions of compressed-tensors: earlier
ones pack no number across two words, later ones do."""


@dataclass(frozen=True, kw_only=True)
class PackedForm(StoredForm):
    """How the weights of a model are stored in 4 or 8 bits."""

    method: str
    """quant_method of its config.json."""
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

    def keeps(self, module: str) -> bool:
        """Return whether a module's weights are plain numbers, by the settings.

        Args:
            module: its name in the files.
        """
        return any(re.search(pattern, module) for pattern in self.kept)


def _form(method: str, known: Mapping[str, Any], settings: Mapping[str, Any]) -> PackedForm | None:
    """Read a form; None: it is not one that `reading` knows."""
    if not _is_readable(method, known):
        return None
    bits, dtype = known.get("bits", 4), settings.get("dtype") or settings.get("torch_dtype")
    # DeepSeek V4, beside quantization_config or within.
    has_fp4 = "fp4" in (known.get("expert_dtype"), settings.get("expert_dtype"))
    is_fp8 = _is_fp8(method, known) and not has_fp4
    return PackedForm(
        method=method,
        title=_title(method, known) + (" with FP4 experts" if has_fp4 else ""),
        place="ftkit.extensions.packed_weights.layers:PackedWeights",
        can_stay=is_fp8 or method == "mxfp4",
        dtype=dtype if isinstance(dtype, str) else "bfloat16",
        bits=bits,
        block=_block(known),
        zeros_less_one=known.get("checkpoint_format") != "gptq_v2",
        is_fp8=is_fp8,
        kept=tuple(_patterns(method, known)),
    )


def _title(method: str, known: Mapping[str, Any]) -> str:
    """Usual name of a method, with the form if it has several."""
    if method == "modelopt":
        return f"{known['quant_algo']} (ModelOpt)"
    form = f" ({known['format']})" if method == "compressed-tensors" else ""
    return f"{METHODS[method]}{form}"


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
    return True


ROWS = tuple(
    FormRow(method, partial(_form, method))
    for method in ("awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4")
)
