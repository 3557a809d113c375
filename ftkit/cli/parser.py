"""Parsing of a command line into the options of its command.

Values are texts as they were typed: keys of recipes are merged with files before they get types
(`ftkit.recipe.parsing`), and a prompt may look like YAML or begin with a dash.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ftkit.cli.commands import Command
from ftkit.errors import UserError
from ftkit.recipe.command_options import Declared, components_of, declared, heads_of
from ftkit.recipe.parsing import Override
from ftkit.recipe.recipe_keys import SPELLINGS, accepted_types, describe
from ftkit.utils.names import nearest
from ftkit.utils.remote.urls import is_url, local_path


@dataclass
class Line:
    """A command line, sorted."""

    words: list[str] = field(default_factory=list)
    values: list[Override] = field(default_factory=list)
    """Options with a value, in their order."""
    switches: set[str] = field(default_factory=set)
    asks_for_help: bool = False
    components: list[tuple[str, str]] = field(default_factory=list)
    """What --data.help, --optimizer.help and --strategy.help ask about; "": which there are."""


def split_line(command: Command, argv: Sequence[str]) -> Line:
    """Sort a command line: words, `--key value`, `--key=value` and switches.

    Raises:
        UserError: a value where none is expected, or none where one is.
    """
    switches = {item.name for item in declared(command.options) if item.is_switch} | {"help"}
    room = _most_words(command)
    line = Line()
    rest = iter(argv)
    switch = ""  # the word before, if it is one
    for text in rest:
        text = "--help" if text == "-h" else text
        if switch and text in ("true", "false"):
            raise UserError(f"--{switch} is a switch and takes no value. Try --{switch}.")
        switch = ""
        if not text.startswith("-") and (room is None or len(line.words) < room):
            line.words.append(text)
            continue
        if not text.startswith("--") or text == "--":
            raise UserError(f"{text!r} is not an option. Write --KEY VALUE{_advice(command)}.")
        key, equals, value = text[2:].partition("=")
        if key in switches:
            if equals:
                raise UserError(f"--{key} is a switch and takes no value. Try --{key}.")
            line.switches.add(key)
            switch = key
        elif key in _component_helps(command):
            about = value if equals else next(rest, "")
            line.components.append((key.partition(".")[0], about if about[:1] != "-" else ""))
        else:
            line.values.append((key, value if equals else _value_of(command, key, rest)))
    line.asks_for_help = "help" in line.switches
    return line


def read_options(command: Command, line: Line, argv: Sequence[str] = ()) -> Any:
    """The options of a command line, typed and checked.

    Args:
        command: whose they are.
        line: the command line, sorted.
        argv: the same as it was typed, without the name of the command.

    Raises:
        UserError: an unknown option, a value that it does not take, or something is missing.
    """
    known = {item.name: item for item in declared(command.options)}
    keys, own = _separated(command, line)
    given: dict[str, Any] = dict.fromkeys(line.switches & known.keys(), True)
    for key, text in own:
        value = _typed(known[key], text)
        given[key] = (*given.get(key, ()), value) if known[key].takes_several else value
    _take_words(command, line.words, given)
    for item in known.values():
        if item.required and not given.get(item.name):
            raise UserError(_missing(command, item))
    for place in fields(command.options):
        if "keys" in place.metadata:
            given[place.name] = tuple(keys)
        elif "line" in place.metadata:
            given[place.name] = ("ftkit", command.name, *argv)
    return command.options(**given)


def parse(command: Command, argv: Sequence[str]) -> Any:
    """The options of a command line that asks for no help.

    Raises:
        UserError: see `split_line` and `read_options`.
    """
    return read_options(command, split_line(command, argv), argv)


def _most_words(command: Command) -> int | None:
    """How many words may stand on their own; None: any number."""
    words = [item for item in declared(command.options) if item.is_word]
    return None if any(item.takes_several for item in words) else len(words)


def _component_helps(command: Command) -> set[str]:
    """The options that ask about a data module, an optimizer or a strategy."""
    return {f"{name}.help" for name in components_of(command.options)}


def _value_of(command: Command, key: str, rest: Iterator[str]) -> str:
    value = next(rest, None)
    if value is None or (value.startswith("--") and not value[2:3].isspace()):
        known = _options(command)
        if key not in known and not _takes_key(command, key):
            raise UserError(_unknown(command, key))
        close = None if key in known else nearest(key, known)
        hint = f" Did you mean --{close}?" if close else ""
        raise UserError(f"--{key} needs a value: --{key} VALUE.{hint}")
    return value


def _advice(command: Command) -> str:
    takes_keys = heads_of(command.options) == ()
    return ", such as --devices 1" if takes_keys else f"; see ftkit {command.name} --help"


def _options(command: Command) -> set[str]:
    """What may be given as --NAME: the options, and the words that take one text each."""
    return {
        item.name for item in declared(command.options) if not (item.is_word and item.takes_several)
    }


def _takes_key(command: Command, key: str) -> bool:
    """Whether a key may be of a recipe."""
    heads = heads_of(command.options)
    return heads is not None and (not heads or key.partition(".")[0] in heads)


def _unknown(command: Command, key: str) -> str:
    """What is said of an option that there is not."""
    close = nearest(key, _options(command))
    hint = f"Did you mean --{close}?" if close else f"See ftkit {command.name} --help."
    return f"--{key} is not an option of ftkit {command.name}. {hint}"


def _separated(command: Command, line: Line) -> tuple[list[Override], list[Override]]:
    """Keys of recipes, and the command's own options."""
    known = _options(command)
    keys, own = [], []
    for key, text in line.values:
        if key in known:
            own.append((key, text))
        elif _takes_key(command, key):
            keys.append((key, text))
        else:
            raise UserError(_unknown(command, key))
    return keys, own


