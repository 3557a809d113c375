"""The sandbox that templates run in: jinja2's, with bounds on time and on the size of values.

Templates come with models and from hubs, so they are not trusted. Settings, filters and globals are
those of transformers 5.3 (transformers/utils/chat_template_utils.py), but for what is random.

Loops, macros and whatever makes a value out of others are given a guard when a template is
compiled: so a loop without output ends too, in any thread, and nothing large is made first and
measured later.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_eval_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MOST_CHARACTERS = 2**24
"""That a rendering may make in all, and that any value may have."""
MOST_SECONDS = 10.0
"""Of CPU time for one rendering; real ones take less than a thousandth."""
DATE = datetime(2024, 7, 26)
"""Today, for templates that ask: a rendering does not depend on the day on which it is made. It is
the date that Llama 3.1's template takes where it is told none."""

_MOST_ITEMS = 2**18
"""In a value, and in what is in it."""
_MOST_BITS = 4096
"""Of a whole number."""
_STEPS_BETWEEN_LOOKS = 64
_UNBOUNDED = ("encode", "fromhex", "maketrans", "to_bytes", "translate")
"""Methods that lead to bytes, whose sizes nobody looks at, or that make long texts of tables."""
_MULTIPLYING = ("indent", "tojson", "urlize", "wordwrap")
"""Filters that put one text into many places of another value."""
_DEEPENING = ("batch", "groupby", "slice")
"""Filters whose results nest what they are given."""


class TooLarge(Exception):
    """A rendering makes more than `MOST_CHARACTERS`."""

    def __init__(self) -> None:
        super().__init__(f"it makes more than {MOST_CHARACTERS:,} characters")


class TooSlow(Exception):
    """A rendering takes longer than `MOST_SECONDS`."""


@dataclass
class Budget:
    """What a rendering may still do, and what it has put out."""

    characters: int = MOST_CHARACTERS
    """Left to be made."""
    steps: int = 0
    """Of loops and macros."""
    deadline_s: float = field(default_factory=lambda: time.thread_time() + MOST_SECONDS)
    emitted: int = 0
    """Characters of the text so far."""
    generated: list[tuple[int, str]] = field(default_factory=list)
    """Where each `generation` block begins, and its text."""

    def charge(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise TooLarge

    def step(self, characters: int) -> None:
        self.charge(characters)
        self.steps += 1
        if not self.steps % _STEPS_BETWEEN_LOOKS and time.thread_time() > self.deadline_s:
            raise TooSlow


_BUDGET: ContextVar[Budget] = ContextVar("budget of a rendering")


def stream(template: Template, variables: Mapping[str, object], budget: Budget) -> Iterator[str]:
    """The text of a template, piece by piece.

    Raises:
        TooLarge, TooSlow: it exceeds its budget.
        Exception: whatever the template raises.
    """
    with _in_use(budget):
        for piece in template.generate(variables):
            budget.emitted += len(piece)
            if budget.emitted > MOST_CHARACTERS:
                raise TooLarge
            yield piece


@functools.lru_cache(maxsize=64)
def compiled(source: str) -> Template:
    """A template, ready to render.

    Raises:
        jinja2.TemplateSyntaxError: it is none.
    """
    environment = _environment()
    with _in_use(Budget()):  # constants are computed now
        tree = _Guarded().visit(environment.parse(source))
        code = environment.compile(tree)
    made: Template = environment.template_class.from_code(
        environment, code, environment.make_globals(None)
    )
    return made


@contextmanager
def _in_use(budget: Budget) -> Iterator[None]:
    token = _BUDGET.set(budget)
    try:
        yield
    finally:
        _BUDGET.reset(token)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNBOUNDED and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left, (right,))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        return _bounded(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        method = getattr(__obj, "__wrapped__", __obj)  # jinja wraps the methods that format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            name = method.__name__
            if name == "join":
                args = (*map(list, args),)
            values = (*args, *kwargs.values())
            if name in ("format", "format_map"):
                _check_format(text, values)
            else:
                _check_arguments(name, (text, *values))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str | list | dict) and (
            __obj is dict or isinstance(__obj, BuiltinMethodType)
        ):
            return _bounded(result) if __obj is dict else _measured(result)
        return result


class _Namespace(Namespace):
    """Jinja's, which as a text would hold all that is in it."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Generation(Extension):
    """The tag `generation` around what an assistant says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    @pass_eval_context
    def mark(self, _: object, caller: Callable[[], str]) -> str:
        budget = _BUDGET.get()
        text = caller()
        budget.generated.append((budget.emitted, text))
        return text


