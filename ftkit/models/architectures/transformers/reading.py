"""Reading of config.json for transformers' models: what is trained, or why a model is refused."""

from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ftkit.errors import UserError
from ftkit.models.architectures.transformers.architecture import TransformersArchitecture
from ftkit.models.architectures.transformers.obstacles import (
    obstacle_of_config,
    obstacle_of_model,
    obstacle_of_settings,
)
from ftkit.models.architectures.transformers.parts import require_text_alone, whole_class_name


def read_transformers_architecture(
    settings: Mapping[str, Any], name: str
) -> TransformersArchitecture:
    """The architecture that a config.json describes to transformers.

    Args:
        settings: its content.
        name: of the model, for messages.

    Raises:
        UserError: transformers has no such causal language model, or what it needs is missing.
        Exception: of any family's code, for settings that do not fit each other.
    """
    model_type = _known_type(settings, name)
    if obstacle := obstacle_of_settings(settings):
        raise _refusal(name, obstacle)
    is_part = whole_class_name(model_type) is not None
    architecture = TransformersArchitecture(settings)
    try:
        obstacle = _obstacle(architecture)
        if obstacle is None:
            architecture.parameter_shapes(tied=False)
            if is_part:
                require_text_alone(architecture.build(), architecture.language_name, name)
            architecture.logit_scale  # noqa: B018 (refuses what it does not know)
    except ImportError as error:
        needed = str(error).strip().partition("\n")[0]
        raise UserError(f"{name} is of model_type {model_type!r}: {needed}") from error
    if obstacle:
        raise _refusal(name, obstacle)
    return architecture


def _known_type(settings: Mapping[str, Any], name: str) -> str:
    """The model_type; UserError if transformers has no causal language model of it."""
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING_NAMES:
        code = " It brings code of its own, which ftkit does not run." * ("auto_map" in settings)
        raise UserError(
            f"{name} is of model_type {model_type!r}, which transformers "
            f"{transformers.__version__} does not know.{code} Choose another model, or a newer "
            "ftkit."
        )
    is_causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not is_causal and whole_class_name(model_type) is None:
        raise UserError(
            f"{name} is of model_type {model_type!r}, of which transformers has no causal language "
            "model. Choose another model."
        )
    return model_type


def _obstacle(architecture: TransformersArchitecture) -> str | None:
    """What its settings, with the defaults of the family, and its modules tell."""
    if (found := obstacle_of_config(architecture.config)) or architecture.is_part:
        return found
    return obstacle_of_model(architecture.outline)


def _refusal(name: str, obstacle: str) -> UserError:
    return UserError(
        f"{name} {obstacle}; ftkit trains causal language models. Choose another model."
    )
