"""Renderers by the shape and the rules of records: what makes their samples."""

from collections.abc import Mapping
from typing import Any

from ftkit.data.rendering.chat import ChatRenderer
from ftkit.data.rendering.document import TextRenderer
from ftkit.data.rendering.prompted import CompletionRenderer, InstructionRenderer
from ftkit.data.rendering.renderer import Renderer
from ftkit.data.spec import Part, Rules
from ftkit.models.chat_templates.prompt_styles import template_of_style
from ftkit.models.chat_templates.template import (
    OF_TOKENIZER,
    ChatTemplate,
    resolve_chat_template,
    text_template,
)


def make_renderer(part: Part, tokenizer: Any) -> Renderer:
    """What makes samples of the records of a part.

    Args:
        part: its shape and rules count.
        tokenizer: of the base model; None: nothing but texts will be asked for.

    Raises:
        UserError: there is no such chat template.
    """
    rules = part.rules
    if part.shape == "text":
        return TextRenderer(tokenizer)
    if part.shape == "completion":
        return CompletionRenderer(tokenizer, mask_prompt=rules.train_on != "all")
    if part.shape == "messages":
        return ChatRenderer(
            tokenizer,
            _template(rules, tokenizer),
            train_on=rules.train_on,
            reasoning=rules.reasoning,
        )
    assert rules.prompt_style is not None
    return InstructionRenderer(tokenizer, rules.prompt_style, mask_prompt=rules.train_on != "all")


def _template(rules: Rules, tokenizer: Any) -> ChatTemplate:
    if rules.prompt_style is not None:
        return template_of_style(rules.prompt_style, tokenizer or _NoTokenizer())
    assert rules.chat_template is not None
    if tokenizer is not None:
        return resolve_chat_template(rules.chat_template, tokenizer)
    is_of_tokenizer = rules.chat_template == OF_TOKENIZER
    return text_template("chatml" if is_of_tokenizer else rules.chat_template, {})


class _NoTokenizer:
    """What a prompt style needs of a tokenizer, where there is none."""

    use_bos = False
    special_tokens: Mapping[str, str] = {"bos_token": "", "eos_token": ""}
