"""The architecture of a model in a directory, and whose code computes it."""

from pathlib import Path

from ftkit.architectures.architecture import Architecture, Implementation, ModelLayout
from ftkit.architectures.families import Settings, family_of_settings
from ftkit.architectures.litgpt_architecture import (
    LITGPT_SETTINGS,
    LitgptArchitecture,
    read_litgpt_architecture,
)
from ftkit.architectures.plausible import require_plausible
from ftkit.errors import UserError
from ftkit.utils.damaged_files import reading

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
        implementation: whose code computes it; None: LitGPT's where it knows the whole model, else
            transformers'.

    Raises:
        UserError: ftkit cannot run this model exactly, or a settings file is damaged.
    """
    if layout == "litgpt" and implementation == "transformers":
        raise UserError(
            f"model_implementation is transformers, but {name} is in LitGPT's layout. Try "
            "--model_implementation litgpt."
        )
    file = directory / "config.json"
    require_plausible(settings, file)
    if layout == "litgpt" or implementation == "litgpt":
        return _of_litgpt(directory, settings, name, layout)
    if implementation is None and family_of_settings(settings) is not None:
        try:
            known = _of_litgpt(directory, settings, name, layout)
        except UserError:
            pass  # transformers may run what LitGPT cannot
        else:
            if known.window is None:
                return known
    # It imports transformers, which takes as long as all the rest.
    from ftkit.architectures.transformers.reading import read_transformers_architecture

    with reading(file, "settings of which transformers makes a whole model", advice=_ADVICE):
        found = read_transformers_architecture(settings, name)
        _require_whole(found)
    return found


def _of_litgpt(
    directory: Path, settings: Settings, name: str, layout: ModelLayout
) -> LitgptArchitecture:
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
