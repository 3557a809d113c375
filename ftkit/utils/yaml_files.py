"""YAML files for recipes: safe, without duplicate keys, 2e-4 is a number and a date is text."""

import functools
import re
import sys
from pathlib import Path
from typing import Any, TextIO

import yaml

from ftkit.errors import UserError
from ftkit.redaction import printable
from ftkit.utils import embedded
from ftkit.utils.names import nearest

STANDARD_INPUT = Path("-")
"""File name that stands for standard input on a command line."""
_MOST_CHARACTERS = 2**18
"""Most characters of a file; recipes have a few thousand."""
_MOST_DIGITS = 1000
"""Most characters of a number: Python prints none of more than 4,300 digits, and base-60 numbers
such as 1:1:1 take quadratic time."""
_NUMBERS = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int")
_MOST_SHOWN = 40
"""Most characters of a value in a message."""
_MOST_LEVELS = 100
"""Most levels of nesting. Recipes have five; libraries raise Python's own limit."""
_MOST_VALUES = 100_000
"""Most values of a file, each counted as often as an alias repeats it."""


# PyYAML with three more rules, against mistakes that would otherwise train something else.
# ruamel.yaml and OmegaConf offer round trips and interpolation, which no recipe needs.
class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key that appears twice, and leaves dates as text."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._level += 1
        if self._level > _MOST_LEVELS:
            raise yaml.composer.ComposerError(None, None, "it is nested too deeply")
        node: yaml.Node | None = super().compose_node(parent, index)
        self._level -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            # << may occur several times, and its keys may be overridden.
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a single word", key_node.start_mark
                )
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} appears twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            if node.tag in _NUMBERS and len(node.value) > _MOST_DIGITS:
                raise ValueError
            return super().construct_object(node, deep)
        # PyYAML lets errors of conversion through, such as the ValueError of 0x_.
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError):
            kind, shown = node.tag.rpartition(":")[2], repr(node.value)
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{shown if len(shown) <= _MOST_SHOWN else f'{shown[:_MOST_SHOWN]} ...'} cannot be "
                f"read as {kind}",
                node.start_mark,
            ) from None


class _Dumper(yaml.SafeDumper):
    """Safe YAML that quotes every text that `_Loader` would read as a number."""


# Without timestamps, so that a date stays a text.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (_Loader, _Dumper):  # in YAML 1.1, a number with an exponent needs a dot and a sign
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def parse_yaml(text: str) -> Any:
    """Parse a YAML text.

    Raises:
        yaml.YAMLError: it is not valid, or too large with its aliases: see `_check_size`.
    """
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    # Before values are constructed: aliases can multiply a short text to any size.
    _check_size(node)
    return loader.construct_document(node)


def _check_size(root: yaml.Node) -> None:
    """Refuse YAML that contains itself, or that aliases make much larger than its text.

    Aliases share their node, so each node is counted once, in linear time.
    """
    sizes: dict[int, int] = {}
    inside = set()
    pending = [root]
    while pending:
        node = pending[-1]
        if id(node) in sizes:
            pending.pop()
            continue
        children = _children(node)
        unknown = [child for child in children if id(child) not in sizes]
        # Children first; the node stays below them and is visited again.
        if unknown and id(node) not in inside:
            inside.add(id(node))
            pending += unknown
            continue
        pending.pop()
        inside.discard(id(node))
        if unknown:
            # A child that is still unknown has this node among its descendants.
            raise yaml.composer.ComposerError(None, None, "it holds itself", node.start_mark)
        sizes[id(node)] = 1 + sum(sizes[id(child)] for child in children)
        if sizes[id(node)] > _MOST_VALUES:
            problem = f"it means more than {_MOST_VALUES:,} values, each alias counted"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def dump_yaml(values: dict[str, Any]) -> str:
    """Write keys and values, in their order, as `parse_yaml` reads them."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    # Characters that reorder a line of a terminal are escaped, with all others beyond ASCII.
    return text if printable(text) == text else yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def load_yaml(path: Path, option: str = "") -> dict[str, Any]:
    """Read the keys and values of a YAML file.

    Args:
        path: the file, `STANDARD_INPUT`, which may be read several times, or embedded:NAME.
        option: what named it on the command line, with a space at its end; for messages.

    Raises:
        UserError: it cannot be read, or does not hold keys and values.
    """
    try:
        loaded = parse_yaml(_text_of(path, option))
    except FileNotFoundError:
        raise UserError(_missing_file(path, option)) from None
    except UnicodeDecodeError as error:
        if path == STANDARD_INPUT:
            raise UserError(f"Standard input is not UTF-8 text: {error}.") from None
        from ftkit.utils.texts import explain_not_utf8

        with embedded.recipe_file(path).open("rb") as stream:
            raise UserError(option + explain_not_utf8(path, stream)) from None
    except OSError as error:
        raise UserError(f"{option}{path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise UserError(f"{option}{path} is not valid YAML: {error}") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{option}{path} must hold keys and values, such as 'seed: 1337'.")
    return loaded


def _text_of(path: Path, option: str) -> str:
    if path == STANDARD_INPUT:
        return _all_of(sys.stdin)
    file = embedded.recipe_file(path)
    if file.exists() and not file.is_file():  # it may block, have no end, or be readable only once
        raise UserError(
            f"{option}{path} is not a regular file.\n"
            "Give a file, or - to read the recipe from standard input."
        )
    with file.open(encoding="utf-8") as stream:
        return _limited(stream, f"{option}{path}")


# Kept, because standard input can be read only once and a recipe is parsed several times.
@functools.lru_cache(maxsize=1)
def _all_of(stream: TextIO) -> str:
    return _limited(stream, "Standard input")


def _limited(stream: TextIO, name: str) -> str:
    text = stream.read(_MOST_CHARACTERS + 1)
    if len(text) > _MOST_CHARACTERS:
        raise UserError(
            f"{name} has more than {_MOST_CHARACTERS:,} characters, which no recipe needs.\n"
            "Give a YAML file with the keys of a recipe."
        )
    return text


def _missing_file(path: Path, option: str) -> str:
    folder = path.parent
    beside = [str(folder / f.name) for f in folder.glob("*.y*ml")] if folder.is_dir() else []
    close = nearest(str(path), beside, cutoff=0.5)
    if close is None:  # also where there is no recipes/, beside an installed package
        name = path.name.removeprefix(embedded.PREFIX)
        close = nearest(f"{embedded.PREFIX}{name}", embedded.recipe_names(), cutoff=0.9)
    hint = f"Did you mean {close}?" if close else "Check the path."
    return f"{option}{path} does not exist. {hint}"
