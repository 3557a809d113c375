"""Prompting: the chat template in which a result is asked, and the tokens that end its answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import yaml

from ftkit.data.prompt_styles import PROMPT_STYLE, prompt_style_file, resolve_prompt_style
from ftkit.data.rendering.chat import ChatRenderer
from ftkit.data.sources import data_source
from ftkit.errors import UserError
from ftkit.evaluation.result import Result
from ftkit.models.chat_templates.prompt_styles import AnyStyle, style_of_model, template_of_style
from ftkit.models.chat_templates.template import (
    OF_TOKENIZER,
    ChatTemplate,
    resolve_chat_template,
    template_of,
)
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.models.pretrained.save import chat_files
from ftkit.models.pretrained.tokenizer import Tokenizer, end_tokens
from ftkit.recipe.options import AnswerOptions
from ftkit.utils.yaml_files import parse_yaml


@dataclass(frozen=True, kw_only=True)
class Prompting:
    """How a model is asked."""

    template: ChatTemplate
    origin: Literal["trained", "model", "name", "asked"]
    """Whose the template is. trained: its run's. model: the model came with it. name: LitGPT's for
    models of this name. asked: named for this use."""
    end_ids: frozenset[int]
    """Tokens that end what the model says, as it was trained or as its settings have it."""
    style: AnyStyle | None = None
    """The prompt style that the template is of."""

    def stop_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The tokens that end an answer: EOS, and those of the style and of the model."""
        found = self.end_ids | {tokenizer.eos_id}
        stops = () if self.style is None else self.style.stops
        ids = (tokenizer.token_id(stop) for stop in stops)
        return found | {token for token in ids if token is not None}

    def files(self, base: BaseModel) -> Mapping[str, bytes]:
        """What says so beside the weights, for ftkit, transformers and LitGPT."""
        files = {} if self.style is None else prompt_style_file(self.style)
        if self.origin == "trained":
            files |= chat_files(base, self.template.source, self.end_ids)
        return files


def prompting_of(result: Result, base: BaseModel) -> Prompting:
    """As a result was trained; else as the model itself says; else as LitGPT has it by its name.

    Args:
        result: from `find_result`.
        base: its tokenizer and settings.

    Raises:
        UserError: a file that says it cannot be read.
    """
    if result.asked is not None and (source := template_of(result.asked)) is not None:
        name = f"of {result.name}"
        template = ChatTemplate(source, name, base.tokenizer.special_tokens)
        return Prompting(
            template=template,
            origin="trained",
            end_ids=end_tokens(result.asked) or _ends_of(template, base),
            style=_style_of(template, result, base),
        )
    if (style := _old_style(result)) is not None:
        return in_style(style, base, "trained")
    if base.tokenizer.chat_template is not None:
        template = resolve_chat_template(OF_TOKENIZER, base.tokenizer)
        return Prompting(template=template, origin="model", end_ids=_ends_of(template, base))
    return in_style(style_of_model(base.architecture.name), base, "name")


def chosen(prompting: Prompting, options: AnswerOptions, base: BaseModel) -> Prompting | None:
    """What is asked for instead of how a result is prompted; None: texts are taken as they are.

    Raises:
        UserError: there is no such prompt style or template.
    """
    if options.raw:
        return None
    if options.prompt_style is not None:
        return in_style(resolve_prompt_style(options.prompt_style), base, "asked")
    if options.chat_template is not None:
        template = resolve_chat_template(options.chat_template, base.tokenizer, "chat_template")
        end_ids = prompting.end_ids | _ends_of(template, base)
        return Prompting(template=template, origin="asked", end_ids=end_ids)
    return prompting


def in_style(
    style: AnyStyle, base: BaseModel, origin: Literal["trained", "name", "asked"]
) -> Prompting:
    """Prompting in a style of LitGPT's."""
    trained = frozenset({base.tokenizer.eos_id})
    return Prompting(
        template=template_of_style(style, base.tokenizer),
        origin=origin,
        end_ids=trained if origin == "trained" else _own_ends(base),
        style=style,
    )


def _old_style(result: Result) -> AnyStyle | None:
    """The style of a result that has no template of its own: of its run, or of LitGPT's file."""
    if result.recipe is not None:
        return data_source(result.recipe.data).prompt_style()
    file = result.directory / PROMPT_STYLE
    if not file.is_file():
        return None
    try:
        return resolve_prompt_style(parse_yaml(file.read_text(encoding="utf-8")))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error}). Remove it.") from None


def _style_of(template: ChatTemplate, result: Result, base: BaseModel) -> AnyStyle | None:
    """The prompt style that a template was made of; None: of none that is known."""
    style = _old_style(result)
    if style is None or template_of_style(style, base.tokenizer).source != template.source:
        return None
    return style


def _ends_of(template: ChatTemplate, base: BaseModel) -> frozenset[int]:
    """The end tokens that a model came with, and what ends turns in a template."""
    renderer = ChatRenderer(base.tokenizer, template, train_on="assistant")
    return _own_ends(base) | renderer.stop_ids


def _own_ends(base: BaseModel) -> frozenset[int]:
    """The end tokens that a model came with."""
    known = frozenset() if base.directory is None else end_tokens(base.directory)
    return known or frozenset({base.tokenizer.eos_id})
