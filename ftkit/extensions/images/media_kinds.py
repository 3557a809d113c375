"""The kind of media that images are."""

from ftkit.data.records.media import MediaKind

ROWS = (
    MediaKind(
        name="image",
        mark="<image>",
        columns=("images", "image"),
        parts=("image", "image_url"),
        reference_place="ftkit.extensions.images.files:reference",
        renderer_place="ftkit.extensions.images.rendering:renderer",
        prompter_place="ftkit.extensions.images.rendering:ImagePrompter",
        encoder_place="ftkit.extensions.images.encoder:ImageEncoder",
        simulated_place="ftkit.extensions.images.simulated:images_of_size",
    ),
)
