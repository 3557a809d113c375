"""Prompt styles: how an instruction becomes a prompt for a model without a chat template.

The styles, their names and the models that they belong to are those of LitGPT's `litgpt.prompts`,
so that its recipes train on the same tokens; the formats are those of the models' authors.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import yaml

from ftkit.errors import UserError
from ftkit.utils.names import nearest
from ftkit.utils.registry import Registry

if TYPE_CHECKING:
    from ftkit.models.chat_templates.template import ChatTemplate

PLACES = ("instruction", "input", "sys_prompt")
"""Placeholders of a prompt that is given as a text."""
_BY_INPUT = ("with_input", "without_input")
"""Keys of a prompt that is another one for records without an input."""


@dataclass(frozen=True, kw_only=True)
class PromptStyle:
    """The texts around a system prompt, an instruction and its input."""

    name: str
    """In recipes; its class where LitGPT has no other."""
    class_name: str
    """Name of the class in `litgpt.prompts`, as recipes and prompt_style.yaml have it."""
    models: str = ""
    """Pattern in the names of the models that it belongs to; the first match counts."""
    start: str = ""
    """Before the system prompt."""
    before_system: str = ""
    after_system: str = ""
    """Around the system prompt; left out with it."""
    system: str = ""
    """The system prompt of records that have none."""
    system_with_input: str = ""
    """The system prompt of records with an input that have none; empty: as without an input."""
    has_system: bool = True
    """True if the style has a place for a system prompt."""
    strips_system: bool = False
    before: str = ""
    """Before the instruction."""
    before_input: str = ""
    """Between instruction and input; empty: the style has no place for an input."""
    after: str = ""
    """Behind the instruction and its input."""
    before_later: str | None = None
    """Between an answer and a later instruction; None: as before the first, with the system prompt
    where the style cannot do without."""

    stops: tuple[str, ...] = ()
    """Tokens that end an answer beside EOS, where the tokenizer has them."""

    def apply(self, prompt: str, *, sys_prompt: str | None = None, **values: Any) -> str:
        """Return the prompt for an instruction.

        Args:
            prompt: the instruction.
            sys_prompt: in place of the default system prompt, where the style has one.
            values: `input` of the record; others are ignored.
        """
        given = values.get("input") or ""
        text = self.start
        # Alpaca describes the task differently if there is an input.
        default = self.system_with_input if given and self.system_with_input else self.system
        if self.has_system and (system := sys_prompt or default):
            system = system.strip() if self.strips_system else system
            text += f"{self.before_system}{system}{self.after_system}"
        text += f"{self.before}{prompt}"
        if given and self.before_input:
            text += f"{self.before_input}{given}"
        return text + self.after


class TextPrompt:
    """A prompt style written as a text with placeholders, or as two: with an input and without."""

    stops = ()

    def __init__(self, text: str, without_input: str | None = None) -> None:
        """Take the text.

        Args:
            text: with {instruction}, and {input} and {sys_prompt} if wanted. {{ and }} stand for
                braces, a backslash and n, as shells hand them on, for a line end. Without {input},
                an input stands below the instruction.
            without_input: the prompt of a record without an input; None: the same one.

        Raises:
            UserError: it has other places, or none for the instruction.
        """
        self.text = text
        self.without_input = without_input
        self._parts = _parts_of(text)
        self._places = {place for _, place in self._parts}
        self._bare = self._parts if without_input is None else _parts_of(without_input)

    def apply(self, prompt: str, *, sys_prompt: str | None = None, **values: Any) -> str:
        """Return the prompt for an instruction, like `PromptStyle.apply`."""
        given = values.get("input") or ""
        if given and "input" not in self._places:
            prompt = f"{prompt}\n\n{given}"
        filled = {"instruction": prompt, "input": given, "sys_prompt": sys_prompt or ""}
        parts = self._parts if given else self._bare
        return "".join(text + (filled[place] if place else "") for text, place in parts)


def _parts_of(given: str) -> list[tuple[str, str | None]]:
    """Split a prompt into texts, each with the place behind it.

    Raises:
        UserError: see `TextPrompt`.
    """
    # Only this escape: a shell passes it on as two characters.
    text = given.replace("\\n", "\n")
    try:
        # Parsed, not formatted: str.format would reach attributes of its arguments.
        parts = [part[:4] for part in Formatter().parse(text)]
    except ValueError as error:
        raise UserError(
            f"data.prompt_style is {given!r}, whose braces do not match ({error}).\n"
            "Write {{ and }} for literal braces."
        ) from None
    for _, place, form, conversion in parts:
        if place is not None and (place not in PLACES or form or conversion):
            raise UserError(
                f"data.prompt_style is {given!r}, but {{{place}}} is not a placeholder of "
                f"prompts; these are: {', '.join(f'{{{known}}}' for known in PLACES)}.\n"
                "Write {{ and }} for literal braces."
            )
    if "instruction" not in {place for _, place, _, _ in parts}:
        raise UserError(
            f"data.prompt_style is {given!r}, which has no place for the instruction.\n"
            'Try --data.prompt_style "Q: {instruction}\\nA: ".'
        )
    return [(literal, place) for literal, place, _, _ in parts]


AnyStyle = PromptStyle | TextPrompt

TASK = "Below is an instruction that describes a task"
WITH_CONTEXT = f"{TASK}, paired with an input that provides further context. "
RESPOND = "Write a response that appropriately completes the request.\n\n"
INSTRUCTION, RESPONSE = "### Instruction:\n", "\n\n### Response:\n"
"""Texts of Alpaca, which other styles have too."""
DEFAULT = PromptStyle(name="Default", class_name="Default", has_system=False)
"""The instruction alone."""
STYLES = Registry(
    "prompt_styles",
    (PromptStyle,),
    core=(
        DEFAULT,
        PromptStyle(
            name="alpaca",
            class_name="Alpaca",
            system=f"{TASK}. {RESPOND}",
            system_with_input=f"{WITH_CONTEXT}{RESPOND}",
            before=INSTRUCTION,
            before_input="\n\n### Input:\n",
            after=RESPONSE,
        ),
    ),
)
"""Styles by the names that recipes give them."""


def style_of_class(name: str) -> PromptStyle | None:
    """Return the style of a class in `litgpt.prompts`; None: there is none."""
    return next((style for style in STYLES if style.class_name == name), None)


def style_of_model(name: str) -> PromptStyle:
    """Return the prompt style of a model by its name; the bare instruction if none is known.

    Args:
        name: as LitGPT has it, such as Llama-3.2-1B-Instruct.
    """
    of_model = (one for one in STYLES if one.models and re.search(one.models, name))
    return next(of_model, DEFAULT)


def _names() -> list[str]:
    """Names of styles in recipes, without those that are known by their class alone."""
    return [style.name for style in STYLES if style.name != style.class_name]


class SpecialTokens(Protocol):
    """Interface of a tokenizer to the template of a prompt style."""

    @property
    def use_bos(self) -> bool: ...

    @property
    def bos_gap(self) -> str: ...

    @property
    def special_tokens(self) -> Mapping[str, str]: ...


_SYSTEM_MARK, _INSTRUCTION_MARK, _INPUT_MARK = "\ue000", "\ue001", "\ue002"
"""Stand for texts; of Unicode's private use, so no style has them."""


