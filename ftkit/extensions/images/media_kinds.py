"""The kinds of media that images and audio are."""

from ftkit.data.records.media import MediaKind

LITERAL = {"image": "its text has the token of images", "audio": "its text has the token of audio"}
"""Reasons for a refusal of a record, by kind."""
DAMAGED = {
    "image": "an image of it is damaged, or of a shape that the model does not take",
    "audio": "audio of it is damaged, or longer or shorter than the model takes",
}
"""Reasons for a refusal of a record, by kind."""
WITHOUT = "it has no image, which the model needs"
"""Reason for a refusal of a record."""
_REWRITE = "Write it in another way, or remove them."
_HERE = "ftkit.extensions.images"
ROWS = (
    MediaKind(
        name="image",
        noun="images",
        counted=("image", "images"),
        mark="<image>",
        columns=("images", "image"),
        parts=("image", "image_url"),
        reference_place=f"{_HERE}.files:reference",
        settings_place=f"{_HERE}.image_model:settings_of",
        renderer_place=f"{_HERE}.rendering:renderer",
        prompter_place=f"{_HERE}.rendering:ImagePrompter",
        look_place=f"{_HERE}.looks:look",
        advice={
            LITERAL["image"]: _REWRITE,
            DAMAGED["image"]: "Correct the images, or remove them.",
            WITHOUT: "Remove them, or train another model.",
        },
        encoder_place=f"{_HERE}.encoder:TowerEncoder",
        simulated_place=f"{_HERE}.simulated:media_of_size",
    ),
    MediaKind(
        name="audio",
        noun="audio",
        counted=("piece of audio", "pieces of audio"),
        mark="<audio>",
        columns=("audios", "audio"),
        parts=("audio", "audio_url"),
        reference_place=f"{_HERE}.audio_files:reference",
        settings_place=f"{_HERE}.audio_model:settings_of",
        renderer_place=f"{_HERE}.rendering:renderer",
        prompter_place=f"{_HERE}.rendering:AudioPrompter",
        look_place=f"{_HERE}.audio_model:look",
        advice={
            LITERAL["audio"]: _REWRITE,
            DAMAGED["audio"]: "Correct the audio, or remove them.",
        },
        encoder_place=f"{_HERE}.encoder:TowerEncoder",
        simulated_place=f"{_HERE}.simulated:media_of_size",
    ),
)
