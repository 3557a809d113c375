"""Reading of architectures: of models in a directory, or known by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import (
    LITGPT_SETTINGS,
    Architecture,
    Implementation,
    ModelLayout,
)
from ftkit.models.architectures.checks import litgpt_is_installed, require_litgpt, require_plausible
from ftkit.utils.damaged_files import reading

if TYPE_CHECKING:
    from litgpt.config import Config

    from ftkit.models.architectures.litgpt_architecture import LitgptArchitecture


Settings = Mapping[str, Any]
"""The content of a config.json."""
_FEWEST_POSITIONS = 2
"""A sequence of one token has nothing to predict."""
_ADVICE = "Take it from the original model, or choose another model."
_PLAIN_ROPE = {"rope_type": "default"}


def read_architecture(
    directory: Path,
    settings: Settings,
    name: str,
    layout: ModelLayout,
    implementation: Implementation | None = None,
) -> Architecture:
    """Read the architecture of the model in a directory.

    Args:
        directory: with the settings files of its layout.
        settings: the content of its config.json; empty if there is none.
        name: of the model; chooses LitGPT's prompt style.
        layout: of the directory.
        implementation: library whose code computes it; None: LitGPT if it is installed, can
            compute the whole model and has the layers of transformers, otherwise transformers.

    Raises:
        UserError: ftkit cannot run this model exactly, a settings file is damaged, or the model
            needs LitGPT, which is not installed.
    """
    if layout == "litgpt" and implementation == "transformers":
        raise UserError(
            f"model_implementation is transformers, but {name} is in LitGPT's layout. Try "
            "--model_implementation litgpt."
        )
    file = directory / "config.json"
    require_plausible(settings, file)
    if layout == "litgpt":
        require_litgpt(f"{name} is in LitGPT's layout.")
        return _litgpt_architecture(directory, settings, name, layout)
    if implementation == "litgpt":
        require_litgpt(f"{name} is computed by LitGPT's code (model_implementation).")
        return _litgpt_architecture(directory, settings, name, layout)
    # LitGPT first; transformers for what its code cannot compute whole.
    if implementation is None and (known := _known_to_litgpt(directory, settings, name)):
        return known
    # Imported here: transformers takes as long as all other imports.
    from ftkit.models.architectures.transformers_reading import read_transformers_architecture

    # The code of a family may raise anything for settings that do not fit each other.
    with reading(file, "settings of which transformers makes a whole model", advice=_ADVICE):
        architecture = read_transformers_architecture(settings, name)
        _require_whole(architecture)
    return architecture


def _known_to_litgpt(directory: Path, settings: Settings, name: str) -> "LitgptArchitecture | None":
    """LitGPT's architecture if it is installed and computes what transformers does."""
    if not litgpt_is_installed():
        return None
    from ftkit.models.architectures.families import family_of_settings

    family = family_of_settings(settings)
    # Adapters of fused layers learn something else than those of the layers apart, and what is
    # learned must not depend on what is installed.
    if family is None or family.is_fused:
        return None
    try:
        known = _litgpt_architecture(directory, settings, name, "hf")
    except UserError:
        return None  # transformers may run what LitGPT cannot
    # With LitGPT's code, positions end at the window; transformers computes the whole context.
    return known if known.window is None else None


def _litgpt_architecture(
    directory: Path, settings: Settings, name: str, layout: ModelLayout
) -> "LitgptArchitecture":
    from ftkit.models.architectures.litgpt_architecture import read_litgpt_architecture

    file = directory / (LITGPT_SETTINGS if layout == "litgpt" else "config.json")
    with reading(file, "settings of which LitGPT makes a whole model", advice=_ADVICE):
        architecture = read_litgpt_architecture(directory, settings, name, layout)
        if architecture.window is None or layout == "litgpt":  # otherwise transformers computes it
            _require_whole(architecture)
    return architecture


def _require_whole(architecture: Architecture) -> None:
    """Compute everything that follows from the settings, which fails if they are damaged."""
    if architecture.context_length < _FEWEST_POSITIONS:
        raise ValueError(f"it has {architecture.context_length} positions")
    architecture.parameter_shapes(tied=False)
    architecture.attention  # noqa: B018 (fails if heads and sizes are not numbers)
    architecture.expert_share  # noqa: B018
    architecture.identity()


def known_architecture(
    name: str, implementation: Implementation | None = None
) -> tuple[str, Architecture] | None:
    """Find a model that LitGPT knows: ORG/NAME on the hub and its architecture, or None.

    The same library computes it as in Hugging Face's layout: transformers for mixtures of experts,
    windows, fused layers and OLMo 2, with a config.json made of LitGPT's sizes; LitGPT for models
    that its sizes do not describe to transformers (Falcon, Phi 1 and 2, OLMo 1, StableLM 3B).

    Args:
        name: ORG/NAME or LitGPT's own name, in upper or lower case.
        implementation: library whose code computes it; None: as above.

    Raises:
        UserError: this name does not work with that implementation, or LitGPT is not installed.
    """
    if implementation == "litgpt":
        require_litgpt(f"{name} is computed by LitGPT's code (model_implementation).")
    if not litgpt_is_installed():
        return None
    from ftkit.models.architectures.litgpt_architecture import find_by_hub_name

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


def default_architecture(model_type: str) -> Architecture | None:
    """Default configuration of a model type of transformers; None: there is no such type.

    Raises:
        UserError: the model is refused; with the reason.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    from ftkit.models.architectures.transformers_reading import read_transformers_architecture

    name = f"random:{model_type}"
    try:
        return read_transformers_architecture({"model_type": model_type}, name)
    # A refusal is the answer; what else the code of the family raises becomes one below.
    except UserError:
        raise
    except Exception as error:  # the code of any family may raise anything
        raise UserError(
            f"checkpoint_dir {name}: the default settings of {model_type} do not describe a whole "
            f"model: transformers fails with them ({type(error).__name__}: {error}).\nGive a "
            "directory with the config.json of a model."
        ) from error


def _settings_of(known: "LitgptArchitecture") -> dict[str, Any] | None:
    """Make a config.json for a model that LitGPT knows; None: its sizes are not enough."""
    from litgpt.config import Config

    from ftkit.models.architectures import families

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


def _of_experts(config: "Config") -> dict[str, Any]:
    """Settings of Mixtral and Qwen3-MoE."""
    chosen = {"num_experts_per_tok": config.n_expert_per_token}
    # Of both families, only Qwen3 normalises queries and keys.
    if config.norm_qk:
        of_experts = {"moe_intermediate_size": config.moe_intermediate_size}
        named = {"model_type": "qwen3_moe", "num_experts": config.n_expert}
        return chosen | named | of_experts
    named = {"model_type": "mixtral", "num_local_experts": config.n_expert}
    return chosen | named | {"sliding_window": None}


def _of_fused(config: "Config") -> dict[str, Any]:
    """Settings of Phi-3 and GPT-NeoX."""
    rotary = {"partial_rotary_factor": config.rotary_percentage}
    if config.norm_class_name == "RMSNorm":
        return rotary | {"sliding_window": config.sliding_window_size}
    return rotary | {
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.parallel_residual,
        "hidden_act": "gelu_new" if config.gelu_approximate == "tanh" else "gelu",
    }


def _of_gemma(config: "Config") -> dict[str, Any]:
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
