"""The kinds of models that the extension computes."""

from ftkit.recipe.companions import CompanionRow

ROWS = tuple(
    CompanionRow(name=name, module="ftkit.extensions.other_models.code")
    for name in ("reference", "teacher")
)
