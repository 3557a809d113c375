"""Checkpoints whose weights are stored quantised, which cannot be trained: told by their name."""

from collections.abc import Mapping
from typing import Any

from ftkit.errors import UserError

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
"""What people call each quant_method of a config.json."""

_KEYS = ("quantization_config", "compression_config")
"""The second is what llm-compressor wrote before."""
_EIGHT_BITS = ("eetq", "fbgemm_fp8", "fp8")


def require_plain_weights(settings: Mapping[str, Any], name: str) -> None:
    """Refuse a model whose weights are stored quantised.

    Args:
        settings: the content of its config.json.
        name: of the model, as the user knows it.

    Raises:
        UserError: names the method, and what to use instead.
    """
    for key in _KEYS:
        found = settings.get(key)
        if found:
            raise quantized_weights(found if isinstance(found, Mapping) else {}, name)


def quantized_weights(quantization: Mapping[str, Any], name: str) -> UserError:
    """Why such a model is refused, and what to use instead.

    Args:
        quantization: how its weights are stored, in the words of a config.json.
        name: of the model, as the user knows it.
    """
    method = str(quantization.get("quant_method") or _unnamed_method(quantization))
    title = _METHODS.get(method, method)
    kind = "bnb.int8" if method in _EIGHT_BITS or quantization.get("load_in_8bit") else "bnb.nf4"
    return UserError(
        f"checkpoint_dir {name} holds {title} weights, which are rounded already and cannot be "
        "trained. Give the original model, in 16 or 32 bits, with "
        f"--quantize {kind} if memory is short: that quantises it while it is loaded."
    )


def _unnamed_method(quantization: Mapping[str, Any]) -> str:
    """Of files from before quant_method was written."""
    if any(key.startswith(("load_in_", "bnb_", "_load_in_")) for key in quantization):
        return "bitsandbytes"
    return "quantised"
