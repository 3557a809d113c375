"""Architectures that are known by a name alone: LitGPT's, and the defaults of transformers."""

from collections.abc import Mapping
from typing import Any

from litgpt.config import Config

from ftkit.architectures.architecture import Architecture
from ftkit.architectures.litgpt_architecture import LitgptArchitecture, find_by_hub_name


def known_architecture(name: str) -> tuple[str, Architecture] | None:
    """ORG/NAME of a model on the hub, and its architecture, if LitGPT has its sizes.

    Mixtures of experts are run by transformers: LitGPT's own asks for values of tensors.

    Args:
        name: that one, or LitGPT's own, in any case of letters.
    """
    found = find_by_hub_name(name)
    if found is None or not found[1].config.n_expert:
        return found
    # It imports transformers, which takes as long as all the rest.
    from ftkit.architectures.transformers.reading import read_transformers_architecture

    settings = _settings_of_experts(found[1])
    return found[0], read_transformers_architecture(settings, found[1].name)


def default_architecture(model_type: str) -> Architecture | None:
    """The default configuration of a model type of transformers; None: it knows no such type.

    Raises:
        UserError: it is refused; says why.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        return None
    from ftkit.architectures.transformers.reading import read_transformers_architecture

    return read_transformers_architecture({"model_type": model_type}, f"random:{model_type}")


def _settings_of_experts(architecture: LitgptArchitecture) -> Mapping[str, Any]:
    """The config.json of LitGPT's mixtures of experts: Mixtral and Qwen3."""
    config: Config = architecture.config
    settings: dict[str, Any] = {
        "vocab_size": config.padded_vocab_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_query_groups,
        "head_dim": config.head_size,
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": float(config.rope_base),
        "num_experts_per_tok": config.n_expert_per_token,
    }
    if config.norm_qk:
        of_experts = {"moe_intermediate_size": config.moe_intermediate_size}
        named = {"model_type": "qwen3_moe", "num_experts": config.n_expert}
        return settings | named | of_experts
    named = {"model_type": "mixtral", "num_local_experts": config.n_expert}
    return settings | named | {"sliding_window": None}
