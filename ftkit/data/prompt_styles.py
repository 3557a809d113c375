"""Prompt styles: which one a recipe, a data module or a model means."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ftkit.config.recipe import Component
from ftkit.data.spec import data_class, json_options
from ftkit.errors import UserError
from ftkit.utils.nearest import nearest

if TYPE_CHECKING:
    from litgpt.prompts import PromptStyle


def prompt_style_of(data: Component) -> "PromptStyle":
    """The prompt style of a recipe's data, which are not looked at.

    Raises:
        UserError: there are no such data, or no such style.
    """
    name = data_class(data)
    if name == "JSON":
        return resolve_prompt_style(json_options(data).prompt_style)
    import litgpt.data

    defaults = {
        field.name: field.default for field in dataclasses.fields(getattr(litgpt.data, name))
    }
    return resolve_prompt_style(data["init_args"].get("prompt_style", defaults["prompt_style"]))


def resolve_prompt_style(value: object) -> "PromptStyle":
    """The prompt style named in a recipe.

    Args:
        value: a name LitGPT knows (alpaca), a class path (litgpt.prompts.Alpaca), or a class
            path with init_args.

    Raises:
        UserError: anything else; nothing outside litgpt.prompts is imported.
    """
    from litgpt import prompts

    if isinstance(value, prompts.PromptStyle):
        return value
    if isinstance(value, str) and value in prompts.prompt_styles:
        return prompts.PromptStyle.from_name(value)
    class_path = value.get("class_path") if isinstance(value, Mapping) else value
    package, _, name = str(class_path).rpartition(".")
    style = getattr(prompts, name, None) if package == "litgpt.prompts" else None
    if not (isinstance(style, type) and issubclass(style, prompts.PromptStyle)):
        classes = {style.__name__: key for key, style in prompts.prompt_styles.items()}
        near = nearest(name, [*prompts.prompt_styles, *classes]) or "alpaca"
        raise UserError(
            f"data.prompt_style is {class_path}, but has to be one of "
            f"{', '.join(prompts.prompt_styles)}, or a class of litgpt.prompts.\n"
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
