"""Help and completion of every command, as parsers of jsonargparse."""

import argparse
import dataclasses
import re
import shutil
import textwrap
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from ftkit.cli.command import Command, Group
from ftkit.cli.commands import FTKIT
from ftkit.cli.parser import Declared, components_of, declared, heads_of
from ftkit.data.source_rows import DATA_SOURCES
from ftkit.errors import UserError
from ftkit.recipe.adapter_types import ADAPTER_TYPES
from ftkit.recipe.objectives import OBJECTIVES
from ftkit.recipe.optimizers import OPTIMIZERS, TORCH, OptimizerPackage
from ftkit.recipe.parsing import add_recipe_keys
from ftkit.recipe.plugin import own_names, own_path
from ftkit.recipe.recipe import FINETUNE
from ftkit.recipe.recipe_keys import (
    COMPONENTS,
    default_name,
    field_texts,
    key_types,
    placeholder_of,
)
from ftkit.recipe.recipe_sections import recipe_type
from ftkit.recipe.strategy_rows import STRATEGIES, strategy_names
from ftkit.utils.imports import quick_imports, silence_libraries
from ftkit.utils.names import nearest

_NOUNS = {
    "data": "data module",
    "objective": "objective",
    "optimizer": "optimizer",
    "peft": "kind of adapter",
    "strategy": "strategy",
}
_GIVEN_BY_FTKIT = {"params", "model_params", "args", "kwargs"}
# Docstrings of torch and bitsandbytes repeat the default, which help shows by itself.
_SIGNATURE_DEFAULT = re.compile(r"[\s,;]*\(default: [^()]*(\([^()]*\))?[^()]*\)")
_NO_BREAK = "\xa0"

# Also the strings below the fields of the recipe and of other dataclasses.
set_parsing_settings(docstring_parse_attribute_docstrings=True)


class Help(DefaultHelpFormatter):
    """Help in words: choices and kinds as placeholders, defaults as a recipe has them."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = _SIGNATURE_DEFAULT.sub("", " ".join((action.help or "").split()))
        if "." in action.dest:  # texts of libraries: "learning rate (default: 1e-3)"
            text = f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""
        if action.required and action.option_strings:
            return f"{text} Required."
        default, switch = action.default, action.nargs == 0
        if switch or default in (None, argparse.SUPPRESS) or "Default:" in text:
            return text
        if isinstance(default, tuple):
            default = list(default)
        return f"{text} Default: {str(default).lower() if isinstance(default, bool) else default}."

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Examples keep their lines."""
        if text.startswith("Examples:"):
            return "".join(f"{indent}{line}\n" for line in text.splitlines())
        return super()._fill_text(text, width, indent)


def print_completion(shell: str) -> None:
    """Print a script that completes command lines in a shell.

    Raises:
        UserError: there is none for this shell.
    """
    parser = _group_parser(FTKIT)
    _add_members(parser, FTKIT, in_full=True)
    try:
        script = parser.get_completion_script(f"shtab-{shell}")
    except ValueError:
        raise UserError(
            f"--print_shtab is {shell!r}, but must be a shell, such as bash or zsh. "
            "Try --print_shtab=bash."
        ) from None
    print(script)


def print_help(entry: Command | Group) -> None:
    """Print the help of a command or a group."""
    if isinstance(entry, Command):
        parser = _command_parser(entry)
    else:
        parser = _group_parser(entry)
        _add_members(parser, entry, in_full=False)
    parser.print_help()


def print_component_help(component: str, name: str) -> None:
    """Print the keys of a data module, an optimizer or a strategy.

    Args:
        component: data, optimizer or strategy.
        name: which one, as a recipe names it; "": only the names are listed.

    Raises:
        UserError: there is none of this name.
    """
    parser = ArgumentParser(usage=argparse.SUPPRESS, add_help=False, formatter_class=Help)
    if not name:
        names = ", ".join(_listed(component, known) for known in _component_names(component))
        parser.description = f"--{component} takes one of: {names}."
        parser.epilog = f"--{component}.help NAME shows the keys of one."
    elif not _add_component_keys(parser, component, name):
        parser.description = f"--{component} {name} has no keys of its own."
    parser.print_help()


def _group_parser(group: Group) -> ArgumentParser:
    prog = f"ftkit {group.name}".strip()
    parser = ArgumentParser(
        prog=prog,
        usage=f"{prog} {group.usage}",
        description=group.text,
        epilog=group.epilog,
        formatter_class=Help,
    )
    if group is FTKIT:
        parser.add_argument("--version", action="store_true", help="Show the version and exit.")
    return parser


