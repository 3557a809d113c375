"""Libraries whose code computes models beside transformers, and their own layouts; no torch."""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.utils.registry import Registry, imported

AUTO = "auto"
"""The choice by the model: transformers, or another implementation with the same layers."""
TRANSFORMERS = "transformers"
"""The core's own implementation."""
FIRST = "litgpt"
"""The only implementation of early versions, whose files and fingerprints name none."""
HF = "hf"
"""The layout of a directory of Hugging Face's; others have the names of implementations."""


@dataclass(frozen=True, kw_only=True)
class ImplementationRow:
    """A library whose code computes models."""

    name: str
    """Also of its module, and of its layout if it has one."""
    title: str
    """In texts."""
    module: str
    """Module with the functions of `ftkit.models.architectures.implementation.Code`."""
    names: str
    """MODULE:FUNCTION that returns ORG/NAME on the hub by every spelling of a known name, in lower
    case; imports no torch."""
    install: str
    """Command that installs the library."""
    settings_file: str
    """Settings in a directory of its own layout."""
    weights_file: str
    """Weights there."""

    @property
    def is_installed(self) -> bool:
        """Whether the library is there; it is not imported."""
        return importlib.util.find_spec(self.name) is not None

    def require(self, why: str) -> None:
        """Refuse what needs the library where it is not installed.

        Args:
            why: the first sentence of the message, which says what needs it.

        Raises:
            UserError: the library is not installed.
        """
        if not self.is_installed:
            raise UserError(f"{why} {self.title} is not installed.\nTry {self.install}.")

    def holds(self, directory: Path) -> bool:
        """Return whether a directory holds a model in its layout."""
        return all((directory / name).is_file() for name in (self.settings_file, self.weights_file))

    def known_names(self) -> Mapping[str, str]:
        """Return ORG/NAME on the hub by every spelling of a known name; {}: it is not installed."""
        if not self.is_installed:
            return {}
        found: Mapping[str, str] = imported(self.names)()
        return found

    def code(self) -> Any:
        """Import its module."""
        return importlib.import_module(self.module)


IMPLEMENTATIONS: Registry[ImplementationRow] = Registry(
    "implementations", (ImplementationRow,), core=()
)


def implementation_names() -> list[str]:
    """Values of the key model_implementation."""
    return [AUTO, *IMPLEMENTATIONS.names, TRANSFORMERS]


def implementation_row(name: str) -> ImplementationRow:
    """Return an implementation beside transformers, or the one of a layout.

    Raises:
        UserError: the extension with it is not here.
    """
    row = IMPLEMENTATIONS.get(name)
    if row is None:
        known = ", ".join([*IMPLEMENTATIONS.names, TRANSFORMERS])
        raise UserError(
            f"This model is computed by the code of {name}, which this ftkit does not have: it has "
            f"{known}. Install ftkit with the extension {name}."
        )
    return row


def layout_in(directory: Path) -> str:
    """Return the layout of the model in a directory, by the names of its files."""
    return next((row.name for row in IMPLEMENTATIONS if row.holds(directory)), HF)


def layout_by_settings(directory: Path) -> str:
    """Return the layout of a model whose weights may not be there."""
    of = (row.name for row in IMPLEMENTATIONS if (directory / row.settings_file).is_file())
    return next(of, HF)
