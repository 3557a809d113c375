"""The kind of media that images are."""

from ftkit.data.records.media import MediaKind

LITERAL = "its text has the token of images"
"""Reason for a refusal of a record."""
DAMAGED = "an image of it is damaged, or of a shape that the model does not take"
"""Reason for a refusal of a record."""
WITHOUT = "it has no image, which the model needs"
"""Reason for a refusal of a record."""
ROWS = (
    MediaKind(
        name="image",
        mark="<image>",
        columns=("images", "image"),
        parts=("image", "image_url"),
        reference_place="ftkit.extensions.images.files:reference",
        settings_place="ftkit.extensions.images.image_model:settings_of",
        renderer_place="ftkit.extensions.images.rendering:renderer",
        prompter_place="ftkit.extensions.images.rendering:ImagePrompter",
        look_place="ftkit.extensions.images.looks:look",
        advice={
            LITERAL: "Write it in another way, or remove them.",
            DAMAGED: "Correct the images, or remove them.",
            WITHOUT: "Remove them, or train another model.",
        },
        encoder_place="ftkit.extensions.images.encoder:ImageEncoder",
        simulated_place="ftkit.extensions.images.simulated:images_of_size",
    ),
)