def _add_members(parser: ArgumentParser, group: Group, *, in_full: bool) -> None:
    """Give the parser of a group its commands; with their options where completion needs them."""
    commands = parser.add_subcommands(required=False)
    for member in group.members:
        name = member.name.rpartition(" ")[2]
        if not in_full:
            inner = ArgumentParser(prog=f"ftkit {member.name}")
        elif isinstance(member, Command):
            inner = _command_parser(member)
        else:
            inner = _group_parser(member)
        commands.add_subcommand(name, inner, help=member.summary)
        if in_full and isinstance(member, Group):
            _add_members(inner, member, in_full=True)  # jsonargparse: once it is in its place
    for other in group.installed:
        inner = ArgumentParser(prog=f"ftkit {other.name}")
        text = f"{other.summary or 'a command'} (package {other.package})"
        commands.add_subcommand(other.name, inner, help=text.replace("%", "%%"))


def _command_parser(command: Command) -> ArgumentParser:
    prog = f"ftkit {command.name}"
    examples = "".join(f"\n  {prog} {example}" for example in command.examples)
    parser = ArgumentParser(
        prog=prog,
        usage="\n       ".join(line for usage in usages(command) for line in _usage_lines(usage)),
        description=command.text or f"{command.summary[:1].upper()}{command.summary[1:]}.",
        epilog=f"Examples:{examples}",
        formatter_class=Help,
    )
    options = declared(command.options)
    for item in (item for item in options if item.is_word):
        _add_word(parser, item)
    for head in heads_of(command.options) or ():
        text = field_texts(command.options)[head]
        parser.add_argument(f"--{head}", metavar="NAME", help=text)
    for item in (item for item in options if not item.is_word):
        _add_option(parser, item)
    if command.name in FINETUNE:
        add_recipe_keys(parser, FINETUNE[command.name])
        _write_placeholders(parser)
    if components := components_of(command.options):
        group = parser.add_argument_group("Data, optimizers, strategies and others by name")
        for component in components:
            if command.name in FINETUNE:
                recipe: type = recipe_type(FINETUNE[command.name])
                texts = field_texts(recipe)
                if component not in texts:
                    continue
                text, default = texts[component], default_name(component)
                group.add_argument(f"--{component}", metavar="NAME", default=default, help=text)
            text = f"Show the keys of --{component} NAME; without NAME, list the names."
            group.add_argument(f"--{component}.help", metavar="NAME", nargs="?", help=text)
    if command.name in FINETUNE:
        # Optimizers are missing here: their keys come from signatures, and importing torch takes
        # seconds.
        # Those whose keys are known before torch is loaded.
        _add_component_keys(parser, "data", "JSON")
        shown: set[str] = set()
        for rules in STRATEGIES:
            own = {field.name for field in dataclasses.fields(rules.options)} - shown
            if own:
                # Keys that a strategy inherits stand with those of the other.
                names = [one.name for one in STRATEGIES if issubclass(one.options, rules.options)]
                _add_component_keys(parser, "strategy", rules.name, ", ".join(names), shown)
            shown |= own
    return parser


def usages(command: Command) -> list[str]:
    """Lines that show how a command is called, not wrapped."""
    return [f"ftkit {command.name} {usage}" for usage in command.usage or (_usage(command),)]


def _usage(command: Command) -> str:
    """Words, options that have to be given, and the others if they are few."""
    words: list[str] = []
    options: list[str] = []
    for item in declared(command.options):
        shown = item.placeholder if item.is_word else f"--{item.name}"
        if not item.is_word and not item.is_switch:
            shown += f" {value_of(item)}"
        shown += "..." if item.is_word and item.takes_several else ""
        (words if item.is_word else options).append(shown if item.required else f"[{shown}]")
    few = len(options) <= 2 and heads_of(command.options) is None
    needed = [option for option in options if not option.startswith("[")]
    return " ".join([*words, *(options if few else [*needed, "[--KEY VALUE ...]"])])


def value_of(item: Declared) -> str:
    """What stands for the value of an option: RESULT, N, table|json."""
    return item.placeholder or "|".join(item.choices) or placeholder_of(item.kind)


def _usage_lines(usage: str) -> list[str]:
    """Wrap a usage to the terminal; text in brackets stays together."""
    width = shutil.get_terminal_size().columns - len("usage: ") - 1
    whole = re.sub(r"\[[^]]*\]", lambda bracket: bracket[0].replace(" ", _NO_BREAK), usage)
    lines = textwrap.wrap(
        whole, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_NO_BREAK, " ") for line in lines]


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
    text = item.text
    shown: dict[str, Any] = {"metavar": item.placeholder or placeholder_of(item.kind)}
    if item.choices:
        # Many do not fit into the line of the option.
        text = f"{text} One of {', '.join(item.choices)}." if item.placeholder else text
        shown = {"choices": item.choices} | (shown if item.placeholder else {})
    if item.rules.get("alone") is not None:
        shown["nargs"] = "?"
    default = None if item.takes_several else item.default
    parser.add_argument(name, default=default, required=item.required, help=text, **shown)


