"""The kind of media that images are."""

from ftkit.data.records.media import MediaKind

ROWS = (
    MediaKind(
        name="image",
        mark="<image>",
        columns=("images", "image"),
        parts=("image", "image_url"),
        reference_place="ftkit.extensions.images.files:reference",
        settings_place="ftkit.extensions.images.image_model:settings_of",
        renderer_place="ftkit.extensions.images.rendering:renderer",
        look_place="ftkit.extensions.images.looks:look",
        encoder_place="ftkit.extensions.images.encoder:ImageEncoder",
    ),
)
