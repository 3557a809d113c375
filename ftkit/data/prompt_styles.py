"""Prompt styles: which one a name means, and how it is noted beside a model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import yaml

from ftkit.errors import UserError
from ftkit.utils.names import nearest

if TYPE_CHECKING:
    from litgpt.prompts import PromptStyle


PROMPT_STYLE = "prompt_style.yaml"
"""Where LitGPT and ftkit look for the prompt style of a model, beside its weights."""


def prompt_style_file(style: "PromptStyle") -> dict[str, bytes]:
    """A prompt style as a file: its name and content; none for a text, which LitGPT cannot read."""
    if type(style).__module__ != "litgpt.prompts":
        return {}
    name = f"{type(style).__module__}.{type(style).__name__}"
    return {PROMPT_STYLE: yaml.safe_dump({"class_path": name}).encode()}


def resolve_prompt_style(value: object) -> "PromptStyle":
    """The prompt style named in a recipe.

    Args:
        value: a name LitGPT knows (alpaca), a class path (litgpt.prompts.Alpaca), a class path
            with init_args, or a text with {instruction} in it.

    Raises:
        UserError: anything else; nothing outside litgpt.prompts is imported.
    """
    from litgpt import prompts

    if isinstance(value, prompts.PromptStyle):
        return value
    if isinstance(value, str) and value in prompts.prompt_styles:
        return prompts.PromptStyle.from_name(value)
    if isinstance(value, str) and ("{" in value or "}" in value):
        from ftkit.chat_templates.text_prompt import TextPrompt

        return TextPrompt(value)
    class_path = value.get("class_path") if isinstance(value, Mapping) else value
    package, _, name = str(class_path).rpartition(".")
    style = getattr(prompts, name, None) if package == "litgpt.prompts" else None
    if not (isinstance(style, type) and issubclass(style, prompts.PromptStyle)):
        classes = {style.__name__: key for key, style in prompts.prompt_styles.items()}
        near = nearest(name, [*prompts.prompt_styles, *classes]) or "alpaca"
        raise UserError(
            f"data.prompt_style is {class_path}, but has to be one of "
            f"{', '.join(prompts.prompt_styles)}, a class of litgpt.prompts, or a text with "
            "{instruction} in it.\n"
            f"Try --data.prompt_style {classes.get(near, near)}."
        )
    init_args = value.get("init_args") or {} if isinstance(value, Mapping) else {}
    try:
        return style(**init_args)
    except TypeError as error:
        raise UserError(
            f"data.prompt_style is {class_path} with {init_args}: {error}.\n"
            "Remove the init_args it does not have."
        ) from None
