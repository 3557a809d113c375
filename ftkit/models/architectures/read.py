"""The architecture of a model in a directory, and whose code computes it."""

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
from ftkit.models.architectures.litgpt_library import litgpt_is_installed, require_litgpt
from ftkit.models.architectures.plausible import require_plausible
from ftkit.utils.damaged_files import reading

if TYPE_CHECKING:
    from ftkit.models.architectures.litgpt_architecture import LitgptArchitecture

Settings = Mapping[str, Any]
"""The content of a config.json."""
_FEWEST_POSITIONS = 2
"""One token has nothing to predict."""
_ADVICE = "Take it from the original model, or choose another model."


def read_architecture(
    directory: Path,
    settings: Settings,
    name: str,
    layout: ModelLayout,
    implementation: Implementation | None = None,
) -> Architecture:
    """The architecture of the model in a directory.

    Args:
        directory: with the settings files of its layout.
        settings: the content of its config.json; empty where there is none.
        name: of the model; chooses LitGPT's prompt style.
        layout: of the directory.
        implementation: whose code computes it; None: LitGPT's where it is installed and knows the
            whole model, else transformers'.

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
        return _of_litgpt(directory, settings, name, layout)
    if implementation == "litgpt":
        require_litgpt(f"{name} is computed by LitGPT's code (model_implementation).")
        return _of_litgpt(directory, settings, name, layout)
    if implementation is None and (known := _known_to_litgpt(directory, settings, name)):
        return known
    # It imports transformers, which takes as long as all the rest.
    from ftkit.models.architectures.transformers.reading import read_transformers_architecture

    with reading(file, "settings of which transformers makes a whole model", advice=_ADVICE):
        found = read_transformers_architecture(settings, name)
        _require_whole(found)
    return found


def _known_to_litgpt(directory: Path, settings: Settings, name: str) -> "LitgptArchitecture | None":
    """The architecture as LitGPT's code computes the whole model; None: it cannot, or is absent."""
    if not litgpt_is_installed():
        return None
    from ftkit.models.architectures.families import family_of_settings

    if family_of_settings(settings) is None:
        return None
    try:
        known = _of_litgpt(directory, settings, name, "hf")
    except UserError:
        return None  # transformers may run what LitGPT cannot
    return known if known.window is None else None


def _of_litgpt(
    directory: Path, settings: Settings, name: str, layout: ModelLayout
) -> "LitgptArchitecture":
    from ftkit.models.architectures.litgpt_architecture import read_litgpt_architecture

    file = directory / (LITGPT_SETTINGS if layout == "litgpt" else "config.json")
    with reading(file, "settings of which LitGPT makes a whole model", advice=_ADVICE):
        found = read_litgpt_architecture(directory, settings, name, layout)
        if found.window is None or layout == "litgpt":  # else transformers computes it
            _require_whole(found)
    return found


def _require_whole(architecture: Architecture) -> None:
    """Have everything made that follows from the settings, which fails where they are damaged."""
    if architecture.context_length < _FEWEST_POSITIONS:
        raise ValueError(f"it has {architecture.context_length} positions")
    architecture.parameter_shapes(tied=False)
    architecture.attention  # noqa: B018 (fails where heads and sizes are no numbers)
    architecture.expert_share  # noqa: B018
    architecture.identity()
