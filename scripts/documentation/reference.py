"""Reference pages, made from the fields of recipes and the table of commands."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from ftkit.cli.command import Command, Group
from ftkit.cli.commands import FTKIT
from ftkit.cli.help import usages, value_of
from ftkit.cli.parser import Declared, components_of, declared, heads_of
from ftkit.data.own_data import OwnDataOptions
from ftkit.recipe.adapter_types import ADAPTER_TYPES
from ftkit.recipe.changes import kinds
from ftkit.recipe.objectives import OBJECTIVES
from ftkit.recipe.recipe import FINETUNE, Lora
from ftkit.recipe.recipe_keys import describe, field_texts, field_type, key_groups, placeholder_of
from ftkit.recipe.recipe_sections import recipe_type
from ftkit.recipe.strategy_rows import STRATEGIES

_ON_RESUME = {
    "fixed": "fixed on resume",
    "tunable": "may change on resume, with a notice",
    "hardware": "free on resume",
}
_CONTENT = "may lie elsewhere on resume, with the same content"
_BY_CONTENT = {"checkpoint_dir": _CONTENT, "data": _CONTENT, "teacher": _CONTENT}
"""Keys that name what a resumed run compares by its content."""
_IN_THEIR_TEXT = ("model_implementation", "resume")
"""Keys whose texts say what a resumed run does with them."""
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$])")
_OPTION = re.compile(r"(?<!\w)--[a-z][\w.]*(?: [A-Z]+(?:\.\w+)?(?:=[A-Z,]+)?\b)?")
_ABOUT_KEYS = """\
Every key that a recipe may have, from the same texts as `ftkit finetune --help`. A key is an option
too: `train.epochs: 3` in a recipe is `--train.epochs 3` on the command line. `--print_config`
prints a recipe with all of its keys. [Recipes, base models and data](../../docs/recipes.md)
explains how they work together."""


@dataclasses.dataclass(frozen=True)
class _Key:
    """A key of a recipe, as a section of a page."""

    name: str
    kind: Any
    default: Any
    text: str

    @property
    def value(self) -> str:
        """What it takes, its default, and whether it may change on resume."""
        # In words, where a recipe's own messages have them; as in help, for options of components.
        is_own = self.name in kinds()
        words = [_plain(describe(self.kind)) if is_own else f"`{placeholder_of(self.kind)}`"]
        if (default := _default(self.default)) and "Default:" not in self.text:
            words.append(f"default `{default}`")
        if is_own and self.name not in _IN_THEIR_TEXT:
            words.append(_BY_CONTENT.get(self.name, _ON_RESUME[kinds()[self.name]]))
        return "; ".join(words)


@dataclasses.dataclass(frozen=True)
class _Page:
    """A page with keys that belong together."""

    path: str
    title: str
    text: str
    parts: dict[str, list[_Key]]
    """Keys below their headings; "" stands for none."""


def reference_pages() -> dict[str, str]:
    """Markdown of every reference page, by its path in the site."""
    pages = list(_recipe_pages())
    known = {
        key.name: page.path
        for page in pages
        for part, keys in page.parts.items()
        for key in keys
        if not part
    }
    written = {f"reference/recipe/{page.path}.md": _recipe_page(page, known) for page in pages}
    written["reference/recipe/index.md"] = _recipe_index(pages)
    for member in FTKIT.members:
        if member.name != "finetune_lora":  # the same as finetune
            written[f"reference/commands/{member.name}.md"] = _command_page(member, known)
    written["reference/commands/index.md"] = _command_index()
    return written


def _recipe_pages() -> Iterator[_Page]:
    fields = dataclasses.fields(recipe_type("full"))
    own = [field for field in fields if field.name not in key_groups()]
    text = "The keys that are in no group: base model, data, objective, devices, precision."
    yield _Page("model", "Model, data, devices", text, {"": _keys(recipe_type("full"), own)})
    for field in fields:
        if field.name in key_groups():
            group: Any = field.type
            keys = _keys(group, dataclasses.fields(group), f"{field.name}.")
            yield _Page(field.name, f"{field.name}.*", str(group.__doc__), {"": keys})
    lora = _keys(Lora, dataclasses.fields(Lora))
    text = f"{Lora.__doc__} Only `ftkit finetune` has these keys."
    yield _Page("lora", "LoRA and QLoRA", text, {"": lora})
    options = OwnDataOptions
    data = _keys(options, dataclasses.fields(options), "data.")
    text = "Options of your own data, `--data JSON`; in a recipe below `data.init_args`."
    yield _Page("data", "data.*", text, {"": data})
    for component, text, options_of in (
        ("objective", "What is learned, by name, with the options of each.",
         {one.name: (f"Learns {one.summary}.", one.options) for one in OBJECTIVES}),
        ("peft", "Which adapter `ftkit finetune` trains, by name, with the options of each.",
         {one.name: (f"Trains {one.summary}.", one.options) for one in ADAPTER_TYPES}),
        ("strategy", "How a run is distributed over devices, by name, with the options of each.",
         {one.name: ("", one.options) for one in STRATEGIES}),
    ):  # fmt: skip
        parts = {
            f"`--{component} {name}`\n\n{summary}": _keys(
                one, dataclasses.fields(one), f"{component}."
            )
            for name, (summary, one) in options_of.items()
        }
        yield _Page(component, f"{component}.*", text, parts)


def _keys(owner: type, fields: Any, prefix: str = "") -> list[_Key]:
    texts = field_texts(owner)
    return [
        _Key(f"{prefix}{field.name}", field_type(field), _given(field), texts.get(field.name, ""))
        for field in fields
    ]


def _given(field: "dataclasses.Field[Any]") -> Any:
    """Default of a field; None: it has none, or is empty."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _default(default: Any) -> str:
    """A default as a recipe has it; "": none that says anything."""
    if default is None or default in ((), "", []):
        return ""
    if isinstance(default, dict):  # a component
        return str(default["class_path"])
    if isinstance(default, bool):
        return str(default).lower()
    return str(default)