def _take_words(command: Command, words: Sequence[str], given: dict[str, Any]) -> None:
    """Give words their places, in order; a place that an option of its name has taken is left."""
    places = (item for item in declared(command.options) if item.is_word and item.name not in given)
    rest = iter(words)
    for place in places:
        if place.takes_several:
            given[place.name] = tuple(rest)
        elif (text := next(rest, None)) is not None:
            given[place.name] = _typed(place, text)
    for text in rest:
        raise UserError(f"{text!r} is not an option. Write --KEY VALUE{_advice(command)}.")


def _missing(command: Command, item: Declared) -> str:
    """What is said where a word or an option is missing."""
    if item.is_word:
        what, works = item.placeholder, f"ftkit {command.name} {command.examples[0]}"
    else:
        works = f"--{item.name} {item.rules.get('example') or ', '.join(item.choices)}"
        what = f"--{item.name}"
    ask = item.rules.get("ask", "")
    advice = "" if ask.endswith(".") else f" Try {works}."
    return f"{what} is missing: {ask or item.text}{advice}"


def _typed(item: Declared, text: str) -> Any:
    """A value of the type that the option has.

    Raises:
        UserError: names a value that works.
    """
    text = SPELLINGS.get(item.name, {}).get(text, text)
    if item.takes_several:
        return text
    words = item.choices
    (accepted, *_) = accepted_types(item.kind)
    least, most = item.rules.get("least"), item.rules.get("most")
    try:
        if words:
            if text not in words and str not in accepted_types(item.kind):
                raise ValueError
            return text
        if accepted is Path and is_url(text):
            if item.rules.get("takes_url"):
                return local_path(text)
            raise UserError(
                f"{item.placeholder or item.name} is {text}, but must be a path of this machine. "
                f"Try {item.placeholder or item.name} {Path(text).name or 'out'}."
            )
        value = accepted(text)
        if isinstance(value, int | float) and not (
            (least is None or value >= least) and (most is None or value <= most)
        ):
            raise ValueError
    except ValueError:
        other = next((choice for choice in words if choice != item.default), item.default)
        example = nearest(text, words) or item.rules.get("example") or other
        raise UserError(
            f"--{item.name} is {text!r}, but must be {_expected(item)}. "
            f"Try --{item.name} {example}."
        ) from None
    return value


def _expected(item: Declared) -> str:
    """What an option takes, in words."""
    least, most = item.rules.get("least"), item.rules.get("most")
    if words := item.choices:
        return " or ".join(words) if len(words) == 2 else f"one of {', '.join(words)}"
    if most is not None:
        return f"{describe(item.kind)} between {least} and {most}"
    return describe(item.kind) + ("" if least is None else f" of at least {least}")
