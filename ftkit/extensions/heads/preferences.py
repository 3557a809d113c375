"""How records say what their texts are: by a label, or as a query with documents."""

from ftkit.data.records.shape_rows import PreferenceRow

ROWS = (
    PreferenceRow(
        name="classes",
        columns=("label", "text_pair"),
        reader_place="ftkit.extensions.heads.labels:ClassReader",
        renderer_place="ftkit.extensions.heads.rendering:ClassRenderer",
        label_place="ftkit.extensions.heads.labels:label_text",
        turns="all",
    ),
    PreferenceRow(
        name="queries",
        columns=("query", "positive", "negative"),
        reader_place="ftkit.extensions.heads.queries:QueryReader",
        renderer_place="ftkit.extensions.heads.rendering:QueryRenderer",
        label_place="ftkit.extensions.heads.queries:label_text",
        answers=("texts",),
        turns="all",
    ),
)
