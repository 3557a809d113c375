"""Prompting: how a record or text becomes a prompt, and which tokens end its answer."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from ftkit.data.records.media import MEDIA, PLACES
from ftkit.data.records.shape_rows import CONVERSATION, shape_row
from ftkit.data.sources import data_source
from ftkit.errors import UserError
from ftkit.evaluation.result import Result
from ftkit.models.chat_templates.arguments import ARGUMENTS
from ftkit.models.chat_templates.prompt_styles import (
    PROMPT_STYLE,
    AnyStyle,
    is_of_style,
    prompt_style_file,
    resolve_prompt_style,
    style_of_model,
    template_of_style,
)
from ftkit.models.chat_templates.template import (
    OF_TOKENIZER,
    ChatTemplate,
    Message,
    TemplateRefusal,
    resolve_chat_template,
    template_of,
)
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.models.pretrained.save import chat_files
from ftkit.models.pretrained.tokenizer import Tokenizer, end_tokens
from ftkit.recipe.options import AnswerOptions
from ftkit.utils.registry import imported
from ftkit.utils.yaml_files import parse_yaml

_SHOWN = "[file]"
"""What is shown for a medium."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A conversation to answer, or a text to continue."""

    text: str
    """The text itself; of a conversation, its last message, to be shown."""
    messages: tuple[Message, ...] = ()
    """Messages of a conversation; empty: the text is the prompt."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tools that may be called."""
    arguments: Mapping[str, Any] | None = None
    """Values of variables that the chat template reads."""
    media: Sequence[Mapping[str, Any]] = ()
    """Media of the messages, as canonical records have them."""


def question_of(record: Mapping[str, Any]) -> Question:
    """Turn a record into a question: everything before its last answer.

    Args:
        record: of any shape; needs no answer.
    """
    if "messages" in record:
        messages = tuple(record["messages"])
        # The last answer is the expected one, and not part of the question.
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        said = PLACES.sub(_SHOWN, messages[-1]["content"]) if messages else ""
        return Question(
            text=said,
            messages=messages,
            tools=record.get("tools"),
            arguments=record.get(ARGUMENTS),
            media=_before(record.get(MEDIA, ()), messages),
        )
    for key in ("prompt", "text"):
        if key in record:
            return Question(text=record[key])
    user = {"role": "user", "content": record["instruction"]}
    # Not joined to the text here: a template may have its own place for it (see `with_input`).
    if record.get("input"):
        user["input"] = record["input"]
    system = system_message(record.get("sys_prompt"))
    before = (
        {"role": role, "content": text}
        for pair in record.get("history", ())
        for role, text in zip(("user", "assistant"), pair, strict=True)
    )
    return Question(
        text=PLACES.sub(_SHOWN, record["instruction"]),
        messages=(*system, *before, user),
        media=record.get(MEDIA, ()),
    )


def _before(media: Sequence[Any], messages: Sequence[Message]) -> Sequence[Any]:
    """The first media of a conversation, as many as have a place in some messages."""
    return media[: sum(len(PLACES.findall(message["content"])) for message in messages)]


def system_message(text: str | None) -> tuple[Message, ...]:
    """Return the system message in a tuple, empty if there is none."""
    return () if text is None else ({"role": "system", "content": text},)


def prompt_text(question: Question, template: ChatTemplate, system: str | None = None) -> str:
    """Render a conversation as a prompt.

    Args:
        question: with messages.
        template: how conversations are written.
        system: system message of a conversation that does not begin with one.

    Raises:
        UserError: the template does not accept the conversation.
    """
    messages = question.messages
    if messages[0]["role"] != "system":
        messages = (*system_message(system), *messages)
    try:
        return template.with_arguments(question.arguments).render(
            messages, tools=question.tools, add_generation_prompt=True
        )
    except TemplateRefusal as refusal:
        raise UserError(
            f"The chat template {template.name} does not accept this conversation: {refusal}. Try "
            "another --chat_template."
        ) from None


def with_input(question: Question, template: ChatTemplate) -> Question:
    """Move the input below the instruction, if the template has no place for it.

    Args:
        question: with messages.
        template: how conversations are written.

    Raises:
        UserError: the template does not accept the conversation.
    """
    *before, last = question.messages
    if "input" not in last:
        return question
    without = {key: value for key, value in last.items() if key != "input"}
    bare = dataclasses.replace(question, messages=(*before, without))
    # Only rendering shows whether a template uses the key.
    if prompt_text(bare, template) != prompt_text(question, template):
        return question
    user = without | {"content": f"{last['content']}\n\n{last['input']}"}
    return dataclasses.replace(question, messages=(*before, user))


def check_system(template: ChatTemplate, system: str) -> None:
    """Refuse a system message that would be left out.

    Raises:
        UserError: the template has no place for it.
    """
    question = Question(text="a", messages=({"role": "user", "content": "a"},))
    # Only rendering shows whether a template uses it.
    if prompt_text(question, template, system) == prompt_text(question, template):
        raise UserError(
            f"--system: the chat template {template.name} leaves out the system message. Leave out "
            "--system, or try another --chat_template."
        )


