"""The body of an architecture."""

from ftkit.models.architectures.architecture import Architecture
from ftkit.models.bodies.body import Body


def body_of(architecture: Architecture) -> Body:
    """Modules of an architecture, with its head, on torch's default device."""
    # Each is imported where it is needed alone: it takes as long as all the rest, or is absent.
    if architecture.implementation == "litgpt":
        from ftkit.models.architectures.litgpt_architecture import LitgptArchitecture
        from ftkit.models.bodies.litgpt_body import LitgptBody

        assert isinstance(architecture, LitgptArchitecture)
        return LitgptBody(architecture.config)
    from ftkit.models.architectures.transformers.architecture import TransformersArchitecture
    from ftkit.models.bodies.transformers.body import TransformersBody

    assert isinstance(architecture, TransformersArchitecture), "the other implementation"
    return TransformersBody(architecture)
