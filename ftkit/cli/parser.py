"""Parsing of a command line into the options of its command.

Values are the texts that were typed until this module or `ftkit.recipe.parsing` gives them types:
keys of recipes are merged with files first, and a prompt may look like YAML or begin with a dash.
"""

# Written by hand, while jsonargparse types recipes and prints all help. Its parse_args takes no
# words between options, no value that begins with a dash, no keys of components; it reads the
# prompt `null` as None and s3://b as a path; and importing it costs commands that read no recipe
# 45 ms. tests/cli/test_command_lines.py holds what each command line means.

import dataclasses
import functools
import math
import typing
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ftkit.cli.command import Command
from ftkit.errors import UserError
from ftkit.recipe.parsing import Override
from ftkit.recipe.recipe_keys import COMPONENTS, SPELLINGS, accepted_types, describe, field_texts
from ftkit.utils.names import nearest
from ftkit.utils.urls import is_url, local_path


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A word or an option, as a field of a class of `ftkit.recipe.options` declares it."""

    name: str
    kind: Any
    """Its type."""
    default: Any
    """None also where it is required."""
    required: bool
    rules: Mapping[str, Any]
    """See `option` and `word` of `ftkit.recipe.options`."""
    owner: type
    """The class of options."""

    @property
    def text(self) -> str:
        """Help text of the option."""
        return field_texts(self.owner).get(self.name, "")

    @property
    def is_word(self) -> bool:
        """True if it stands alone, without ``--``."""
        return "word" in self.rules

    @property
    def is_switch(self) -> bool:
        """True if it takes no value."""
        return self.kind is bool

    @property
    def takes_several(self) -> bool:
        """True if it may be given several times."""
        return typing.get_origin(self.kind) is tuple

    @property
    def placeholder(self) -> str:
        """Placeholder of the value in help; "": derived from its type."""
        return str(self.rules.get("placeholder", ""))

    @property
    def choices(self) -> list[str]:
        """Words that it takes, or suggests where it takes others too; [] if it takes any text."""
        if (names := self.rules.get("names")) is not None:
            return list(names())
        literals = [k for k in accepted_types(self.kind) if typing.get_origin(k) is Literal]
        return [str(choice) for kind in literals for choice in typing.get_args(kind)]


@functools.cache
def declared(options: type) -> tuple[Declared, ...]:
    """Return what a class of options declares: words, its own options, inherited options."""
    found = [
        Declared(
            name=f.name,
            kind=f.type,
            default=None if f.default is dataclasses.MISSING else f.default,
            required=f.default is dataclasses.MISSING,
            rules=f.metadata,
            owner=options,
        )
        for f in dataclasses.fields(options)
        if not f.metadata.keys() & {"keys", "line"}
    ]
    # A class has its own options in __annotations__, without those that it inherits.
    own = options.__annotations__
    return tuple(sorted(found, key=lambda i: (not i.is_word, not i.is_word and i.name not in own)))


def heads_of(options: type) -> tuple[str, ...] | None:
    """First parts of the recipe keys that a command takes; (): of all; None: it takes none.

    Where heads are named, the field is named after the one it has.
    """
    found = [f.metadata["keys"] for f in dataclasses.fields(options) if "keys" in f.metadata]
    return found[0] if found else None


def components_of(options: type) -> list[str]:
    """Components (data, optimizer, strategy) whose keys a command takes."""
    heads = heads_of(options)
    return [] if heads is None else [name for name in COMPONENTS if name in heads or not heads]


@dataclass
class Line:
    """A command line, sorted by kind and not checked yet."""

    words: list[str] = field(default_factory=list)
    values: list[Override] = field(default_factory=list)
    """Options with their values, in the order given."""
    switches: set[str] = field(default_factory=set)
    """--help is one of them."""
    components: list[tuple[str, str]] = field(default_factory=list)
    """The component and the name of each --data.help, --optimizer.help and --strategy.help."""


def split_line(command: Command, argv: Sequence[str]) -> Line:
    """Sort a command line into words, `--key value` or `--key=value`, and switches.

    Raises:
        UserError: a value where none is expected, or none where one is.
    """
    items = declared(command.options)
    switches = {item.name for item in items if item.is_switch} | {"help"}
    helps = {f"{name}.help" for name in components_of(command.options)}
    # A word beyond these is a value without its key; it is refused below.
    room = math.inf if any(i.is_word and i.takes_several for i in items) else _words(command)
    line = Line()
    rest = deque(argv)
    switch = ""  # the word before, if it is one
    while rest:
        text = rest.popleft()
        text = "--help" if text == "-h" else text
        if switch and text in ("true", "false"):
            raise UserError(f"--{switch} is a switch and takes no value. Try --{switch}.")
        switch = ""
        if not text.startswith("-") and len(line.words) < room:
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
        elif key in helps:
            name = value if equals else rest.popleft() if rest else ""
            line.components.append((key.partition(".")[0], name if name[:1] != "-" else ""))
        else:
            line.values.append((key, value if equals else _value_of(command, key, rest)))
    return line


def read_options(command: Command, line: Line, argv: Sequence[str] = ()) -> Any:
    """Type and check the options of a command line.

    Args:
        command: whose options they are.
        line: the sorted command line.
        argv: the command line as it was typed, without the name of the command.

    Raises:
        UserError: an unknown option, a value that it does not take, or something is missing.
    """
    items = declared(command.options)
    known = _options(command)
    given: dict[str, Any] = dict.fromkeys(line.switches - {"help"}, True)
    keys = []
    for key, text in line.values:
        if (item := known.get(key)) is not None:
            value = _typed(command, item, text)
            # Of an option that is given twice the last one counts, unless it takes several.
            given[key] = (*given.get(key, ()), value) if item.takes_several else value
        elif _takes_key(command, key):
            keys.append((key, text))
        else:
            raise UserError(_unknown(command, key))
    words = iter(line.words)
    # A word may also be given as --NAME VALUE: the next word then fills the next place.
    for item in (item for item in items if item.is_word and item.name not in given):
        if item.takes_several:
            given[item.name] = tuple(words)
        elif text := next(words, ""):
            given[item.name] = _typed(command, item, text)
    for text in words:
        raise UserError(f"{text!r} is not an option. Write --KEY VALUE{_advice(command)}.")
    for item in items:
        # An empty text counts as missing.
        if item.required and not given.get(item.name):
            raise UserError(_missing(command, item))
    for place in dataclasses.fields(command.options):
        if "keys" in place.metadata:
            given[place.name] = tuple(keys)
        elif "line" in place.metadata:
            given[place.name] = ("ftkit", command.name, *argv)
    return command.options(**given)


def parse(command: Command, argv: Sequence[str]) -> Any:
    """The options of a command line that does not ask for help.

    Raises:
        UserError: see `split_line` and `read_options`.
    """
    return read_options(command, split_line(command, argv), argv)


def _words(command: Command) -> int:
    return sum(item.is_word for item in declared(command.options))


def _value_of(command: Command, key: str, rest: deque[str]) -> str:
    # "-- x" and "-x" are values: prompts begin so.
    if not rest or (rest[0].startswith("--") and not rest[0][2:3].isspace()):
        known = _options(command)
        alone: str | None = known[key].rules.get("alone") if key in known else None
        if alone is not None:
            return alone
        if key not in known and not _takes_key(command, key):
            raise UserError(_unknown(command, key))
        close = None if key in known else nearest(key, known)
        hint = f" Did you mean --{close}?" if close else ""
        raise UserError(f"--{key} needs a value: --{key} VALUE.{hint}")
    return rest.popleft()


def _advice(command: Command) -> str:
    takes_keys = heads_of(command.options) == ()
    return ", such as --devices 1" if takes_keys else f"; see ftkit {command.name} --help"


def _options(command: Command) -> dict[str, Declared]:
    """Everything that may be given as --NAME: options, and words that take one text each."""
    return {
        item.name: item
        for item in declared(command.options)
        if not (item.is_word and item.takes_several)
    }


def _takes_key(command: Command, key: str) -> bool:
    heads = heads_of(command.options)
    return heads is not None and (not heads or key.partition(".")[0] in heads)


def _unknown(command: Command, key: str) -> str:
    close = nearest(key, _options(command))
    hint = f"Did you mean --{close}?" if close else f"See ftkit {command.name} --help."
    return f"--{key} is not an option of ftkit {command.name}. {hint}"


def _missing(command: Command, item: Declared) -> str:
    if item.is_word:
        name, works = item.placeholder, f"ftkit {command.name} {command.examples[0]}"
    else:
        works = f"--{item.name} {item.rules.get('example') or ', '.join(item.choices)}"
        name = f"--{item.name}"
    ask = item.rules.get("ask", "")
    advice = "" if ask.endswith(".") else f" Try {works}."
    return f"{name} is missing: {ask or item.text}{advice}"


def _typed(command: Command, item: Declared, text: str) -> Any:
    """Convert the text of an option to its type."""
    text = SPELLINGS.get(item.name, {}).get(text, text)
    if item.takes_several:
        return text
    words = item.choices
    # Apart from words, an option has one type besides None.
    (accepted, *_) = accepted_types(item.kind)
    least, most = item.rules.get("least"), item.rules.get("most")
    try:
        if words:
            # Where str is accepted too, the words are only those that are known.
            is_closed = str not in accepted_types(item.kind) or item.rules.get("names") is not None
            if text not in words and is_closed:
                raise ValueError
            return text
        # A url would silently become a relative path.
        if accepted is Path and is_url(text):
            if item.rules.get("takes_url"):
                return local_path(text)
            name = item.placeholder if item.is_word else f"--{item.name}"
            usage = f"ftkit {command.name}" if item.is_word else name
            raise UserError(
                f"{name} is {text}, but must be a path of this machine. "
                f"Try {usage} {Path(text).name or 'out'}."
            )
        # The type itself converts: int, float, str and Path refuse with a ValueError what they
        # cannot take.
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
    least, most = item.rules.get("least"), item.rules.get("most")
    if words := item.choices:
        return " or ".join(words) if len(words) == 2 else f"one of {', '.join(words)}"
    if most is not None:
        return f"{describe(item.kind)} between {least} and {most}"
    return describe(item.kind) + ("" if least is None else f" of at least {least}")
