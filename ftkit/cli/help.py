"""Help and completion of every command, as parsers of jsonargparse."""

import argparse
import re
import shutil
import textwrap
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from ftkit.cli.commands import FTKIT, Command, Group
from ftkit.cli.component_keys import KNOWN_WITHOUT_IMPORTS, component_keys, component_names
from ftkit.recipe.command_options import (
    Declared,
    components_of,
    declared,
    field_texts,
    heads_of,
)
from ftkit.recipe.parsing import add_recipe_keys
from ftkit.recipe.recipe import FINETUNE, Method
from ftkit.recipe.recipe_keys import key_types, placeholder_of


class Help(DefaultHelpFormatter):
    """Help in words: choices and kinds as placeholders, defaults as a recipe has them."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if getattr(action, "_required", False) and action.nargs != "*":
            return f"{text} Required."
        switch = action.nargs == 0
        if switch or default in (None, argparse.SUPPRESS) or "Default:" in text:
            return text
        if isinstance(default, dict):
            default = default["class_path"].rpartition(".")[2]
        return f"{text} Default: {str(default).lower() if isinstance(default, bool) else default}."

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Examples keep their lines."""
        if text.startswith("Examples:"):
            return "".join(f"{indent}{line}\n" for line in text.splitlines())
        return super()._fill_text(text, width, indent)


def parser_of(entry: Command | Group) -> ArgumentParser:
    """A command or a group with what it takes; the commands of a group: see `add_members`."""
    if isinstance(entry, Command):
        return _command_parser(entry)
    prog = f"ftkit {entry.name}".strip()
    parser = ArgumentParser(
        prog=prog,
        usage=f"{prog} {entry.usage}",
        description=entry.text,
        epilog=entry.epilog,
        formatter_class=Help,
    )
    if entry is FTKIT:
        parser.add_argument("--version", action="store_true", help="Show the version and exit.")
    return parser


def add_members(parser: ArgumentParser, group: Group, *, in_full: bool) -> None:
    """Give the parser of a group its commands: only once it is itself in its place (jsonargparse).

    Args:
        parser: of the group.
        group: what it is of.
        in_full: with their options, which only completion needs.
    """
    commands = parser.add_subcommands(required=False)
    for name, member in group.by_name.items():
        inner = parser_of(member) if in_full else ArgumentParser(prog=f"ftkit {member.name}")
        commands.add_subcommand(name, inner, help=member.summary)
        if in_full and isinstance(member, Group):
            add_members(inner, member, in_full=True)


def print_help(entry: Command | Group) -> None:
    """Show what a command takes, or which commands a group has."""
    parser = parser_of(entry)
    if isinstance(entry, Group):
        add_members(parser, entry, in_full=False)
    parser.print_help()


def print_component_help(component: str, name: str) -> None:
    """Show the keys of a data module, an optimizer or a strategy; "": which there are.

    Raises:
        UserError: there is none of this name.
    """
    parser = ArgumentParser(
        prog="ftkit", usage=argparse.SUPPRESS, formatter_class=Help, add_help=False
    )
    if not name:
        names = component_names(component)
        parser.description = f"--{component} takes one of: {', '.join(names)}."
        parser.epilog = f"--{component}.help NAME shows the keys of one."
    elif not _add_component_keys(parser, component, name):
        parser.description = f"--{component} {name} has no keys of its own."
    parser.print_help()


def _add_component_keys(parser: ArgumentParser, component: str, name: str) -> bool:
    """Add a section with the keys of a component; whether it has any."""
    keys = component_keys(component, name)
    if not keys:
        return False
    group = parser.add_argument_group(f"Keys of --{component} {name}")
    for key in keys:
        default = list(key.default) if isinstance(key.default, tuple) else key.default
        group.add_argument(
            f"--{component}.{key.name}",
            metavar=placeholder_of(key.kind),
            default=default,
            required=key.required,
            help=key.text,
        )
    return True


