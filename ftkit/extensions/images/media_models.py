"""Kinds of media that models take, by their names."""

from collections.abc import Mapping

from ftkit.extensions.images.audio_model import AudioModel
from ftkit.extensions.images.families import Family
from ftkit.extensions.images.image_model import ImageModel
from ftkit.extensions.images.media_model import MediaModel

MODELS: Mapping[str, type[MediaModel]] = {"image": ImageModel, "audio": AudioModel}
"""What is known of base models that take a kind."""


def family_of(model_type: str) -> Family | None:
    """Return the family of a type of models; None: ftkit gives it no media."""
    found = (model.family_of(model_type) for model in MODELS.values())
    return next((family for family in found if family is not None), None)
