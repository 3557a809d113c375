"""How the file that --plugin names is read."""

from ftkit.recipe.plugin import PluginReader

ROWS = (
    PluginReader(
        "python",
        open="ftkit.extensions.plugin.reading:open_plugin",
        rows="ftkit.extensions.plugin.rows:in_registries",
    ),
)