def _add_component_keys(
    parser: ArgumentParser,
    component: str,
    name: str,
    title: str = "",
    shown: Collection[str] = (),
) -> bool:
    """Add a section with the keys of a component; whether it has any.

    Args:
        parser: gets the section.
        component: data, optimizer or strategy.
        name: which one.
        title: all that have these keys; "": it alone.
        shown: keys that other sections have.
    """
    group = parser.add_argument_group(f"Keys of --{component} {title or name}")
    names = group.add_class_arguments(
        _component_class(component, name),
        component,
        as_group=False,
        # Arguments that ftkit passes itself.
        skip={*_GIVEN_BY_FTKIT, *shown},
        fail_untyped=False,
    )
    _write_placeholders(parser)
    return bool(names)


def _write_placeholders(parser: ArgumentParser) -> None:
    """Show kinds of values in words, and not what jsonargparse adds to the keys of a class."""
    known = key_types("lora")
    for action in parser._actions:
        if (kind := getattr(action, "_typehint", None)) is not None:
            kind = known.get(action.dest, kind)
            vars(action)["_typehint"] = kind  # completion offers its choices
            action.metavar = placeholder_of(kind)
            # jsonargparse offers --KEY+ to append to a list
            action.option_strings = [o for o in action.option_strings if not o.endswith("+")]
        if type(action).__name__ in ("_ActionConfigLoad", "_ActionHelpClassPath"):
            action.help = argparse.SUPPRESS  # a file for a whole group, help on torch.Tensor


def _component_names(component: str) -> list[str]:
    """Names of a component, with those of the plugin in use; of optimizers outside torch paths."""
    return [*own_names(component), *_known_names(component)]


def _listed(component: str, name: str) -> str:
    """A name in the list of all, with what an objective learns, or a kind of adapter trains."""
    summaries = {
        "objective": {one.name: one.summary for one in OBJECTIVES},
        "peft": {one.name: one.summary for one in ADAPTER_TYPES},
    }
    summary = summaries.get(component, {}).get(name)
    return name if summary is None else f"{name} ({summary})"


def _known_names(component: str) -> list[str]:
    if component == "data":
        return DATA_SOURCES.names
    if component == "strategy":
        return strategy_names()
    if component == "objective":
        return OBJECTIVES.names
    if component == "peft":
        return ADAPTER_TYPES.names
    found: list[str] = []
    for package in OPTIMIZERS.names:
        with suppress(ImportError, UserError):  # not installed, or not usable
            row = OPTIMIZERS.get(package)
            if row is not None and not row.strategy:
                prefix = "" if package == TORCH else f"{package}."
                found += [f"{prefix}{name}" for name in _optimizers(row)]
    return found


def _component_class(component: str, name: str) -> type:
    """The class whose arguments are the keys of a data module, an optimizer or a strategy."""
    found: type | None
    name = own_path(component, name) or name
    if component == "strategy":
        rules = STRATEGIES.get("single" if name == "auto" else name)
        found = rules.options if rules else None
    elif component == "objective":
        learned = OBJECTIVES.get(name)
        found = learned.options if learned else None
    elif component == "peft":
        trained = ADAPTER_TYPES.get(name)
        found = trained.options if trained else None
    elif component == "data":
        short = name.removeprefix("litgpt.data.").removeprefix("ftkit.data.")
        read = DATA_SOURCES.get(short)
        found = read.source.documented(short) if read else None
    else:
        package, _, last = name.rpartition(".")
        package = package or COMPONENTS["optimizer"]
        try:
            row = OPTIMIZERS.get(package)
            found = None if row is None else _optimizers(row).get(last)
        except ImportError as error:
            raise UserError(
                f"--optimizer.help {package}.{last} needs a package: {error}."
            ) from None
    if found is None:
        names = _component_names(component)
        by_last = {known.rpartition(".")[2]: known for known in reversed(names)}  # torch's win
        close = nearest(name.rpartition(".")[2], by_last)
        advice = f"Try --{component}.help {by_last[close]}. " if close else ""
        raise UserError(
            f"--{component}.help is {name!r}, but no {_NOUNS[component]} has this name. "
            f"{advice}--{component}.help without a name lists them."
        )
    return found


def _optimizers(package: OptimizerPackage) -> dict[str, type]:
    """The optimizers of a package by their names."""
    silence_libraries()
    with quick_imports():
        import torch

        content = package.content()
    return {
        name: found
        for name, found in sorted(content.items())
        if isinstance(found, type)
        and issubclass(found, torch.optim.Optimizer)
        and found is not torch.optim.Optimizer
    }
