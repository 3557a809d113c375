"""YAML files as recipes have them: safe, no key twice, 2e-4 a number and a date text."""

import functools
import re
import sys
from pathlib import Path
from typing import Any, TextIO

import yaml

from ftkit import embedded
from ftkit.errors import UserError
from ftkit.utils.nearest import nearest

STANDARD_INPUT = Path("-")
"""As a file of a command line."""


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key that appears twice, and leaves dates as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
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


class _Dumper(yaml.SafeDumper):
    """Safe YAML that quotes every text which `_Loader` would read as a number."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (_Loader, _Dumper):  # YAML 1.1 reads 2e-4 as text
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def parse_yaml(text: str) -> Any:
    """The value that a text stands for.

    Raises:
        yaml.YAMLError: it is not valid.
    """
    return yaml.load(text, _Loader)


def dump_yaml(values: dict[str, Any]) -> str:
    """Keys and values as `parse_yaml` reads them, in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def load_yaml(path: Path, option: str = "") -> dict[str, Any]:
    """The keys and values of a YAML file.

    Args:
        path: the file, `STANDARD_INPUT`, which may be asked for several times, or embedded:NAME.
        option: what named it on the command line, with a space at its end; for messages.

    Raises:
        UserError: it cannot be read, or does not hold keys and values.
    """
    try:
        loaded = parse_yaml(_text_of(path))
    except FileNotFoundError:
        raise UserError(_missing_file(path, option)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option}{path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise UserError(f"{option}{path} is not valid YAML: {error}") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{option}{path} must hold keys and values, such as 'seed: 1337'.")
    return loaded


def _text_of(path: Path) -> str:
    if path == STANDARD_INPUT:
        return _all_of(sys.stdin)
    return embedded.recipe_file(path).read_text(encoding="utf-8")


@functools.lru_cache(maxsize=1)
def _all_of(stream: TextIO) -> str:
    return stream.read()


def _missing_file(path: Path, option: str) -> str:
    folder = path.parent
    beside = [str(folder / f.name) for f in folder.glob("*.y*ml")] if folder.is_dir() else []
    close = nearest(str(path), beside, cutoff=0.5)
    if close is None:  # also where there is no recipes/, beside an installed package
        name = path.name.removeprefix(embedded.PREFIX)
        close = nearest(f"{embedded.PREFIX}{name}", embedded.recipe_names(), cutoff=0.9)
    hint = f"Did you mean {close}?" if close else "Check the path."
    return f"{option}{path} does not exist. {hint}"
