"""Training files of other programs, read as recipes: axolotl, LLaMA-Factory, torchtune, TRL."""

MOVED = {
    "ftkit.recipe.translation": "translation",
    "ftkit.recipe.value_types": "value_types",
}