class _Prompts(NamedTuple):
    """Prompts of a style for an instruction, with and without an input."""

    plain: str
    with_input: str

    def without(self, start: str) -> "_Prompts":
        return _Prompts(self.plain.removeprefix(start), self.with_input.removeprefix(start))


def template_of_style(style: AnyStyle, tokenizer: SpecialTokens) -> "ChatTemplate":
    """Write a prompt style as a chat template, for conversations and other programs.

    A user's message becomes what the style makes of an instruction, `input` of the message being
    its input; an answer is followed by EOS; a further turn repeats prompt and answer. The system
    message is repeated only in styles that have a default one which they cannot leave out.

    Args:
        style: the style.
        tokenizer: of the base model.
    """
    from ftkit.models.chat_templates.template import ChatTemplate  # imports jinja2

    bare, full = _prompts(style, None), _prompts(style, _SYSTEM_MARK)
    later_bare, later_full, answers_end = bare, full, "eos_token"
    # A style that can leave its system prompt out writes it before the first turn only.
    if full.plain.endswith(bare.plain):
        later_full = bare
    elif full.plain.startswith(_SYSTEM_MARK):
        later_bare = later_full = full.without(_SYSTEM_MARK)
    elif isinstance(style, PromptStyle) and style.before_later is not None:
        # Here the style's own text ends the answer before, so EOS only follows the last one.
        later = f"{style.before_later}{_INSTRUCTION_MARK}{style.after}"
        later_bare = later_full = _Prompts(later, later)
        answers_end = "(eos_token if loop.last else '')"
    # Some styles write BOS themselves, such as Llama 3's.
    bos = tokenizer.special_tokens.get("bos_token", "")
    begins = tokenizer.use_bos and not bare.plain.startswith(bos)
    begin = f"bos_token ~ {_quoted(tokenizer.bos_gap)}" if tokenizer.bos_gap else "bos_token"
    # A style may begin with a text that is given, which may have BOS itself.
    first_text = {
        _SYSTEM_MARK: "(system or message.content)",
        _INSTRUCTION_MARK: "message.content",
    }.get(full.plain[:1])
    system = "system | trim" if _trims(style) else "system"
    lines = [
        # Every tag trims the white space around it: the lines of this source are in no prompt.
        f"{{{{- {begin} -}}}}" if begins and not first_text else "",
        # A namespace, because jinja drops other assignments of a loop after each iteration.
        "{%- set turn = namespace(system='', first=true) -%}",
        "{%- for message in messages -%}",
        "{%- if message.role == 'system' -%}{%- set turn.system = message.content -%}",
        "{%- elif message.role == 'user' -%}",
        "{%- set system = turn.system -%}",
        f"{{%- if turn.first and not {first_text}.startswith(bos_token) -%}}"
        f"{{{{- {begin} -}}}}{{%- endif -%}}"
        if begins and first_text
        else "",
        f"{{%- if turn.first -%}}{_choice(full, bare, system)}",
        f"{{%- else -%}}{_choice(later_full, later_bare, system)}{{%- endif -%}}",
        "{%- set turn.first = false -%}",
        f"{{%- elif message.role == 'assistant' -%}}{{{{- message.content ~ {answers_end} -}}}}",
        "{%- else -%}",
        "{{- raise_exception('the prompt style has no place for the role ' ~ message.role) -}}",
        "{%- endif -%}",
        "{%- endfor -%}",
    ]
    source = "\n".join(line for line in lines if line) + "\n"
    return ChatTemplate(source, _name(style), dict(tokenizer.special_tokens))


