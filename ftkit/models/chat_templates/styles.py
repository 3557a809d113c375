"""Prompt styles as chat templates."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from ftkit.models.chat_templates.prompt_styles import STYLES, AnyStyle, PromptStyle, TextPrompt
from ftkit.models.chat_templates.template import ChatTemplate


class SpecialTokens(Protocol):
    """What a template needs of a tokenizer."""

    @property
    def use_bos(self) -> bool: ...

    @property
    def special_tokens(self) -> Mapping[str, str]: ...


_SYSTEM, _INSTRUCTION, _INPUT = "\ue000", "\ue001", "\ue002"
"""Stand for texts; of Unicode's private use, so no style has them."""


class _Prompts(NamedTuple):
    """What a style makes of an instruction, with and without an input."""

    plain: str
    with_input: str

    def without(self, start: str) -> "_Prompts":
        return _Prompts(self.plain.removeprefix(start), self.with_input.removeprefix(start))


def template_of_style(style: AnyStyle, tokenizer: SpecialTokens) -> ChatTemplate:
    """A prompt style as a chat template, for conversations and for other programs.

    A user's message becomes what the style makes of an instruction, `input` of the message being
    its input; an answer is followed by EOS; a further turn repeats prompt and answer. The system
    message is repeated only in styles that have a default one which they cannot leave out.

    Args:
        style: the style.
        tokenizer: of the base model.
    """
    bare, told = _prompts(style, None), _prompts(style, _SYSTEM)
    later_bare, later_told, answers_end = bare, told, "eos_token"
    if told.plain.endswith(bare.plain):  # it can do without
        later_told = bare
    elif told.plain.startswith(_SYSTEM):
        later_bare = later_told = told.without(_SYSTEM)
    elif isinstance(style, PromptStyle) and style.before_later is not None:
        later = f"{style.before_later}{_INSTRUCTION}{style.after}"
        later_bare = later_told = _Prompts(later, later)
        answers_end = "(eos_token if loop.last else '')"
    bos = tokenizer.special_tokens.get("bos_token", "")
    begins = tokenizer.use_bos and not bare.plain.startswith(bos)
    system = "system | trim" if _trims(style) else "system"
    lines = [
        "{{- bos_token -}}" if begins else "",
        "{%- set turn = namespace(system='', first=true) -%}",
        "{%- for message in messages -%}",
        "{%- if message.role == 'system' -%}{%- set turn.system = message.content -%}",
        "{%- elif message.role == 'user' -%}",
        "{%- set system = turn.system -%}",
        f"{{%- if turn.first -%}}{_choice(told, bare, system)}",
        f"{{%- else -%}}{_choice(later_told, later_bare, system)}{{%- endif -%}}",
        "{%- set turn.first = false -%}",
        f"{{%- elif message.role == 'assistant' -%}}{{{{- message.content ~ {answers_end} -}}}}",
        "{%- else -%}",
        "{{- raise_exception('the prompt style has no place for the role ' ~ message.role) -}}",
        "{%- endif -%}",
        "{%- endfor -%}",
    ]
    source = "\n".join(line for line in lines if line) + "\n"
    return ChatTemplate(source, _name(style), dict(tokenizer.special_tokens))


def _prompts(style: AnyStyle, system: str | None) -> _Prompts:
    plain, with_input = (
        style.apply(prompt=_INSTRUCTION, sys_prompt=system, input=text) for text in ("", _INPUT)
    )
    return _Prompts(plain, with_input)


def _trims(style: AnyStyle) -> bool:
    return f" {_SYSTEM} " not in style.apply(prompt="", sys_prompt=f" {_SYSTEM} ")


def _choice(told: _Prompts, bare: _Prompts, system: str) -> str:
    """Jinja that writes the prompt of a message."""
    if told == bare:
        return _prompt(bare, system)
    return (
        f"{{%- if system -%}}{_prompt(told, system)}"
        f"{{%- else -%}}{_prompt(bare, system)}{{%- endif -%}}"
    )


def _prompt(prompts: _Prompts, system: str) -> str:
    plain = f"{{{{- {_expression(prompts.plain, system)} -}}}}"
    if prompts.with_input == prompts.plain:
        return plain
    with_input = f"{{{{- {_expression(prompts.with_input, system)} -}}}}"
    return f"{{%- if message.input -%}}{with_input}{{%- else -%}}{plain}{{%- endif -%}}"


def _expression(text: str, system: str) -> str:
    """A text with marks as an expression of jinja."""
    values = {_SYSTEM: f"({system})", _INSTRUCTION: "message.content", _INPUT: "message.input"}
    parts, literal = [], ""
    for character in text:
        if character not in values:
            literal += character
            continue
        parts += [_quoted(literal)] * bool(literal) + [values[character]]
        literal = ""
    return " ~ ".join(parts + [_quoted(literal)] * bool(literal)) or "''"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "'" + escaped.replace("\n", "\\n").replace("\r", "\\r") + "'"


def _name(style: AnyStyle) -> str:
    if isinstance(style, TextPrompt):
        return f"the prompt {style.text!r}"
    names = {known.class_name: name for name, known in STYLES.items()}
    return f"prompt style {names.get(style.class_name, style.class_name)}"
