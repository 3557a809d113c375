"""Models of LitGPT's code, where its extension is there; else the test is skipped."""

from typing import Any

import pytest


def litgpt_part(name: str) -> Any:
    """Return a module of the extension."""
    return pytest.importorskip(f"ftkit.extensions.litgpt.{name}")


def litgpt_architecture(*arguments: Any) -> Any:
    """Return an architecture of a `litgpt.Config` and what else its class takes."""
    return litgpt_part("architecture").LitgptArchitecture(*arguments)