def _plain(text: str, known: dict[str, str] | None = None, at: str = "") -> str:
    """Text of the code as Markdown: options and keys as code, keys with a link to their section.

    Args:
        text: one line.
        known: pages of keys by name; None: no links.
        at: the folder of the page, as a way back to reference/recipe/.
    """
    names = sorted((k for k in known or () if "." in k or "_" in k), key=len, reverse=True)
    keys = "|".join(map(re.escape, names)) or r"(?!)"
    pieces = re.split(rf"({_OPTION.pattern}|(?<![\w.\-/])(?:{keys})(?![\w]))", text)
    for number, piece in enumerate(pieces):
        if number % 2 == 0:
            pieces[number] = _SPECIAL.sub(r"\\\1", piece)
        elif known and piece in known:
            pieces[number] = f"[`{piece}`]({at}{known[piece]}.md#{_anchor(piece)})"
        else:
            pieces[number] = f"`{piece}`"
    return "".join(pieces)


def _anchor(key: str) -> str:
    """Anchor of a key: that of its heading, as Markdown makes it."""
    return key.replace(".", "").lower()


def _recipe_page(page: _Page, known: dict[str, str]) -> str:
    written = [f"# {_plain(page.title)}", page.text]
    for part, keys in page.parts.items():
        if part:
            written.append(f"## {part}")
            if not keys:
                written.append("It has no options.")
        for key in keys:
            written += [f"{'###' if part else '##'} `{key.name}`"]
            if key.text:
                others = {name: path for name, path in known.items() if name != key.name}
                written.append(_plain(key.text, others))
            written.append(f"{{.value}}\n{key.value}")
    return "\n\n".join(written) + "\n"


def _recipe_index(pages: list[_Page]) -> str:
    written = ["# Keys of a recipe", _ABOUT_KEYS]
    listed = "\n".join(page.path for page in pages)
    written.append(f"```{{toctree}}\n:hidden:\n\n{listed}\n```")
    for page in pages:
        written += [f"## {_plain(page.title)}", page.text]
        if keys := page.parts.get(""):
            rows = (
                f"| [`{key.name}`]({page.path}.md#{_anchor(key.name)}) "
                f"| {_plain(_first(key.text))} |"
                for key in keys
            )
            written.append("\n".join(["| Key | Meaning |", "|---|---|", *rows]))
        else:
            names = (part.partition("\n")[0] for part in page.parts)
            written.append(f"[Each of them]({page.path}.md): {', '.join(names)}.")
    return "\n\n".join(written) + "\n"


def _first(text: str) -> str:
    """The first sentence or clause of a help text."""
    return re.split(r"(?<=[a-z)])[.:;](?: |$)", text)[0] + ("." if text else "")


def _command_index() -> str:
    written = ["# Commands", FTKIT.text, "`ftkit COMMAND --help` says the same in a terminal."]
    listed = "\n".join(
        f"ftkit {member.name} <{member.name}>"
        for member in FTKIT.members
        if member.name != "finetune_lora"
    )
    written.append(f"```{{toctree}}\n:hidden:\n\n{listed}\n```")
    rows = (
        f"| [`ftkit {member.name}`]({member.name.replace('finetune_lora', 'finetune')}.md) "
        f"| {_plain(member.summary)} |"
        for member in FTKIT.members
    )
    written.append("\n".join(["| Command | What it does |", "|---|---|", *rows]))
    return "\n\n".join(written) + "\n"


def _command_page(member: Command | Group, known: dict[str, str]) -> str:
    written = [f"# `ftkit {member.name}`"]
    if isinstance(member, Command):
        written += _command(member, known)
    else:
        written.append(_plain(member.text, known, "../recipe/"))
        for command in member.commands():
            written += [f"## `ftkit {command.name}`", *_command(command, known)]
    return "\n\n".join(written) + "\n"


def _command(command: Command, known: dict[str, str]) -> Iterator[str]:
    text = command.text or f"{command.summary[:1].upper()}{command.summary[1:]}."
    yield _plain(text, known, "../recipe/")
    yield _block("text", usages(command))
    options = declared(command.options)
    heads = heads_of(command.options)
    rows = [_row(item, known) for item in options]
    texts = field_texts(command.options)
    rows += [f"| `--{head}.KEY VALUE` | {_plain(texts[head], known, '../recipe/')} |"
             for head in heads or ()]  # fmt: skip
    if components := components_of(command.options):
        rows += [
            f"| `--{one}.help [NAME]` | Show the keys of `--{one} NAME`; without NAME, list the "
            "names. |"
            for one in components
        ]
    if rows:
        yield "\n".join(["| Option | Meaning |", "|---|---|", *rows])
    if command.name in FINETUNE or heads == ():
        yield "Every [key of a recipe](../recipe/index.md) is an option too: `--train.epochs 3`."
    yield "For example:"
    yield _block("bash", [f"ftkit {command.name} {example}" for example in command.examples])


def _row(item: Declared, known: dict[str, str]) -> str:
    if item.is_word:
        shown = item.placeholder + ("..." if item.takes_several else "")
    else:
        shown = f"--{item.name}" + ("" if item.is_switch else f" {value_of(item)}")
    text = _plain(item.text, known, "../recipe/")
    if item.required:
        text += " Required."
    elif not item.is_switch and (default := _default(item.default)) and "Default:" not in text:
        text += f" Default: `{default}`."
    shown = shown.replace("|", "\\|")
    return f"| `{shown}` | {text} |"


def _block(language: str, lines: list[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])
