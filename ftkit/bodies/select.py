"""The body of an architecture."""

from ftkit.architectures.architecture import Architecture
from ftkit.bodies.body import Body


def body_of(architecture: Architecture) -> Body:
    """Modules of an architecture, with its head, on torch's default device."""
    # Each is imported where it is needed alone: it takes as long as all the rest, or is absent.
    if architecture.implementation == "litgpt":
        from ftkit.architectures.litgpt_architecture import LitgptArchitecture
        from ftkit.bodies.litgpt_body import LitgptBody

        assert isinstance(architecture, LitgptArchitecture)
        return LitgptBody(architecture.config)
    from ftkit.architectures.transformers.architecture import TransformersArchitecture
    from ftkit.bodies.transformers.body import TransformersBody

    assert isinstance(architecture, TransformersArchitecture), "the other implementation"
    return TransformersBody(architecture)
