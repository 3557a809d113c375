"""What an implementation of models beside transformers provides."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ftkit.models.architectures.architecture import Architecture, Implementation, ModelLayout

Settings = Mapping[str, Any]
"""The content of a config.json."""


class Code(Protocol):
    """Functions of the module of an `ImplementationRow`; its library is installed."""

    def read(
        self, directory: Path, settings: Settings, name: str, layout: ModelLayout
    ) -> Architecture:
        """Read the architecture of the model in a directory; arguments as of `read_architecture`.

        Raises:
            UserError: it cannot run this model exactly, or the settings do not describe one.
        """

    def chosen(self, directory: Path, settings: Settings, name: str) -> Architecture | None:
        """Return the architecture of a Hugging Face directory if this code is to compute it.

        It is asked where the recipe names no implementation. None: transformers computes the
        model, because this code cannot, or would learn something else.
        """

    def known(
        self, name: str, implementation: Implementation | None
    ) -> tuple[str, Architecture] | None:
        """Find a model that it knows by name: ORG/NAME on the hub, and what computes it.

        Args:
            name: ORG/NAME or its own name, in upper or lower case.
            implementation: library whose code computes it; None: as in Hugging Face's layout.

        Raises:
            UserError: this name does not work with that implementation.
        """

    def save(
        self,
        base: Any,
        tensors: Any,
        out: Path,
        *,
        overwrite: bool = False,
        others: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write a model in its own layout; arguments and errors as of `save_hf`."""
