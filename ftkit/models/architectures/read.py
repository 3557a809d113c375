"""Reading of architectures: of models in a directory, or known by name."""

from contextlib import AbstractContextManager
from pathlib import Path

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import Architecture, Implementation, ModelLayout
from ftkit.models.architectures.checks import require_plausible
from ftkit.models.architectures.implementation import Code, Settings
from ftkit.recipe.implementations import (
    HF,
    IMPLEMENTATIONS,
    TRANSFORMERS,
    ImplementationRow,
    implementation_row,
)
from ftkit.utils.damaged_files import reading

_FEWEST_POSITIONS = 2
"""A sequence of one token has nothing to predict."""
_ADVICE = "Take it from the original model, or choose another model."


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
        name: of the model.
        layout: of the directory.
        implementation: library whose code computes it; None: another than transformers if it is
            installed, can compute the whole model and has the layers of transformers.

    Raises:
        UserError: ftkit cannot run this model exactly, a settings file is damaged, or the model
            needs a library that is not installed.
    """
    if layout != HF and implementation not in (None, layout):
        raise UserError(
            f"model_implementation is {implementation}, but {name} is in "
            f"{implementation_row(layout).title}'s layout. Try --model_implementation {layout}."
        )
    file = directory / "config.json"
    require_plausible(settings, file)
    other = layout if layout != HF else implementation
    if other not in (None, TRANSFORMERS):
        row = implementation_row(other)
        row.require(
            f"{name} is in {row.title}'s layout."
            if layout != HF
            else f"{name} is computed by {row.title}'s code (model_implementation)."
        )
        return _code(row).read(directory, settings, name, layout)
    # Others first; transformers for what their code cannot compute whole.
    for row in IMPLEMENTATIONS if implementation is None else ():
        if row.is_installed and (found := _code(row).chosen(directory, settings, name)):
            return found
    # Imported here: transformers takes as long as all other imports.
    from ftkit.models.architectures.transformers_reading import read_transformers_architecture

    with whole_model(file, TRANSFORMERS):
        architecture = read_transformers_architecture(settings, name)
        require_whole(architecture)
    return architecture


def whole_model(file: Path, library: str) -> AbstractContextManager[None]:
    """Context in which a library makes a model of settings; what it raises is about the file."""
    # The code of a family may raise anything for settings that do not fit each other.
    return reading(file, f"settings of which {library} makes a whole model", advice=_ADVICE)


def _code(row: ImplementationRow) -> Code:
    found: Code = row.code()
    return found


def require_whole(architecture: Architecture) -> None:
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
    """Find a model that an implementation knows by name: ORG/NAME on the hub and its architecture.

    Args:
        name: ORG/NAME or the implementation's own name, in upper or lower case.
        implementation: library whose code computes it; None: as in Hugging Face's layout.

    Returns:
        None if none of them knows it.

    Raises:
        UserError: this name does not work with that implementation, or it is not installed.
    """
    for row in IMPLEMENTATIONS:
        if implementation == row.name:
            row.require(f"{name} is computed by {row.title}'s code (model_implementation).")
        if row.is_installed and (found := _code(row).known(name, implementation)):
            return found
    return None


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
