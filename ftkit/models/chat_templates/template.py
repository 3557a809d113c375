"""Chat templates: they render conversations to the text that a model reads."""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ftkit.errors import UserError
from ftkit.models.chat_templates.arguments import ARGUMENTS, with_defaults
from ftkit.models.chat_templates.confined import Exceeded, run_confined
from ftkit.models.chat_templates.sandbox import NotRendered, check_source, rendered
from ftkit.recipe.parsing import TEMPLATE_MARKS
from ftkit.utils.damaged_files import reading, require_regular
from ftkit.utils.names import nearest

CHAT_TEMPLATE = "chat_template.jinja"
"""File beside the tokenizer in which transformers and ftkit look for a model's template."""

Message = Mapping[str, Any]
"""role and content; tool_calls, reasoning_content and others where there are."""
Span = tuple[int, int]
"""First character and end."""

_MOST_CHARACTERS = 2**22
"""Most characters of a template's file; real ones have a few thousand."""
_WORD = re.compile(r"[^\W\d]\w*")
_PARTS = re.compile(r"\btype\b")
"""What a template reads of the parts of a content."""
_PROBE = "probe"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

OF_TOKENIZER = "tokenizer"
"""The template of the base model's tokenizer."""

_DIRECTORY = Path(__file__).parent / "named"
NAMED = {file.stem: file for file in sorted(_DIRECTORY.glob("*.jinja"))}
"""ftkit's own templates, written after published formats."""


class TemplateRefusal(NotRendered):
    """A template does not take a conversation; the text is the reason."""


class MarksNotFound(TemplateRefusal):
    """A template marks generated text that cannot be located in the result."""


