"""The body of an architecture."""

from ftkit.architectures.architecture import Architecture
from ftkit.architectures.litgpt_architecture import LitgptArchitecture
from ftkit.bodies.body import Body
from ftkit.bodies.litgpt_body import LitgptBody


def body_of(architecture: Architecture) -> Body:
    """Modules of an architecture, with its head, on torch's default device."""
    if isinstance(architecture, LitgptArchitecture):
        return LitgptBody(architecture.config)
    # These import transformers, which takes as long as all the rest.
    from ftkit.architectures.transformers.architecture import TransformersArchitecture
    from ftkit.bodies.transformers.body import TransformersBody

    assert isinstance(architecture, TransformersArchitecture), "the other implementation"
    return TransformersBody(architecture)
