"""Reading of config.json for transformers' models, and the reasons why a model is refused."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
import transformers
from packaging.version import InvalidVersion, Version
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ftkit.errors import UserError
from ftkit.models.architectures.transformers_architecture import TransformersArchitecture
from ftkit.models.architectures.transformers_outline import (
    Called,
    call_apart,
    causal_class_name,
    head_name,
    model_name,
    whole_class_name,
)

_NO_OTHER_INPUT = {"text_config", "attn_config", "ffn_config"}
"""Parts of settings that need no input other than tokens."""
_DRAFTS = "drafts tokens from the keys and values of another model"
_IN_PLACE = "overwrites states that its backward pass needs"
_INDEXED = "chooses what each token attends to one by one, so its memory cannot be predicted"
_SHARED = "shares weights between blocks"
_FAMILIES = {
    "blt": "reads bytes, which another model groups into patches",
    "cpmant": "attends to prompts in both directions, and takes tokens in segments",
    "ernie4_5_vl_moe": "mixes experts of text and of images in the same files",
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "hrm_text": "repeats its blocks for each token, some of the times without gradients",
    "longcat_flash": "has two attention layers in each block, and experts that compute nothing",
    "qwen4_exp": _INDEXED,
    "qwen4_exp_text": _INDEXED,
    "reformer": "attends within buckets of tokens that change from step to step",
    "rwkv": _IN_PLACE,
    "trocr": "needs the output of an image encoder",
    "xlm": "reads lengths and languages of its sequences in the forward pass",
    "xlnet": "predicts tokens in any order, from those on both sides",
    "xlstm": _IN_PLACE,
    "zamba": _SHARED,
    "zamba2": _SHARED,
}
"""Families that are refused whatever their settings."""
_SINCE = dict.fromkeys(("dbrx", "nemotron_h", "recurrent_gemma"), "5.24")
"""Families that transformers computes in another way before a version: with 5.3, Nemotron-H and
RecurrentGemma let tokens depend on later ones."""
_TOKENS = 3
"""Tokens with which a whole model is called; fewer than any window."""


def read_transformers_architecture(
    settings: Mapping[str, Any], name: str
) -> TransformersArchitecture:
    """Read the architecture that a config.json describes to transformers.

    Args:
        settings: its content.
        name: of the model, for messages.

    Raises:
        UserError: transformers has no such causal language model, or a library is missing.
        Exception: from the code of the family, for settings that do not fit each other.
    """
    # From cheap to costly: settings alone, then the configuration, then modules on the meta device.
    model_type = _known_type(settings, name)
    if obstacle := _obstacle_of_settings(settings):
        raise _refusal(name, obstacle)
    is_part = whole_class_name(model_type) is not None
    architecture = TransformersArchitecture(settings)
    # A vision tower may need a package, such as timm, without which its model cannot be built.
    try:
        obstacle = _obstacle(architecture)
        if obstacle is None:
            # Computed here, so that settings that do not fit each other fail while the file is
            # known.
            architecture.parameter_shapes(tied=False)
            if is_part and not architecture.sees_prompts:
                require_text_alone(architecture.build(), architecture.language_name, name)
            architecture.logit_scale  # noqa: B018 (refuses unknown changes of logits)
    except ImportError as error:
        raise UserError(f"{name} is of model_type {model_type!r}{_missing(error)}") from error
    if obstacle:
        raise _refusal(name, obstacle)
    return architecture


_TRAINED = (
    "ftkit trains causal language models, also to classify texts (--objective classify). "
    "Choose another model."
)


def _known_type(settings: Mapping[str, Any], name: str) -> str:
    """Return the model_type; refuse it if transformers has no causal language model of it."""
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UserError(
            f"{name} is of model_type {model_type!r}, which transformers "
            f"{transformers.__version__} does not know. {_source_of_type(settings)}"
        )
    since = _SINCE.get(model_type)
    if since is not None and Version(transformers.__version__) < Version(since):
        raise UserError(
            f"{name} is of model_type {model_type!r}, which needs transformers {since} or newer, "
            f"and {transformers.__version__} is installed. Try pip install -U transformers."
        )
    if causal_class_name(model_type) is None and whole_class_name(model_type) is None:
        raise UserError(
            f"{name} is of model_type {model_type!r}, of which transformers has no causal language "
            f"model; {_TRAINED}"
        )
    return model_type


def _missing(error: ImportError) -> str:
    """Say which package the code of a family needs, with the command that installs it."""
    said = str(error).strip()
    if command := re.search(r"`(pip install (\S+))`", said):  # as transformers says it
        package = f"needs the package {command[2]}, which is not installed"
        return f", whose code {package}. Try {command[1]}."
    return f": {said.splitlines()[0]}"


def _source_of_type(settings: Mapping[str, Any]) -> str:
    """Say what has the model_type of a config.json that the installed transformers lacks."""
    if "auto_map" in settings:
        return "It brings code of its own, which ftkit does not run. Choose another model."
    newer = "pip install -U transformers; nothing else has to change."
    version = settings.get("transformers_version")
    try:
        is_newer = Version(str(version)) > Version(transformers.__version__)
    except InvalidVersion:
        is_newer = False
    if is_newer:
        return f"It was saved with transformers {version}. Try {newer}"
    return f"If a newer version does, try {newer} Else choose another model."


def _obstacle(architecture: TransformersArchitecture) -> str | None:
    """Obstacle in its settings, with the defaults of the family, or in its modules."""
    if architecture.sees_prompts:  # it is given them with media alone, which say where they end
        return None
    # A multimodal model has layers beside the language model, which `require_text_alone` tests.
    if (obstacle := _obstacle_of_config(architecture.config)) or architecture.is_part:
        return obstacle
    return _obstacle_of_model(architecture.outline)


def _refusal(name: str, obstacle: str) -> UserError:
    return UserError(f"{name} {obstacle}; {_TRAINED}")


def _obstacle_of_settings(settings: Mapping[str, Any]) -> str | None:
    """Reason in config.json to refuse a model, or None.

    It continues a sentence that begins with the model's name.

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
        return "combines a language model with encoders for images or audio"
    # Its causal language model reads text alone too.
    if model_type != "phi4_multimodal" and (others := sorted(parts - _NO_OTHER_INPUT)):
        return f"needs inputs beside tokens, such as those of its {others[0]}"
    return None


