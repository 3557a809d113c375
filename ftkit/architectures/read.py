"""The architecture of a model in a directory, and whose code computes it."""

from pathlib import Path

from ftkit.architectures.architecture import Architecture, Implementation, ModelLayout
from ftkit.architectures.families import FAMILIES, Settings
from ftkit.architectures.litgpt_architecture import read_litgpt_architecture
from ftkit.errors import UserError


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
    if layout == "litgpt":
        if implementation == "transformers":
            raise UserError(
                f"model_implementation is transformers, but {name} is in LitGPT's layout. Try "
                "--model_implementation litgpt."
            )
        return read_litgpt_architecture(directory, settings, name, layout)
    if implementation == "litgpt":
        return read_litgpt_architecture(directory, settings, name, layout)
    if implementation is None and settings.get("model_type") in FAMILIES:
        try:
            known = read_litgpt_architecture(directory, settings, name, layout)
        except UserError:
            pass  # transformers may run what LitGPT cannot
        else:
            if known.window is None:
                return known
    # It imports transformers, which takes as long as all the rest.
    from ftkit.architectures.transformers.reading import read_transformers_architecture

    return read_transformers_architecture(settings, name)
