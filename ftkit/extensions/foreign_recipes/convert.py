"""ftkit convert: a file of another program as a recipe, and an explanation of each of its keys."""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftkit.extensions.foreign_recipes.commands import ConvertOptions
from ftkit.extensions.foreign_recipes.translation import Row, Translation
from ftkit.recipe.parsing import recipe_of_keys
from ftkit.recipe.readers import Terms, translated
from ftkit.recipe.recipe import Recipe
from ftkit.redaction import REMOVED
from ftkit.utils.json_values import secret_keys, with_secrets_hidden
from ftkit.utils.progress import print_shown
from ftkit.utils.yaml_files import dump_yaml, load_yaml

_WIDTH = 98


def print_converted(options: ConvertOptions) -> int:
    """Print the recipe that a file becomes.

    Raises:
        UserError: no other program reads the file, or ftkit would learn something else.
    """
    translation, _ = converted(str(options.file), options.terms)
    print(dump_yaml(with_secrets_hidden(nested(translation))))
    # Behind the recipe, which they would push out of sight, and as comments: all of it is the file.
    for line in explained(str(options.file), translation, options.terms):
        for part in textwrap.wrap(line, _WIDTH, subsequent_indent="    ") or [""]:
            print_shown(f"# {part}".rstrip())
    return 0


def converted(file: str, terms: Terms) -> tuple[Translation, Recipe]:
    """Translate a file of another program, and check the recipe that it becomes.

    Raises:
        UserError: see `read_recipe`, or it is no such file.
    """
    translation = translated(load_yaml(Path(file)), file, terms=terms)
    assert isinstance(translation, Translation)
    return translation, recipe_of_keys(translation.recipe)


def explained(file: str, translation: Translation, terms: Terms) -> Iterator[str]:
    """An explanation of each key of a file, a line each."""
    name = translation.program.name
    yield f"This recipe is what {file} becomes, a file of {name}."
    yield terms.batch_text
    groups = (("Became keys of ftkit:", "ours"), ("Have no effect here:", "no effect"))
    for title, kind in groups:
        lines = [
            _line(key, row)
            for key, value, row in translation.became
            if row.kind == kind and not _is_default(value, row)
        ]
        yield from (title, *lines) if lines else ()
    shown = ("ours", "no effect")
    defaults = [k for k, v, row in translation.became if row.kind in shown and _is_default(v, row)]
    if defaults:
        yield f"Are empty, or have the default of {name}: {', '.join(defaults)}"
    unused = [k for k, v, row in translation.became if row.kind == "not there"]
    unused = [key for key in unused if key not in translation.accepted]
    if unused:
        yield f"ftkit has no such keys, and these values ask for nothing: {', '.join(unused)}"
    if translation.accepted:
        yield f"Left out, as --without says: {', '.join(translation.accepted)}"
    if translation.differs:
        yield "What differs:"
        yield from (f"  {text}" for text in translation.differs)
    if secret := secret_keys(nested(translation)):
        options = " ".join(f"--{key.replace('.init_args.', '.')}" for key in secret)
        yield f"Hold a secret, which is not written ({REMOVED}); give it as {options}"
    yield f"All other keys of the recipe are defaults of {name}."


def nested(translation: Translation) -> dict[str, Any]:
    """The recipe as nested keys and values."""
    recipe: dict[str, Any] = {}
    for key, value in translation.recipe.items():
        group, _, name = key.rpartition(".")
        if group:
            recipe.setdefault(group, {})[name] = value
        else:
            recipe[name] = value
    return recipe


def _is_default(value: Any, row: Row) -> bool:
    """Return whether a value says no more than the absent key would."""
    return value in (None, "", [], {}) or (row.kind == "ours" and value == row.default)


def _line(key: str, row: Row) -> str:
    if row.kind == "ours":
        note = f" ({row.note})" if row.note else ""
        return f"  {key} -> {', '.join(row.ours)}{note}"
    return f"  {key}: {row.note}"
