"""The language model within a model of transformers that sees or hears, too.

It is trained alone, on text. That it computes what it computes within the whole model is looked at
where the whole model calls it: with the embeddings of the tokens, their places, and nothing else.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from ftkit.errors import UserError
from ftkit.models.architectures.transformers.outline import Called, call_apart

_TOKENS = 3
"""Of the text that a whole model is called with; fewer than any window has."""


def whole_class_name(model_type: str) -> str | None:
    """The class of a model of which the language model is a part; None: it is all of the model."""
    if model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return None
    known = model_type in CONFIG_MAPPING_NAMES
    is_composite = known and "text_config" in CONFIG_MAPPING[model_type].sub_configs
    return str(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]) if is_composite else None


def language_model_name(whole: PreTrainedModel) -> str:
    """The name of the language model in a whole model; its head is beside it."""
    found = whole.get_decoder()
    if found.get_output_embeddings() is not None:  # the head is in it
        found = next(part for part in found.children() if isinstance(part, PreTrainedModel))
    return next(name for name, module in whole.named_modules() if module is found)


def require_text_alone(whole: PreTrainedModel, language: str, name: str) -> None:
    """Refuse a model whose language model is not on its own what it is within the whole.

    Args:
        whole: on the meta device; it is of no use afterwards.
        language: name of the language model in it.
        name: of the model, for the message.

    Raises:
        UserError: what the whole model does on text beside calling it.
    """
    tokens = _plain_tokens(whole.config)
    called = call_apart(whole, language, tokens, torch.zeros(*tokens.shape, 1, device="cpu"))
    reason = next(_differences(called), None) or _unused_layers(whole.config)
    if reason:
        raise UserError(
            f"{name} is a {type(whole).__name__}, which {reason}: its language model cannot be "
            "trained alone. Choose another model."
        )


def _plain_tokens(config: PretrainedConfig) -> Tensor:
    """[1, tokens], ids that stand for no image or sound."""
    special = set(_numbers(config.to_dict()))
    ids = [number for number in range(1, 10_000) if number not in special]
    return torch.tensor([ids[:_TOKENS]], device="cpu")


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)
    elif isinstance(value, int):
        yield value


def _differences(called: Called) -> Iterator[str]:
    """What a call says beside embeddings of the tokens and their places, in words."""
    places = torch.arange(_TOKENS, device="cpu")
    for key, value in called.arguments.items():
        match key:
            case "input_ids":
                is_plain = value is None or torch.equal(value, called.tokens)
            case "inputs_embeds":
                is_plain = value is None or _is_same(value, called.embeddings)
            case "position_ids" | "cache_position":
                is_plain = value is None or bool((value == places).all())
            case "attention_mask":
                if not all(map(_is_causal, _tensors(value))):
                    yield "has tokens see others that come after them"
                continue
            case _:
                is_plain = not any(True for _ in _tensors(value))
        if not is_plain:
            yield f"computes {key} of its own from a text"


def _is_same(value: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal; of one that was moved to the meta device, the shape alone."""
    return value.shape == expected.shape and (value.is_meta or torch.equal(value, expected))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _is_causal(mask: Tensor) -> bool:
    """Whether a token sees itself and all before it, and no other."""
    if mask.ndim == 2:  # which tokens are real
        return bool((mask != 0).all())
    seen = mask if mask.dtype == torch.bool else mask == 0
    return torch.equal(seen[0, 0], torch.ones_like(seen[0, 0]).tril())


def _unused_layers(config: PretrainedConfig) -> str | None:
    if getattr(config.text_config, "cross_attention_layers", None):
        return "has layers between those of its language model that see images alone"
    return None
