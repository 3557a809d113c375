"""The file that --plugin names: what it defines, as rows of registries for the time of a run."""

MOVED = {
    "ftkit.data.plugin_data": "data",
    "ftkit.training.plugin_contents": "contents",
}
