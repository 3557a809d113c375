"""The row of the keys float8 and qat."""

from ftkit.extensions.torchao.keys import RoundingKeys, rounding
from ftkit.extensions.torchao.rounding import check_rounding
from ftkit.recipe.recipe_sections import Section

ROWS = (
    Section(
        name="torchao",
        keys=RoundingKeys,
        check=check_rounding,
        rounds=rounding,
        layers="ftkit.extensions.torchao.layers:round_layers",
    ),
)