def _command_parser(command: Command) -> ArgumentParser:
    prog = f"ftkit {command.name}"
    usages = (f"{prog} {usage}" for usage in command.usage or (_usage(command),))
    examples = "".join(f"\n  {prog} {example}" for example in command.examples)
    parser = ArgumentParser(
        prog=prog,
        usage="\n       ".join(line for usage in usages for line in _usage_lines(usage)),
        description=command.text,
        epilog=f"Examples:{examples}",
        formatter_class=Help,
    )
    for item in declared(command.options):
        if item.is_word:
            _add_word(parser, item)
    for head in heads_of(command.options) or ():
        text = field_texts(command.options)[head]
        parser.add_argument(f"--{head}", metavar="NAME", help=text)
    for item in declared(command.options):
        if not item.is_word:
            _add_option(parser, item)
    if command.name in FINETUNE:
        _add_recipe(parser, FINETUNE[command.name])
    if components := components_of(command.options):
        group = parser.add_argument_group("Keys of data, optimizers and strategies by name")
        for component in components:
            text = f"Show the keys of --{component} NAME; without NAME: which names there are."
            group.add_argument(f"--{component}.help", metavar="NAME", nargs="?", help=text)
    return parser


def _usage(command: Command) -> str:
    """Words, options that have to be given, and the others if they are few."""
    words: list[str] = []
    options: list[str] = []
    for item in declared(command.options):
        shown = item.placeholder if item.is_word else f"--{item.name}"
        if not item.is_word and not item.is_switch:
            shown += f" {item.placeholder or '|'.join(item.choices) or placeholder_of(item.kind)}"
        shown += "..." if item.is_word and item.takes_several else ""
        (words if item.is_word else options).append(shown if item.required else f"[{shown}]")
    few = len(options) <= 2 and heads_of(command.options) is None
    needed = [option for option in options if not option.startswith("[")]
    return " ".join([*words, *(options if few else [*needed, "[--KEY VALUE ...]"])])


def _usage_lines(usage: str) -> list[str]:
    """As many lines as a usage takes on the terminal; what is in brackets stays together."""
    width = shutil.get_terminal_size().columns - len("usage: ") - 1
    whole = re.sub(r"\[[^]]*\]", lambda bracket: bracket[0].replace(" ", _NO_BREAK), usage)
    lines = textwrap.wrap(
        whole, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_NO_BREAK, " ") for line in lines]


_NO_BREAK = "\xa0"


def _add_word(parser: ArgumentParser, item: Declared) -> None:
    nargs = None if item.required else "?"
    if item.takes_several:
        nargs = "+" if item.required else "*"
    parser.add_argument(item.name, metavar=item.placeholder, nargs=nargs, help=item.text)


def _add_option(parser: ArgumentParser, item: Declared) -> None:
    name = f"--{item.name}"
    if item.is_switch:
        parser.add_argument(name, action="store_true", help=item.text)
        return
    shown: dict[str, Any] = {"metavar": item.placeholder or placeholder_of(item.kind)}
    if item.choices:
        shown = {"choices": item.choices}
    default = None if item.takes_several else item.default
    parser.add_argument(name, default=default, required=item.required, help=item.text, **shown)


def _add_recipe(parser: ArgumentParser, method: Method) -> None:
    """Every key of a recipe."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    add_recipe_keys(parser, method)
    kinds = key_types(method)
    for action in parser._actions:
        if action.dest in kinds:
            action.metavar = placeholder_of(kinds[action.dest])
            # jsonargparse offers --KEY+ to append to a list
            action.option_strings = [o for o in action.option_strings if not o.endswith("+")]
        elif any(key.startswith(f"{action.dest}.") for key in kinds):
            action.help = argparse.SUPPRESS  # a group as a whole: for recipe files
    for component, name in KNOWN_WITHOUT_IMPORTS:
        _add_component_keys(parser, component, name)