@dataclass(frozen=True, kw_only=True)
class Prompting:
    """Template of prompts, and the tokens that end answers."""

    template: ChatTemplate
    origin: Literal["trained", "model", "name", "option"]
    """Origin of the template. trained: of the run. model: it came with the model. name: LitGPT's
    for models of this name. option: chosen on the command line."""
    end_ids: frozenset[int]
    """Tokens that end an answer, as the model was trained or as its settings have it."""
    style: AnyStyle | None = None
    """Prompt style that the template was made from."""

    def stop_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Tokens that end an answer: EOS, and those of the style and of the model."""
        found = self.end_ids | {tokenizer.eos_id}
        stops = () if self.style is None else self.style.stops
        # A style is for several models, whose tokenizers may lack some of its stops.
        ids = (tokenizer.token_id(stop) for stop in stops)
        return found | {token for token in ids if token is not None}

    def puts_bos(self, tokenizer: Tokenizer) -> bool:
        """Whether other programs have to put BOS before a text themselves."""
        if not tokenizer.use_bos or self.origin != "trained":
            return tokenizer.use_bos
        # A model that was trained in a template without BOS has seen none.
        message = {"role": "user", "content": "a"}
        bos = self.template.special_tokens.get("bos_token", "")
        try:
            return self.template.render([message], add_generation_prompt=True).startswith(bos)
        except TemplateRefusal:  # it wants a system message
            return True

    def files(self, base: BaseModel) -> Mapping[str, bytes]:
        """Files beside the weights that hold it, for ftkit, transformers and LitGPT."""
        files = {} if self.style is None else prompt_style_file(self.style)
        # Any other template came with the base model or follows from its name.
        if self.origin == "trained":
            files |= chat_files(base, self.template.source, self.end_ids)
        return files


def prompting_of(result: Result, base: BaseModel) -> Prompting:
    """Choose the prompting of a result: as trained, else the model's own, else LitGPT's by name.

    Args:
        result: from `find_result`.
        base: its tokenizer and settings.

    Raises:
        UserError: a file that holds it cannot be read.
    """
    directory = result.template_directory
    # The template beside the result, not the one that its recipe resolves to: the data need not be
    # here, and other programs use this one too.
    if directory is not None and (source := template_of(directory)) is not None:
        name = f"of {result.name}"
        template = ChatTemplate(source, name, base.tokenizer.special_tokens)
        return Prompting(
            template=template,
            origin="trained",
            end_ids=end_tokens(directory) or _ends_of(template, base),
            style=_style_of(template, result, base),
        )
    # Earlier versions and LitGPT record a prompt style instead of a template.
    if (style := _old_style(result)) is not None:
        return in_style(style, base, "trained")
    if base.tokenizer.chat_template is not None:
        template = resolve_chat_template(OF_TOKENIZER, base.tokenizer)
        return Prompting(template=template, origin="model", end_ids=_ends_of(template, base))
    return in_style(style_of_model(base.architecture.name), base, "name")


def prompting_for(
    prompting: Prompting, options: AnswerOptions, base: BaseModel
) -> Prompting | None:
    """Prompting that replaces that of the result; None: texts are used as they are.

    Raises:
        UserError: there is no such prompt style or template.
    """
    if options.raw:
        return None
    if options.prompt_style is not None:
        return in_style(resolve_prompt_style(options.prompt_style), base, "option")
    if options.chat_template is not None:
        template = resolve_chat_template(options.chat_template, base.tokenizer, "chat_template")
        # The model may still end as it was trained to, whatever template it is prompted in.
        end_ids = prompting.end_ids | _ends_of(template, base)
        return Prompting(template=template, origin="option", end_ids=end_ids)
    return prompting


def in_style(
    style: AnyStyle, base: BaseModel, origin: Literal["trained", "name", "option"]
) -> Prompting:
    """Return the prompting in a prompt style."""
    trained = frozenset({base.tokenizer.eos_id})
    return Prompting(
        template=template_of_style(style, base.tokenizer),
        origin=origin,
        end_ids=trained if origin == "trained" else _own_ends(base),
        style=style,
    )


def _old_style(result: Result) -> AnyStyle | None:
    """Prompt style of a result without a template of its own: of its run, or of LitGPT's file."""
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
    """Prompt style that a template was made from; None: it was made from no known style."""
    style = _old_style(result)
    if style is None or not is_of_style(template.source, style, base.tokenizer):
        return None
    return style


def _ends_of(template: ChatTemplate, base: BaseModel) -> frozenset[int]:
    """End tokens that a model came with, and those that end turns in a template.

    Raises:
        UserError: the extension that reads conversations is missing.
    """
    row = shape_row(CONVERSATION, f"The chat template ({template.name})")
    ends: frozenset[int] = imported(row.ends_place)(base.tokenizer, template)
    return _own_ends(base) | ends


def _own_ends(base: BaseModel) -> frozenset[int]:
    """End tokens that a model came with; EOS if it has no list of them."""
    known = frozenset() if base.directory is None else end_tokens(base.directory)
    return known or frozenset({base.tokenizer.eos_id})
