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
        """Read the architecture of the model in a directory.

        Args:
            directory: with the settings files of its layout.
            settings: the content of its config.json; empty if there is none.
            name: of the model.
            layout: of the directory.

        Raises:
            UserError: it cannot run this model exactly.
            Exception: the settings do not describe a whole model.
        """

    def chosen(self, directory: Path, settings: Settings, name: str) -> Architecture | None:
        """Architecture of a Hugging Face directory that it computes where none is asked for.

        None: it cannot compute the model, or what is learned would depend on which of both does.
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