def is_of_style(source: str, style: AnyStyle, tokenizer: SpecialTokens) -> bool:
    """Return whether a style was written as this template, here or by an earlier version."""

    def lines(text: str) -> list[str]:
        # Earlier versions write BOS otherwise.
        return [line for line in text.splitlines() if "bos_token" not in line]

    return lines(template_of_style(style, tokenizer).source) == lines(source)


def _prompts(style: AnyStyle, system: str | None) -> _Prompts:
    plain, with_input = (
        style.apply(prompt=_INSTRUCTION_MARK, sys_prompt=system, input=text)
        for text in ("", _INPUT_MARK)
    )
    return _Prompts(plain, with_input)


def _trims(style: AnyStyle) -> bool:
    # Tried, so that styles do not have to declare it.
    return f" {_SYSTEM_MARK} " not in style.apply(prompt="", sys_prompt=f" {_SYSTEM_MARK} ")


def _choice(full: _Prompts, bare: _Prompts, system: str) -> str:
    """Return jinja source that writes the prompt of a message."""
    if full == bare:
        return _prompt(bare, system)
    return (
        f"{{%- if system -%}}{_prompt(full, system)}"
        f"{{%- else -%}}{_prompt(bare, system)}{{%- endif -%}}"
    )


def _prompt(prompts: _Prompts, system: str) -> str:
    plain = f"{{{{- {_expression(prompts.plain, system)} -}}}}"
    if prompts.with_input == prompts.plain:
        return plain
    with_input = f"{{{{- {_expression(prompts.with_input, system)} -}}}}"
    return f"{{%- if message.input -%}}{with_input}{{%- else -%}}{plain}{{%- endif -%}}"