def _obstacle_of_config(config: PretrainedConfig) -> str | None:
    """Reason in the settings, with the defaults of the family, to refuse a model, or None."""
    if config.is_encoder_decoder:
        return "is an encoder-decoder model"
    if getattr(config, "add_cross_attention", False):
        return "needs the output of an encoder (add_cross_attention is true in its config.json)"
    # BERT and its kind have both keys, and attend in both directions unless is_decoder is true.
    has_both = hasattr(config, "is_decoder") and hasattr(config, "add_cross_attention")
    if has_both and not config.is_decoder:
        return (
            "is an encoder, whose tokens attend to later ones (is_decoder is not true in its "
            "config.json)"
        )
    # "vision": only tokens of images (Gemma 4).
    if getattr(config, "use_bidirectional_attention", False) not in (False, None, "vision"):
        return "lets tokens attend to later ones (use_bidirectional_attention in its config.json)"
    # Before transformers had kv_sharing_modes, Gemma 3n shared them by its cache.
    if getattr(config, "num_kv_shared_layers", 0) and not hasattr(config, "kv_sharing_modes"):
        return "has blocks that reuse keys and values of others from a cache, which training lacks"
    return None


def _obstacle_of_model(model: PreTrainedModel) -> str | None:
    """Reason in the modules of a model on the meta device to refuse it, or None."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        return "has no linear layer at its end"
    # Dory's, for one, has a learned factor for each token. The loss reads the weight alone.
    if type(layer).forward is not nn.Linear.forward:
        return f"has a head that computes more than a linear layer ({type(layer).__name__})"
    ours = (f"{model_name(model)}.", f"{head_name(model)}.")
    # By identity, because an output layer may be reachable under several names.
    head = set(map(id, layer.parameters()))
    others = [
        name
        for name, parameter in model.named_parameters()
        if not name.startswith(ours) and id(parameter) not in head
    ]
    if not others:
        return None
    return f"has layers between its last block and its head ({others[0].rpartition('.')[0]})"


def require_text_alone(whole: PreTrainedModel, language: str, name: str) -> None:
    """Refuse a model whose language model computes something else on its own.

    The language model is trained alone, on text. So the whole model must call it with the
    embeddings of the tokens and their positions, and nothing else.

    Args:
        whole: on the meta device; it cannot be used afterwards.
        language: name of the language model in it.
        name: of the model, for the message.

    Raises:
        UserError: the whole model does more on text; says what.
    """
    # Tried, not listed by family: PaliGemma, for one, sees prompts in both directions.
    tokens = _plain_tokens(whole.config)
    called = call_apart(whole, language, tokens, torch.zeros(*tokens.shape, 1, device="cpu"))
    reason = next(_differences(called), None)
    if reason:
        raise UserError(
            f"{name} is a {type(whole).__name__}, which {reason}: its language model cannot be "
            "trained alone. Choose another model."
        )


def _plain_tokens(config: PretrainedConfig) -> Tensor:
    """Return [1, tokens] ids of text, none of which stands for images or audio."""
    special = set(_numbers(config.to_dict()))
    # Any integer in the settings may be the id of an image token.
    ids = [number for number in range(1, 10_000) if number not in special]
    return torch.tensor([ids[:_TOKENS]], device="cpu")


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)
    elif isinstance(value, int):
        yield value


def _differences(called: Called) -> Iterator[str]:
    """Describe each argument of a call that the tokens and their positions do not determine."""
    places = torch.arange(_TOKENS, device="cpu")
    for key, value in called.arguments.items():
        match key:
            case "input_ids":
                is_plain = value is None or torch.equal(value, called.tokens)
            case "per_layer_inputs":  # see `_Given.get_per_layer_inputs`
                is_plain = value is None or torch.equal(value, called.tokens)
            case "inputs_embeds":
                is_plain = value is None or _is_same(value, called.embeddings)
            case "position_ids" | "cache_position":
                is_plain = value is None or bool((value == places).all())
            case "attention_mask":
                # None, one mask, or one for each kind of layer.
                if not all(map(_is_causal, _tensors(value))):
                    yield "lets tokens attend to later ones"
                continue
            case _:
                # Flags and numbers may be passed on, tensors may not: they would carry what text
                # adds.
                is_plain = not any(True for _ in _tensors(value))
        if not is_plain:
            yield f"computes its own {key} from text"


def _is_same(value: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal; on the meta device, only shapes are compared."""
    return value.shape == expected.shape and (value.is_meta or torch.equal(value, expected))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _is_causal(mask: Tensor) -> bool:
    """Return whether each token sees itself and all tokens before it, and no other."""
    if mask.ndim == 2:  # a mask of padding
        return bool((mask != 0).all())
    # A boolean mask is true where a token is seen; an additive one is 0 there.
    seen = mask if mask.dtype == torch.bool else mask == 0
    return torch.equal(seen[0, 0], torch.ones_like(seen[0, 0]).tril())
