"""How records say what their texts are: by a label."""

from ftkit.data.records.shape_rows import PreferenceRow

ROWS = (
    PreferenceRow(
        name="classes",
        columns=("label",),
        reader_place="ftkit.extensions.heads.labels:ClassReader",
        renderer_place="ftkit.extensions.heads.rendering:ClassRenderer",
        label_place="ftkit.extensions.heads.labels:label_text",
        turns="all",
    ),
)
