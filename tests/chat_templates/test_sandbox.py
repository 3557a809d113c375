import time

import pytest

from ftkit.chat_templates import sandbox
from ftkit.chat_templates.template import ChatTemplate, TemplateRefusal
from ftkit.errors import UserError

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source: str) -> str:
    return ChatTemplate(source, "tried").render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ cycler(1).__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% for i in range(10 ** 8) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ lipsum() }}",
        "{{ 'x'.encode() }}",
        "{{ (1).to_bytes(10 ** 10, 'big') }}",
        "{{ ('a' * 10 ** 5).translate({97: 'b' * 10 ** 5}) }}",
        "{{ messages.nothing.at.all }}",
    ],
)
def test_what_a_template_must_not_do_is_refused(source: str) -> None:
    with pytest.raises(TemplateRefusal):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ messages[0]['__class__'] }}",
    ],
)
def test_private_attributes_are_undefined(source: str) -> None:
    assert render(source) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(100000) %}{% for j in range(100000) if j < 0 %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_without_end_is_stopped_even_if_it_writes_nothing(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.2)
    start = time.thread_time()
    with pytest.raises(UserError, match=r"may never end.\nTry --data.chat_template chatml"):
        render(source)
    assert time.thread_time() - start < 10


GROWING = (
    "{{% set n = namespace(x='xx') %}}{{% for i in range(100) %}}{{% set n.x = {} %}}{{% endfor %}}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% for i in range(100000) %}" + "x" * 1000 + "{% endfor %}",
        "{% set a %}{% for i in range(100000) %}" + "x" * 1000 + "{% endfor %}{% endset %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 'x'|center(10 ** 10) }}",
        "{{ 'x'.ljust(10 ** 10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 10, 1) }}",
        "{{ '%10000000000d'|format(1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 10) }}",
        "{{ ('\n' * 10 ** 6)|indent(10 ** 6) }}",
        "{{ [[1], [2]]|tojson(indent=10 ** 8) }}",
        "{{ ([1] * 10 ** 5)|tojson(separators=('x' * 10 ** 6, 'y')) }}",
        "{{ ('a ' * 10 ** 6)|wordwrap(1, wrapstring='x' * 10 ** 6) }}",
        "{{ range(100000)|join('x' * 100000) }}",
        "{{ ('x' * 100000).join(range(100000)|map('string')) }}",
        "{{ range(100000)|map('string')|map('center', 10000)|join }}",
        "{{ ('x' * 10 ** 6).replace('x', 'y' * 10 ** 6) }}",
        GROWING.format("n.x ~ n.x"),
        GROWING.format("n.x + n.x"),
        GROWING.format("n.x.replace('x', n.x)"),
        GROWING.format("[n.x, n.x]|join"),
        GROWING.format("[n.x, n.x]"),
        GROWING.format("dict(a=n.x, b=n.x)"),
        GROWING.format("[n.x]|batch(2, n.x)|list"),
    ],
)
def test_nothing_large_is_made(source: str) -> None:
    start = time.thread_time()
    with pytest.raises((TemplateRefusal, UserError), match="more than 16,777,216 characters"):
        render(source)
    assert time.thread_time() - start < 10


def test_namespaces_in_namespaces_are_no_text() -> None:
    source = GROWING.format("namespace(a=n.x, b=n.x)") + "{{ n.x }}"
    assert render(source) == "<Namespace>"


def test_today_is_always_the_same_day() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"


def test_a_long_conversation_of_a_real_size_is_rendered() -> None:
    source = "{% for m in messages %}{{ '<|' + m.role + '|>' ~ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "x" * 10_000}] * 500
    assert len(ChatTemplate(source, "tried").render(messages)) == 500 * 10_008
