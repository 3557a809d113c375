"""The implementation of models that this extension brings."""

from ftkit.recipe.implementations import ImplementationRow

ROWS = (
    ImplementationRow(
        name="litgpt",
        title="LitGPT",
        names="ftkit.extensions.litgpt.names:spellings",
        module="ftkit.extensions.litgpt.code",
        # Its dependencies have bounds that exclude new libraries; ftkit installs what it imports.
        install="pip install --no-deps litgpt",
        settings_file="model_config.yaml",
        weights_file="lit_model.pth",
    ),
)