class _Guarded(NodeTransformer):
    """Puts a step before each pass of a loop or macro, and a bound around each made value."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        match node:
            case nodes.For() | nodes.Macro():
                return self._with_step(node)
            case nodes.Add():
                return self._sum(node)
            case nodes.Concat() | nodes.Dict() | nodes.List() | nodes.Tuple(ctx="load"):
                constant = all(isinstance(child, nodes.Const) for child in node.iter_child_nodes())
                self.generic_visit(node)
                return node if constant else _filtered(node, "bounded")
        return self.generic_visit(node)

    def _sum(self, node: nodes.Add) -> nodes.Node:
        """One bound around the whole of it."""
        first = node
        while isinstance(first.left, nodes.Add):
            first.right = self.visit(first.right)
            first = first.left
        self.generic_visit(first)
        return _filtered(node, "bounded")

    def _with_step(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        step = nodes.ExprStmt(_filtered(nodes.Const(written), "step"))
        node.body.insert(0, step.set_lineno(node.lineno))
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Node:
    return nodes.Filter(node, name, [], [], None, None).set_lineno(node.lineno or 1)


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        finalize=_put_out,
        optimized=False,
    )
    environment.filters["tojson"] = _to_json
    # Two renderings of a conversation are the same.
    del environment.filters["random"], environment.globals["lipsum"]
    for name, function in environment.filters.items():
        environment.filters[name] = _guarded(name, function)
    environment.filters |= {"bounded": _bounded, "step": lambda cost: _BUDGET.get().step(cost)}
    environment.globals |= {
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": DATE.strftime,
    }
    return environment


def _raise_exception(message: object) -> None:
    raise TemplateError(str(_bounded(message)))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers': jinja's own filter escapes characters of HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses to make what is too large."""

    @functools.wraps(function)  # with its marks for what jinja passes first
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if name == "join":
            *passed, value = args[:2]
            args = (*passed, list(value), *args[2:])
        values = (*args, *kwargs.values())
        if name == "format":
            _check_format(str(args[0]), values[1:])
        else:
            _check_arguments(name, values)
        result = function(*args, **kwargs)
        if name in _DEEPENING:
            return _bounded(list(result))
        return _measured(result)

    return guarded


def _put_out(value: Any) -> Any:
    _BUDGET.get().charge(len(value) if isinstance(value, str) else _size(value))
    return value


def _measured(value: Any) -> Any:
    """Charge for a value that nests nothing anew."""
    if isinstance(value, str | list | dict):
        _BUDGET.get().charge(len(value))
    return value


def _bounded(value: Any) -> Any:
    """Charge for a value with everything in it."""
    _BUDGET.get().charge(len(value) if isinstance(value, str) else _size(value))
    return value


def _size(value: Any) -> int:
    """Characters that a value would have as text, roughly.

    Raises:
        TooLarge: as soon as it has too many, however often they are the same.
    """
    size = items = 0
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, list | tuple | set | frozenset):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, int):
            _check_bits(item.bit_length())
        items += 1
        if size > MOST_CHARACTERS or items + len(pending) > _MOST_ITEMS:
            raise TooLarge
    return size + items


def _check(characters: int) -> None:
    if characters > MOST_CHARACTERS:
        raise TooLarge


def _check_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        raise TooLarge


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for many, times in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(times, int):
            _check(max(_size(many), 1) * times)


def _check_arguments(name: str, values: tuple[Any, ...]) -> None:
    """Before a filter or a method of a text: what it makes of widths, counts and long texts."""
    texts = [value for value in values if isinstance(value, str)]
    if name == "replace" and len(texts) >= 3:
        text, old, new = texts[:3]
        _check(len(text) + text.count(old) * len(new))
    elif name == "join":
        parts = [value for value in values if isinstance(value, list | tuple)]
        between = max(map(len, texts), default=0)
        _check(sum(_size(part) + between * len(part) for part in parts))
    elif name in _MULTIPLYING:
        *others, largest = sorted(_size(value) for value in values)
        _check(largest * sum(others))
    widths = [value for value in values if isinstance(value, int)]
    if widths and (texts or max(widths) > MOST_CHARACTERS):
        _check(max(widths) * max(map(len, texts), default=1))


def _check_format(text: str, values: tuple[Any, ...]) -> None:
    """Before a text is formatted: widths in it, and widths given to it."""
    fields = text.count("%") + text.count("{")
    widths = [int(digits[:9]) for digits in re.findall(r"\d+", text)]
    given = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    widths += [value for value in given if isinstance(value, int)]
    _check(len(text) + fields * (sum(map(_size, values)) + max(widths, default=0)))
