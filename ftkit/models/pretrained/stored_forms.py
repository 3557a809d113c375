"""Forms in 4 or 8 bits in which base models are published, without torch: rows read the settings.

Weights in a form that no row reads cannot be trained: they are refused with the name of the method.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ftkit.errors import UserError
from ftkit.utils.registry import Registry, imported

METHODS = {
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
_EIGHT_BITS = ("eetq", "fbgemm_fp8", "fp8")


@dataclass(frozen=True, kw_only=True)
class StoredForm:
    """How the weights of a model are stored in 4 or 8 bits; a row may add facts in a subclass."""

    title: str
    """Usual name of the method, with the form."""
    place: str
    """MODULE:CLASS of a `ftkit.models.kept_weights.StoredWeights`, which is made of this object."""
    can_stay: bool = False
    """Whether weights can be computed with as they are stored, and unpacked for each use."""

    @property
    def weights(self) -> Any:
        """What reads the weights; imported here, because it needs torch."""
        return imported(self.place)(self)


@dataclass(frozen=True)
class FormRow:
    """A method of quantisation whose weights can be read."""

    name: str
    """quant_method of a config.json."""
    read: Callable[[Mapping[str, Any], Mapping[str, Any]], StoredForm | None]
    """Reads the form from what a config.json says of the quantisation, and from all of it; None: it
    is one that cannot be read."""


STORED_FORMS: Registry[FormRow] = Registry("stored_forms", (FormRow,), core=())


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
    row = STORED_FORMS.get(_method(known))
    form = None if row is None else row.read(known, settings)
    if form is None:
        raise quantized_weights(known, name)
    return form


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


def quantized_weights(quantization: Mapping[str, Any], name: str) -> UserError:
    """Return the error for quantised weights that cannot be read, with what to use instead.

    Args:
        quantization: how its weights are stored, as in a config.json.
        name: of the model, as the user knows it.
    """
    method = _method(quantization)
    title = METHODS.get(method, method)
    # The format of ftkit with the nearest number of bits.
    kind = "bnb.int8" if method in _EIGHT_BITS or quantization.get("load_in_8bit") else "bnb.nf4"
    return UserError(
        f"checkpoint_dir {name} holds {title} weights in a form that ftkit does not read"
        f"{without_extension()}. Give the original model, in 16 or 32 bits, with "
        f"--quantize {kind} if memory is short: that quantises it while it is loaded."
    )


def without_extension() -> str:
    """What a refusal says where our extension, which has rows, is missing; "" where it is here."""
    return "" if any(STORED_FORMS) else " (its extension packed_weights is missing)"


def _method(quantization: Mapping[str, Any]) -> str:
    if method := quantization.get("quant_method"):
        return str(method)
    # Early files have no quant_method.
    if any(key.startswith(("load_in_", "bnb_", "_load_in_")) for key in quantization):
        return "bitsandbytes"
    return "quantised"
