"""What this extension does for the core: see `ftkit.models.architectures.implementation.Code`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from litgpt.config import Config

from ftkit.errors import UserError
from ftkit.extensions.litgpt import families
from ftkit.extensions.litgpt.architecture import (
    SETTINGS,
    WEIGHTS,
    LitgptArchitecture,
    find_by_hub_name,
    read_litgpt_architecture,
)
from ftkit.models.architectures.architecture import Architecture, Implementation, ModelLayout
from ftkit.models.architectures.implementation import Settings
from ftkit.models.architectures.read import require_whole, whole_model
from ftkit.models.pretrained.base_model import BaseModel, licences
from ftkit.models.pretrained.save import (
    ends_in_files,
    facts_of_weights,
    save_beside,
    settings_without_code,
    storage_for,
    written_directory,
)
from ftkit.models.pretrained.weight_files import Tensors, write_settings
from ftkit.recipe.implementations import HF

_PLAIN_ROPE = {"rope_type": "default"}


def read(directory: Path, settings: Settings, name: str, layout: ModelLayout) -> LitgptArchitecture:
    """Read the architecture of the model in a directory."""
    file = directory / (SETTINGS if layout != HF else "config.json")
    with whole_model(file, "LitGPT"):
        architecture = read_litgpt_architecture(directory, settings, name, layout)
        # Otherwise transformers computes it.
        if architecture.window is None or layout != HF:
            require_whole(architecture)
    return architecture


def chosen(directory: Path, settings: Settings, name: str) -> LitgptArchitecture | None:
    """Architecture of a directory that transformers would compute with the same layers."""
    family = families.family_of_settings(settings)
    # Adapters of fused layers learn something else than those of the layers apart, and what is
    # learned must not depend on what is installed.
    if family is None or family.is_fused:
        return None
    try:
        known = read(directory, settings, name, HF)
    except UserError:
        return None  # transformers may run what LitGPT cannot
    # With LitGPT's code, positions end at the window; transformers computes the whole context.
    return known if known.window is None else None


def known(name: str, implementation: Implementation | None) -> tuple[str, Architecture] | None:
    """Find a model that LitGPT knows.

    The same library computes it as in Hugging Face's layout: transformers for mixtures of experts,
    windows, fused layers and OLMo 2, with a config.json made of LitGPT's sizes; LitGPT for models
    that its sizes do not describe to transformers (Falcon, Phi 1 and 2, OLMo 1, StableLM 3B).
    """
    found = find_by_hub_name(name)
    if found is None or implementation == "litgpt":
        return found
    hub_name, known = found
    # The rule of `read_architecture`: a plan without a download must predict the run that follows
    # it. LitGPT's own entries cut windows, and do not tie Gemma 3's head.
    is_same = known.family is not None and not known.family.is_fused and known.window is None
    if implementation is None and is_same:
        return found
    settings = _settings_of(known)
    if settings is None:
        if implementation is None:
            return found
        raise UserError(
            f"model_implementation is transformers, but {hub_name} is known to LitGPT by this "
            "name, without a config.json. Try --model_implementation litgpt, or give the directory "
            "of the model."
        )
    # Imported here: transformers takes as long as all other imports.
    from ftkit.models.architectures.transformers_reading import read_transformers_architecture

    return hub_name, read_transformers_architecture(settings, known.name)


def save(
    base: BaseModel,
    tensors: Tensors,
    out: Path,
    *,
    overwrite: bool = False,
    others: Mapping[str, bytes] | None = None,
) -> None:
    """Write a model in LitGPT's layout: lit_model.pth and model_config.yaml.

    The directory appears complete or not at all. Memory holds one tensor at a time. LitGPT only
    reads weights by torch.load, so this is ftkit's one file that is a pickle. It holds nothing but
    tensors: torch's restricted loader (weights_only) reads it. A tied head is written too, as
    LitGPT expects it. Arguments and errors are those of `save_hf`.
    """
    from litgpt.utils import incremental_save

    storage = storage_for(base, "litgpt")
    embedding, head = ends_in_files(base, storage)
    stored: dict[str, Any] = {}
    with written_directory(out, overwrite) as partial:
        with incremental_save(partial / WEIGHTS) as file:
            for name, tensor in storage.written(tensors):
                # A storage of its own: a view of a mapped file would bring the whole file.
                stored[name] = file.store_early(tensor.detach().cpu().clone())
                # config.json names the number format of the embedding.
                if name == embedding:
                    dtype = tensor.dtype
            tied = head not in stored
            # Both names refer to one storage, which the file holds once.
            if tied:
                stored[head] = stored[embedding]
            file.save(stored)
        own = yaml.dump(base.architecture.settings_in("litgpt"))
        (partial / SETTINGS).write_text(own, encoding="utf-8")
        if settings := settings_without_code(base.settings):
            write_settings(
                partial / "config.json",
                settings | facts_of_weights(settings, base, dtype, tied=tied),
            )
        save_beside(base, {**dict(licences(base)), **(others or {})}, partial)


def _settings_of(known: LitgptArchitecture) -> dict[str, Any] | None:
    """Make a config.json for a model that LitGPT knows; None: its sizes are not enough."""
    config = Config.from_name(known.name)  # with its whole context
    sizes = families.shared_settings(config)
    if config.n_expert:
        return sizes | _of_experts(config)
    if config.norm_qk_type == "olmo2":
        return sizes | {"model_type": "olmo2"}
    if config.mlp_class_name == "GemmaMLP" and config.sliding_window_size:
        return sizes | _of_gemma(config)
    family = known.family
    if family is not None and family.is_fused:
        return sizes | {"model_type": family.model_type} | _of_fused(config)
    return None if family is None else families.huggingface_settings(config, family)


def _of_experts(config: Config) -> dict[str, Any]:
    """Settings of Mixtral and Qwen3-MoE."""
    chosen = {"num_experts_per_tok": config.n_expert_per_token}
    # Of both families, only Qwen3 normalises queries and keys.
    if config.norm_qk:
        of_experts = {"moe_intermediate_size": config.moe_intermediate_size}
        named = {"model_type": "qwen3_moe", "num_experts": config.n_expert}
        return chosen | named | of_experts
    named = {"model_type": "mixtral", "num_local_experts": config.n_expert}
    return chosen | named | {"sliding_window": None}


def _of_fused(config: Config) -> dict[str, Any]:
    """Settings of Phi-3 and GPT-NeoX."""
    rotary = {"partial_rotary_factor": config.rotary_percentage}
    if config.norm_class_name == "RMSNorm":
        return rotary | {"sliding_window": config.sliding_window_size}
    return rotary | {
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.parallel_residual,
        "hidden_act": "gelu_new" if config.gelu_approximate == "tanh" else "gelu",
    }


def _of_gemma(config: Config) -> dict[str, Any]:
    """Settings of Gemma 2, and of the language model of Gemma 3."""
    # LitGPT has 1 for a layer with the sliding window, and 0 for one without.
    kinds = ("full_attention", "sliding_attention")
    settings = {
        "layer_types": [kinds[is_sliding] for is_sliding in config.sliding_window_indices],
        "sliding_window": config.sliding_window_size,
        "query_pre_attn_scalar": config.attention_scores_scalar,
        "attn_logit_softcapping": config.attention_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    # Only Gemma 3 rotates differently in layers with and without a window.
    if config.rope_local_base_freq is None:
        return settings | {"model_type": "gemma2"}
    scaling = config.rope_adjustments
    # The larger Gemma 3 models stretch the positions of global layers alone.
    kind = {"rope_type": "linear", "factor": scaling["factor"]} if scaling else _PLAIN_ROPE
    rope = {
        "full_attention": kind | {"rope_theta": float(config.rope_base)},
        "sliding_attention": _PLAIN_ROPE | {"rope_theta": float(config.rope_local_base_freq)},
    }
    return settings | {"model_type": "gemma3_text", "rope_parameters": rope}
