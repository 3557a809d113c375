"""The hub that names without another's mean."""

from ftkit.recipe.hubs import Hub

ROWS = (
    Hub(
        name="hub",
        models="ftkit.extensions.hub.models",
        data_sets="ftkit.extensions.hub.data_sets:HubData",
        files="ftkit.extensions.hub.data_files:DataSetFiles",
    ),
)
