"""The row of the keys images.*."""

from ftkit.extensions.images.keys import ImageKeys, check, trained
from ftkit.recipe.recipe_sections import Section

ROWS = (
    Section(
        name="images",
        keys=ImageKeys,
        check=check,
        encoder="ftkit.extensions.images.encoder:TowerEncoder",
        parts=trained,
    ),
)
