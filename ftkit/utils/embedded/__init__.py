"""Files that come with ftkit, so that a first run needs no download.

`quickstart` holds a tiny base model in Hugging Face layout (`model/`) and instructions in Alpaca
format (`data/train.json`, `data/val.json`), `preference` pairs of answers to such instructions. The
scripts `make_quickstart_model` and `make_quickstart_data` make them. `chats`, `tools`, `reasoning`
and `documents` are small examples, about a library that does not exist, for the recipes of what
people do. `recipes` is the directory of that name of the repository; in an installed package a copy
of it.
"""

from pathlib import Path

PREFIX = "embedded:"
"""Prefix of the name of a model, of data or of a recipe that comes with ftkit."""
# A symbolic link in the repository, so that there is one copy; wheels hold the files.
_RECIPES = Path(__file__).parent / "recipes"


def path(name: str) -> Path:
    """Directory of the embedded set `name`; it need not exist."""
    return Path(__file__).parent / name


def recipe_file(file: Path) -> Path:
    """Resolve embedded:NAME.yaml to the recipe that comes with ftkit; other files stay."""
    name = str(file)
    return _RECIPES / name.removeprefix(PREFIX) if name.startswith(PREFIX) else file


def recipe_names() -> list[str]:
    """Names of recipes and sweeps that come with ftkit, with the prefix `embedded:`."""
    return [f"{PREFIX}{f.relative_to(_RECIPES)}" for f in sorted(_RECIPES.rglob("*.yaml"))]
