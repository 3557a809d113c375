"""The body of an architecture."""

from ftkit.architectures.architecture import Architecture
from ftkit.architectures.litgpt_architecture import LitgptArchitecture
from ftkit.bodies.body import Body
from ftkit.bodies.litgpt_body import LitgptBody


def body_of(architecture: Architecture) -> Body:
    """Modules of an architecture, with its head, on torch's default device."""
    assert isinstance(architecture, LitgptArchitecture), "the one implementation"
    return LitgptBody(architecture.config)
