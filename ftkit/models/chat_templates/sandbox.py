"""The sandbox that templates run in: jinja2's, as transformers sets it up.

Templates come with models and from hubs, so they are not trusted. Settings, filters and globals are
those of transformers 5.3 (transformers/utils/chat_template_utils.py), except for what is random.
What a template may reach is bounded here; its time and memory are bounded by the process that it
runs in (`ftkit.models.chat_templates.child`), whatever it calls.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes, pass_eval_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

FREE_CHARACTERS, MOST_GROWTH = 2**18, 16
"""Most characters of a text: the first number, those of the template, and the second times those
that it is given. Without a bound that follows from the conversation, a template that makes
megabytes of every record keeps the tokenizer busy for hours."""
DATE = datetime(2024, 7, 26)
"""The date that templates get as today's, so that a rendering does not depend on the day on which
it is made. Llama 3.1's template writes the same date where it gets none."""

_TOO_LONG = f"its text is more than {MOST_GROWTH} times longer than the conversation"
_MOST_REASON = 500
"""Characters of a reason."""


class NotRendered(Exception):
    """A template does not compile, or does not take a conversation; the text is the reason."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line
        """Line of the source with the error, if it does not compile."""


@dataclass
class _Output:
    """Output of a rendering so far."""

    pieces: list[str] = field(default_factory=list)
    characters: int = 0
    generated: list[tuple[int, str]] = field(default_factory=list)
    """First character and text of each `generation` block."""


_OUTPUT: ContextVar[_Output] = ContextVar("output of the current rendering")


def check_source(source: str) -> None:
    """Compile a template.

    Raises:
        NotRendered: it does not compile.
    """
    with _explained():
        _compiled(source)


def rendered(source: str, variables: Mapping[str, object]) -> tuple[str, list[tuple[int, str]]]:
    """Render a template: its text, and first character and text of each `generation` block.

    Raises:
        NotRendered: the template raises anything, or its text is much longer than its input.
    """
    most = FREE_CHARACTERS + len(source) + MOST_GROWTH * _characters_in(variables)
    output = _Output()
    # A context variable: the tag's extension belongs to the environment that all renderings share.
    token = _OUTPUT.set(output)
    try:
        with _explained():
            # Piece by piece: a template that writes without end is stopped before its text fills
            # the memory.
            for piece in _compiled(source).generate(variables):
                output.pieces.append(piece)
                output.characters += len(piece)
                if output.characters > most:
                    raise NotRendered(_TOO_LONG)
            return "".join(output.pieces), output.generated
    finally:
        _OUTPUT.reset(token)


def _characters_in(value: object) -> int:
    """Characters of all texts in a value as JSON has it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters_in, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_characters_in, value))
    return 0


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    # The process has its own words for a lack of memory.
    except (NotRendered, MemoryError):
        raise
    except TemplateSyntaxError as error:
        raise NotRendered(_shortened(error.message or ""), error.lineno) from None
    except Exception as error:  # whatever code of a template raises
        raise NotRendered(_reason(error)) from None


def _reason(error: Exception) -> str:
    text = _shortened(str(error))
    # What raise_exception says is for readers; other errors need the name of their class.
    if isinstance(error, TemplateError) and text:
        return text.rstrip(".")
    return f"{type(error).__name__}: {text}".rstrip(": .")


def _shortened(text: str) -> str:
    return text.strip().partition("\n")[0][:_MOST_REASON]


class _Generation(Extension):
    """The tag `generation` around what an assistant says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    @pass_eval_context
    def mark(self, _: object, caller: Callable[[], str]) -> str:
        output = _OUTPUT.get()
        # The text is in none of the pieces yet, so their length is where it begins.
        text = caller()
        output.generated.append((output.characters, text))
        return text


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    # Two renderings of a conversation are the same.
    del environment.filters["random"], environment.globals["lipsum"]
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": DATE.strftime}
    return environment


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # As in transformers: the filter of jinja escapes characters of HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
