"""LitGPT as an optional library: its code computes some models and reads its layout."""

import importlib.util

from ftkit.errors import UserError

_INSTALL = "pip install --no-deps litgpt"
"""Without its dependencies, whose bounds exclude new libraries; ftkit has what it imports."""


def litgpt_is_installed() -> bool:
    """Whether LitGPT can be imported; it is not imported."""
    return importlib.util.find_spec("litgpt") is not None


def require_litgpt(why: str) -> None:
    """Refuse what needs LitGPT where it is not installed.

    Args:
        why: the first sentence of the message, which says what needs LitGPT.

    Raises:
        UserError: it is not installed; with the command that installs it.
    """
    if not litgpt_is_installed():
        raise UserError(f"{why} LitGPT is not installed.\nTry {_INSTALL}.")
