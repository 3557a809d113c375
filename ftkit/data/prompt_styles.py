"""Prompt styles: which one a recipe names, and how it is noted beside a model."""

import dataclasses
from collections.abc import Mapping

import yaml

from ftkit.errors import UserError
from ftkit.models.chat_templates.prompt_styles import (
    CLASSES,
    STYLES,
    AnyStyle,
    PromptStyle,
    TextPrompt,
)
from ftkit.utils.names import nearest

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
            init_args, or a text with {instruction} in it.

    Raises:
        UserError: anything else.
    """
    if isinstance(value, PromptStyle | TextPrompt):
        return value
    if isinstance(value, str) and value in STYLES:
        return STYLES[value]
    if isinstance(value, str) and ("{" in value or "}" in value):
        return TextPrompt(value)
    class_path = value.get("class_path") if isinstance(value, Mapping) else value
    package, _, name = str(class_path).rpartition(".")
    if package != _PACKAGE or name not in CLASSES:
        names = {style.class_name: key for key, style in STYLES.items()}
        near = nearest(name, [*STYLES, *names]) or "alpaca"
        raise UserError(
            f"data.prompt_style is {class_path}, but has to be one of {', '.join(STYLES)}, a class "
            f"of {_PACKAGE}, or a text with {{instruction}} in it.\n"
            f"Try --data.prompt_style {names.get(near, near)}."
        )
    init_args = (value.get("init_args") or {}) if isinstance(value, Mapping) else {}
    known = ("system_message",) if name == _WITH_MESSAGE else ()
    if not isinstance(init_args, Mapping) or init_args.keys() - set(known):
        raise UserError(
            f"data.prompt_style is {class_path} with {init_args}, but it has "
            f"{', '.join(known) or 'no init_args'}.\nRemove the init_args it does not have."
        )
    message = init_args.get("system_message")
    if message is not None and not isinstance(message, str):
        raise UserError(
            f"data.prompt_style.init_args.system_message is {message!r}, but has to be a text.\n"
            "Put it into quotation marks."
        )
    return dataclasses.replace(CLASSES[name], system=message) if message else CLASSES[name]