@dataclass(frozen=True)
class ChatTemplate:
    """A jinja template as transformers' apply_chat_template renders it, in the same sandbox."""

    source: str
    """Jinja."""
    name: str
    """Name in messages: chatml, the path of its file, or where it comes from."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts of bos_token, eos_token and others, which templates may use."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values of other variables in each rendering."""

    def __post_init__(self) -> None:
        """Compile the source once, so that an invalid one is refused here.

        Raises:
            UserError: it is not a template.
        """
        try:
            # In the child, too: a source may be too large or too deeply nested to compile.
            run_confined(check_source, self.source)
        except NotRendered as error:
            problem = (
                f"is not a valid Jinja template: line {error.line}"
                if error.line
                else "does not compile"
            )
            raise UserError(
                f"The chat template ({self.name}) {problem}: {error}.\n"
                "Correct it there, or try --data.chat_template chatml."
            ) from None

    def with_arguments(self, arguments: Mapping[str, Any] | None) -> "ChatTemplate":
        """Return the template with the arguments of a record: values of variables, by name."""
        return dataclasses.replace(self, arguments=arguments) if arguments else self

    def with_defaults(self, arguments: Mapping[str, Any] | None) -> "ChatTemplate":
        """Return the template with the arguments of a run, which its text holds from now on.

        Raises:
            UserError: it does not read one of them.
        """
        if not arguments:
            return self
        words = dict.fromkeys(_WORD.findall(self.source))
        for name in arguments:
            if name not in words:
                near = nearest(name, words)
                raise UserError(
                    f"data.{ARGUMENTS}.{name} is {arguments[name]!r}, but the chat template "
                    f"({self.name}) does not read {name}.\n"
                    + (f"Write {near}, or remove {name}." if near else f"Remove {name}.")
                )
        return dataclasses.replace(self, source=with_defaults(self.source, arguments))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: object,
    ) -> str:
        """Render a conversation.

        Args:
            messages: in order.
            tools: JSON schemas of what may be called.
            add_generation_prompt: end with the beginning of an answer.
            variables: others that the template reads.

        Raises:
            TemplateRefusal: the template raises, or makes too large a text.
            UserError: it does not end in time, or ends the process that renders it.
        """
        return self._run(messages, tools, add_generation_prompt, variables)[0]

    def render_marked(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[Span]]:
        """Render a conversation; also return the spans of its `generation` blocks.

        Raises:
            TemplateRefusal, UserError: as `render`.
            MarksNotFound: a block is inside a macro, where it has no place of its own.
        """
        text, blocks = self._run(messages, tools, False, {})
        # The position counts text written so far, which a macro or a filter holds back.
        if not all(text.startswith(block, first) for first, block in blocks):
            raise MarksNotFound("the template's generation blocks are in macros or filtered")
        return text, [(first, first + len(block)) for first, block in blocks if block]

    @property
    def marks_generation(self) -> bool:
        """True if the template itself marks what the assistant generates."""
        return _GENERATION.search(self.source) is not None

    def _run(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> tuple[str, list[tuple[int, str]]]:
        if self._takes_parts_alone:
            messages = [_in_parts(message) for message in messages]
        return self._written(messages, tools, add_generation_prompt, variables)

    @property
    def _takes_parts_alone(self) -> bool:
        """Whether it leaves out contents that are texts, as those of some models that see do."""
        names = json.dumps(dict(self.special_tokens), sort_keys=True, default=str)
        return _needs_parts(self.source, self.name, names)

    def _written(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> tuple[str, list[tuple[int, str]]]:
        given = {
            # First, so that no name of a token replaces what follows.
            **self.special_tokens,
            **self.arguments,
            "messages": [_with_thought_under_other_names(message) for message in messages],
            "tools": tools,
            # As in transformers, so that templates may test for it.
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            text, blocks = run_confined(rendered, self.source, given)
        except Exceeded as error:
            raise self.explained(error) from None
        except NotRendered as error:
            raise TemplateRefusal(str(error)) from None
        # Tuples have come back from JSON as lists.
        return text, [(first, block) for first, block in blocks]

    def explained(self, error: Exceeded) -> UserError:
        """Return the error for a template that exceeds its limits."""
        return UserError(
            f"The chat template ({self.name}) {error}.\nTry --data.chat_template chatml."
        )


@functools.lru_cache(maxsize=64)
def _needs_parts(source: str, name: str, special_tokens: str) -> bool:
    """Whether a template writes the text of a part, but not a content that is a text."""
    if not _PARTS.search(source):
        return False
    template = ChatTemplate(source, name, json.loads(special_tokens))

    def writes(content: Any) -> bool:
        message = {"role": "user", "content": content}
        try:
            return _PROBE in template._written([message], None, False, {})[0]
        except TemplateRefusal:
            return False

    return not writes(_PROBE) and writes([{"type": "text", "text": _PROBE}])


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or not content:
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _with_thought_under_other_names(message: Message) -> Message:
    """Name the thought of a message as templates may: reasoning_content, or thinking (gpt-oss)."""
    # As transformers does since 5.24.
    names = ("reasoning_content", "thinking", "reasoning")
    thought = next((message[name] for name in names if message.get(name) is not None), None)
    if thought is None:
        return message
    return {"thinking": thought, **message, "reasoning_content": thought}


def template_of(tokenizer_directory: Path) -> str | None:
    """Return the chat template beside a tokenizer; None if there is none.

    Where there is one for tools and one for all else, they become one template.

    Raises:
        UserError: a file cannot be read.
    """
    # The file comes before the settings, as in transformers.
    file = tokenizer_directory / CHAT_TEMPLATE
    if file.is_file():
        return read_template(file)
    settings = tokenizer_directory / "tokenizer_config.json"
    if not settings.is_file():
        return None
    with reading(settings, expected="a JSON object", key="chat_template"):
        template = json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
        # Older files list several templates, each with its name.
        if isinstance(template, list):
            return _either({entry["name"]: entry["template"] for entry in template})
    return template if isinstance(template, str) else None


def read_template(file: Path) -> str:
    """Read the file of a template.

    Raises:
        UserError: it cannot be read.
    """
    require_regular(file)
    try:
        with file.open(encoding="utf-8") as stream:
            # Not the whole file, which may have any size.
            # One more character shows that there are too many.
            text = stream.read(_MOST_CHARACTERS + 1)
        if len(text) > _MOST_CHARACTERS:
            raise UserError(
                f"The chat template {file} has more than {_MOST_CHARACTERS:,} characters.\n"
                "Give a jinja template."
            )
        return text
    except UnicodeDecodeError:
        from ftkit.utils.texts import explain_not_utf8

        with file.open("rb") as content:
            raise UserError(f"The chat template {explain_not_utf8(file, content)}") from None
    except OSError as error:
        raise UserError(
            f"The chat template {file} cannot be read ({error}).\nSave it as UTF-8 text."
        ) from None


def _either(named: Mapping[str, str]) -> str | None:
    """Combine the template for tools and the default one, as transformers chooses them."""
    default, tool_use = (named.get(name) for name in ("default", "tool_use"))
    if default is None or tool_use is None:
        return default
    # Line ends at the seams are those of the templates alone.
    first, second = (text.removesuffix("\n") for text in (tool_use, default))
    # The plus signs keep trim_blocks and lstrip_blocks from eating white space at the seams.
    return f"{{% if tools is not none +%}}{first}{{%+ else +%}}{second}{{%+ endif %}}"


class TemplatedTokenizer(Protocol):
    """Interface of a tokenizer to its chat template."""

    model_name: str

    @property
    def special_tokens(self) -> Mapping[str, str]: ...

    @property
    def chat_template(self) -> str | None: ...


def check_chat_template(value: object, key: str = "data.chat_template") -> None:
    """Refuse invalid values of data.chat_template, as far as possible without a tokenizer.

    Args:
        value: of the key.
        key: named in the message.

    Raises:
        UserError: it is neither a name, nor a file, nor the text of a template.
    """
    if value == OF_TOKENIZER or value in NAMED or _is_text(value):
        return
    if isinstance(value, str | Path) and Path(value).expanduser().is_file():
        return
    near = nearest(str(value), [OF_TOKENIZER, *NAMED]) or "chatml"
    raise UserError(
        f"{key} is {value}, but has to be {OF_TOKENIZER} (the model's own), the path "
        f"of a jinja file, one of {', '.join(NAMED)}, or a jinja text with {{{{ }}}}.\n"
        f"Try --{key} {near}."
    )


def resolve_chat_template(
    value: str | Path, tokenizer: TemplatedTokenizer, key: str = "data.chat_template"
) -> ChatTemplate:
    """Return the template that data.chat_template names.

    Args:
        value: tokenizer, a name, the path of a file, or the text of a template.
        tokenizer: of the base model.
        key: named in messages.

    Raises:
        UserError: there is none, or it is not a template.
    """
    check_chat_template(value, key)
    special_tokens = dict(tokenizer.special_tokens)
    if value == OF_TOKENIZER:
        if tokenizer.chat_template is None:
            raise UserError(
                f"{key} is {OF_TOKENIZER}, but the tokenizer of "
                f"{tokenizer.model_name} has no chat template, as those of base models.\n"
                f"Try --{key} zephyr, which ends turns with EOS; chatml and others "
                "have tokens of their own."
            )
        return ChatTemplate(tokenizer.chat_template, "of the tokenizer", special_tokens)
    return text_template(value, special_tokens)


def text_template(value: str | Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """Return a named template, one from a file, or one given as text; needs no tokenizer.

    Raises:
        UserError: it is not a template.
    """
    if _is_text(value):
        return ChatTemplate(str(value), "given as text", special_tokens)
    file = NAMED.get(str(value)) or Path(value).expanduser()
    return ChatTemplate(read_template(file), str(value), special_tokens)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and any(mark in value for mark in TEMPLATE_MARKS)
