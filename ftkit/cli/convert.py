"""ftkit convert: a file of another program as a recipe, and an explanation of each of its keys."""

import textwrap
from collections.abc import Iterator
from typing import Any

from ftkit.recipe.foreign.table import Row, Translation
from ftkit.recipe.options import ConvertOptions
from ftkit.recipe.parsing import convert
from ftkit.utils.json_values import without_secrets
from ftkit.utils.yaml_files import dump_yaml

_WIDTH = 98


def print_converted(options: ConvertOptions) -> int:
    """Print the recipe that a file becomes.

    Raises:
        UserError: no other program reads the file, or ftkit would learn something else.
    """
    translation, _ = convert(str(options.file), options.terms, options.tool)
    for line in explained(str(options.file), translation):
        for part in textwrap.wrap(line, _WIDTH, subsequent_indent="    ") or [""]:
            print(f"# {part}".rstrip())
    print(dump_yaml(without_secrets(nested(translation))), end="")
    return 0


def explained(file: str, translation: Translation) -> Iterator[str]:
    """An explanation of each key of a file, a line each."""
    yield f"The recipe that {file} becomes, a file of {translation.program.name}."
    groups = (("Became keys of ftkit:", "ours"), ("Have no effect here:", "no effect"))
    for title, kind in groups:
        lines = [_line(k, v, row) for k, v, row in translation.became if row.kind == kind]
        yield from (title, *lines) if lines else ()
    unused = [k for k, v, row in translation.became if row.kind == "not there"]
    unused = [key for key in unused if key not in translation.accepted]
    if unused:
        yield f"ftkit has no such keys, and these values ask for nothing: {', '.join(unused)}"
    if translation.accepted:
        yield f"Left out, as --without says: {', '.join(translation.accepted)}"
    if translation.differs:
        yield "What differs:"
        yield from (f"  {text}" for text in translation.differs)
    yield f"All other keys of the recipe are defaults of {translation.program.name}."


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


def _line(key: str, value: Any, row: Row) -> str:
    if row.kind == "ours":
        note = f" ({row.note})" if row.note else ""
        return f"  {key} -> {', '.join(row.ours)}{note}"
    return f"  {key}: {row.note}"