def _expression(text: str, system: str) -> str:
    """Write a text with marks as a jinja expression."""
    values = {
        _SYSTEM_MARK: f"({system})",
        _INSTRUCTION_MARK: "message.content",
        _INPUT_MARK: "message.input",
    }
    parts, literal = [], ""
    for character in text:
        if character not in values:
            literal += character
            continue
        parts += [_quoted(literal)] * bool(literal) + [values[character]]
        literal = ""
    return " ~ ".join(parts + [_quoted(literal)] * bool(literal)) or "''"


def _quoted(text: str) -> str:
    # Backslashes first: those of the other escapes must stay single.
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "'" + escaped.replace("\n", "\\n").replace("\r", "\\r") + "'"


def _name(style: AnyStyle) -> str:
    if isinstance(style, TextPrompt):
        bare = style.without_input
        return f"the prompt {style.text!r}" + (f", without an input {bare!r}" if bare else "")
    return f"prompt style {style.name}"


PROMPT_STYLE = "prompt_style.yaml"
"""File beside the weights in which LitGPT and ftkit look for the prompt style."""
_PACKAGE = "litgpt.prompts"
_WITH_MESSAGE = "ChatML"
"""The class that takes an argument: system_message, its default system prompt."""


def prompt_style_file(style: AnyStyle) -> dict[str, bytes]:
    """Write a prompt style as a file for LitGPT; none for a text, which LitGPT cannot read."""
    if isinstance(style, TextPrompt):
        return {}
    named = {"class_path": f"{_PACKAGE}.{style.class_name}"}
    return {PROMPT_STYLE: yaml.safe_dump(named).encode()}


def resolve_prompt_style(value: object) -> AnyStyle:
    """Resolve the prompt style named in a recipe.

    Args:
        value: a name (alpaca), a class path of LitGPT (litgpt.prompts.Alpaca), a class path with
            init_args, a text with {instruction} in it, or two of them (`with_input`,
            `without_input`).

    Raises:
        UserError: anything else.
    """
    if isinstance(value, PromptStyle | TextPrompt):
        return value
    # The first of the name: those of extensions are read only if the core has none.
    known = next((style for style in STYLES if style.name == value != style.class_name), None)
    if known is not None:
        return known
    # No name has a brace; a lone one is a mistake that TextPrompt explains.
    if isinstance(value, str) and ("{" in value or "}" in value):
        return TextPrompt(value)
    if isinstance(value, Mapping) and value.keys() & set(_BY_INPUT):
        texts = [value.get(key) for key in _BY_INPUT]
        if value.keys() != set(_BY_INPUT) or not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"data.prompt_style is {dict(value)}, but has to be two texts, "
                f"{' and '.join(_BY_INPUT)}.\n"
                "Write one text with {instruction} in it if both are the same."
            )
        return TextPrompt(*map(str, texts))
    # Neither a name nor a text: a class of LitGPT, alone or with init_args.
    class_path = value.get("class_path") if isinstance(value, Mapping) else value
    package, _, name = str(class_path).rpartition(".")
    style = style_of_class(name) if package == _PACKAGE else None
    if style is None:
        names = {style.class_name: style.name for style in STYLES}
        # Users may have meant a style by either name.
        near = nearest(name, [*_names(), *names]) or "alpaca"
        raise UserError(
            f"data.prompt_style is {class_path}, but has to be one of {', '.join(_names())}, a "
            f"class of {_PACKAGE}, or a text with {{instruction}} in it.\n"
            f"Try --data.prompt_style {names.get(near, near)}."
        )
    init_args = (value.get("init_args") or {}) if isinstance(value, Mapping) else {}
    arguments = ("system_message",) if name == _WITH_MESSAGE else ()
    if not isinstance(init_args, Mapping) or init_args.keys() - set(arguments):
        raise UserError(
            f"data.prompt_style is {class_path} with {init_args}, but it has "
            f"{', '.join(arguments) or 'no init_args'}.\nRemove the init_args it does not have."
        )
    message = init_args.get("system_message")
    if message is not None and not isinstance(message, str):
        raise UserError(
            f"data.prompt_style.init_args.system_message is {message!r}, but has to be a text.\n"
            "Put it into quotation marks."
        )
    return dataclasses.replace(style, system=message) if message else style
