"""How records say which answers are better: pairs of answers, and answers with a label."""

from ftkit.data.records.shape_rows import PreferenceRow

ROWS = (
    PreferenceRow(
        name="pairs",
        columns=("chosen", "rejected"),
        reader_place="ftkit.extensions.preference.pairs:PairReader",
        renderer_place="ftkit.extensions.preference.rendering:PairRenderer",
        answers=("chosen", "rejected"),
    ),
    PreferenceRow(
        name="labels",
        reader_place="ftkit.extensions.preference.labels:LabelReader",
        renderer_place="ftkit.extensions.preference.rendering:LabelRenderer",
        label_place="ftkit.extensions.preference.labels:label_text",
        turns="last",  # the one that the label is of
    ),
)
