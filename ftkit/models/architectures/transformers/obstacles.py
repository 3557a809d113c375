"""What keeps a model of transformers from being trained as a causal language model, in words."""

from collections.abc import Mapping
from typing import Any

import torch.nn as nn
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ftkit.models.architectures.transformers.outline import head_name, model_name
from ftkit.models.architectures.transformers.parts import whole_class_name

_NO_OTHER_INPUT = {"text_config", "attn_config", "ffn_config"}
"""Parts of settings that need no input beside tokens."""
_ONE_BY_ONE = (
    "computes its experts one by one, each with the tokens that have chosen it, which a "
    "prediction of memory does not know"
)
_NOT_CAUSAL = (
    f"is computed by transformers {transformers.__version__} so that tokens see later ones"
)
_IN_PLACE = "writes its states over those that its gradients need"
_SHARED = "computes several blocks with the same weights"
_FAMILIES = {
    "afmoe": _ONE_BY_ONE,
    "blt": "reads bytes, in patches that another model makes of them",
    "cpmant": "takes a prompt that it sees as a whole, and tokens in segments",
    "dbrx": _ONE_BY_ONE,
    "longcat_flash": _ONE_BY_ONE,
    "nemotron_h": _NOT_CAUSAL,
    "recurrent_gemma": _NOT_CAUSAL,
    "reformer": "sees tokens in buckets that change from step to step",
    "rwkv": _IN_PLACE,
    "trocr": "reads what an encoder of images gives it",
    "xlm": "asks for the values of lengths and languages of its sequences",
    "xlnet": "predicts tokens in any order, each of them from those on both sides",
    "xlstm": _IN_PLACE,
    "zamba": _SHARED,
    "zamba2": _SHARED,
}
"""Whatever their settings."""


def obstacle_of_settings(settings: Mapping[str, Any]) -> str | None:
    """What config.json tells; the rest of a sentence that begins with the model's name.

    None: nothing there is in the way.

    Args:
        settings: the content of config.json, of a model type that transformers knows.
    """
    model_type = settings["model_type"]
    if model_type in _FAMILIES:
        return _FAMILIES[model_type]
    if whole_class_name(model_type) is not None:
        return None
    parts = set(CONFIG_MAPPING[model_type].sub_configs)
    if "text_config" in parts:
        return "is made of a language model and others, for images or sound"
    if model_type != "phi4_multimodal" and (others := sorted(parts - _NO_OTHER_INPUT)):
        return f"needs inputs beside tokens, such as those of its {others[0]}"
    return None


def obstacle_of_config(config: PretrainedConfig) -> str | None:
    """The same, with the defaults of the family."""
    if config.is_encoder_decoder:
        return "is an encoder and a decoder, which reads what the encoder gives"
    if getattr(config, "add_cross_attention", False):
        return "reads what an encoder gives (add_cross_attention is true in its config.json)"
    has_both = hasattr(config, "is_decoder") and hasattr(config, "add_cross_attention")
    if has_both and not config.is_decoder:
        return (
            "is an encoder, in which tokens see those that follow (is_decoder is not true in its "
            "config.json)"
        )
    if getattr(config, "use_bidirectional_attention", False):
        return "has tokens see those that follow (use_bidirectional_attention in its config.json)"
    if getattr(config, "num_kv_shared_layers", 0):
        return "has blocks that take keys and values of others from a cache, which training has not"
    return None


def obstacle_of_model(model: PreTrainedModel) -> str | None:
    """The same, of the model on the meta device."""
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        return "has no linear layer at its end"
    ours = (f"{model_name(model)}.", f"{head_name(model)}.")
    head = set(map(id, model.get_output_embeddings().parameters()))
    others = [
        name
        for name, parameter in model.named_parameters()
        if not name.startswith(ours) and id(parameter) not in head
    ]
    if not others:
        return None
    return f"has layers between its last block and its head ({others[0].rpartition('.')[0]})"
