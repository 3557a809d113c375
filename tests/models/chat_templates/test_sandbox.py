"""What templates may do, and the bounds of time and memory that hold whatever they call."""

import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ftkit.errors import UserError
from ftkit.models.chat_templates import confined
from ftkit.models.chat_templates.confined import run_each_confined
from ftkit.models.chat_templates.sandbox import check_source
from ftkit.models.chat_templates.template import ChatTemplate, TemplateRefusal

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source: str) -> str:
    return ChatTemplate(source, "tried").render(MESSAGES)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates have 0.3 s of CPU time."""
    monkeypatch.setattr(confined, "MOST_SECONDS", 0.3)


def child() -> psutil.Process:
    """The process that renders."""
    (found,) = (
        process
        for process in psutil.Process().children()
        if "ftkit.models.chat_templates.child" in process.cmdline()
    )
    return found


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
        "{{ messages.nothing.at.all }}",
        "{{ '9' * 5000 | int }}{{ ('9' * 5000) | int + 'x' }}",
        "{{ 1 // 0 }}",
        "{{ raise_exception('\\ud800' * 10 ** 6) }}",
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


NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWN = (
    "{{% set n = namespace(x={}) %}}{{% for i in range({}) %}}{{% set n.x = {} %}}{{% endfor %}}"
)
HUGE = GROWN.format("7 ** 1000", 13, "n.x * n.x")


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "source",
    [
        NESTED,
        "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        f"{{% set quiet %}}{NESTED}{{% endset %}}",
        "{{ ('a b ' * 10 ** 6) | wordwrap(1) }}{{ ('a ' * 10 ** 7) | wordwrap(1) }}" * 9,
        HUGE + "{{ (n.x // (n.x - 1)) % (n.x // 3) // 7 }}" * 99,
        HUGE + "{{ n.x % (n.x // 7 ** 999 + 1) }}",
        "{{ 7 ** (10 ** 8) }}",
        "{{ int('f' * 10 ** 7, 16) }}{{ ('f' * 10 ** 7) | int(0, 16) // 3 ** (10 ** 6) }}",
        "{{ ('<' * 10 ** 8) | striptags }}",
        "{{ ('a@' * 10 ** 7) | urlize }}",
        "{{ ('aB' * 10 ** 7) | title | title | title }}",
        "{{ range(99999) | map('string') | map('center', 9999) | join | length }}",
        "{{ ('ab' * 10 ** 6).count('ba' * 10 ** 5 ~ 'c') }}" * 99,
        "{{ 3 ** (10 ** 10) }}",
    ],
)
def test_a_template_that_does_not_end_in_time_is_refused(source: str) -> None:
    """Some need so much memory on the way that this is the reason, which depends on the machine."""
    with pytest.raises((TemplateRefusal, UserError), match=r"more than 0.3 s|MiB|undefined"):
        render(source)


@pytest.mark.usefixtures("short")
def test_the_message_names_the_template_and_another_one() -> None:
    with pytest.raises(
        UserError, match=r"\(tried\) takes more than 0.3 s .*\n.*chat_template chatml"
    ):
        render(NESTED)


def growing(value: str) -> str:
    return GROWN.format("'xx'", 100, value)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
        "{% set a %}{% for i in range(99999) %}" + "x" * 99999 + "{% endfor %}{% endset %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 'x'|center(10 ** 10) }}",
        "{{ 'x'.ljust(10 ** 10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 10, 1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 10) }}",
        "{{ ('\n' * 10 ** 6)|indent(10 ** 6, blank=true) }}",
        "{{ [[1], [2]]|tojson(indent=10 ** 10) }}",
        "{{ range(99999)|join('x' * 99999) }}",
        "{{ ('x' * 10 ** 6).replace('x', 'y' * 10 ** 6) }}",
        "{{ (1).to_bytes(10 ** 10, 'big') }}",
        "{{ ('a' * 10 ** 5).translate({97: 'b' * 10 ** 5}) }}",
        "{{ range(9) | batch(10 ** 10, 'x') | list }}",
        "{{ range(9) | slice(10 ** 10) | list }}",
        growing("n.x ~ n.x"),
        growing("n.x + n.x"),
        growing("n.x.replace('x', n.x)"),
        growing("[n.x, n.x]") + "{{ n.x }}",
        growing("namespace(a=n.x, b=n.x)") + "{{ n.x }}",
    ],
)
@pytest.mark.usefixtures("short")
def test_a_template_that_needs_much_memory_is_refused(source: str) -> None:
    """Where memory is slow to fill, the time is over first."""
    reason = "more than (16 times|1,024 MiB of memory|0.3 s)|OverflowError"
    with pytest.raises((TemplateRefusal, UserError), match=reason):
        render(source)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "9" * 100_000 + " }}",
        "{{ " + "(" * 100_000 + ")" * 100_000 + " }}",
        "{% if x %}" * 5000 + "{% endif %}" * 5000,
        "{{ " + "-" * 50_000 + "1 }}",
        "{{ x" + ".x" * 50_000 + " }}",
        "{{ " + "[" * 300 + "]" * 300 + " }}" + "{% if %}",
        "{% macro f() %}{{ f(" * 1000,
    ],
)
def test_a_source_that_cannot_be_compiled_is_refused(source: str) -> None:
    with pytest.raises(UserError, match=r"chat template \(tried\) .*\n.*chatml"):
        ChatTemplate(source, "tried").render(MESSAGES)


def test_a_long_source_is_a_template() -> None:
    assert len(render("{{ messages[0].content }}" * 2000 + "x" * 2**20)) == 4000 + 2**20


def test_today_is_always_the_same_day() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"


def test_a_long_conversation_of_a_real_size_is_rendered() -> None:
    source = "{% for m in messages %}{{ '<|' + m.role + '|>' ~ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "x" * 10_000}] * 500
    assert len(ChatTemplate(source, "tried").render(messages)) == 500 * 10_008


def test_texts_come_back_as_they_are() -> None:
    content = "\ud800 \x00 \u2028 é 👋"
    assert (
        ChatTemplate("{{ messages[0].content }}", "tried").render([{"content": content}]) == content
    )


def test_a_conversation_that_no_process_can_be_given_is_refused() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(TemplateRefusal, match="nested too deeply"):
        ChatTemplate("x", "tried").render([{"content": nested}])


class TestTheProcess:
    def test_a_refusal_of_one_of_many_is_its_own(self) -> None:
        nested: list[object] = []
        for _ in range(100_000):
            nested = [nested]
        items = ["{{ 'a' }}", "{% if %}", nested, "{{ 'x' * 10 ** 10 }}", "{{ 'x' }}" * 2**13] * 2
        found = list(run_each_confined(check_source, [*items * 50, "last"]))
        refused = ["", "Expected an expression", "nested too deeply", "", ""] * 100
        assert len(found) == 501
        for result, reason in zip(found, refused, strict=False):
            assert reason in str(result) if reason else result is None

    @pytest.mark.extensions
    @pytest.mark.usefixtures("short")
    def test_a_conversation_with_too_many_turns_to_render_each_is_refused(self) -> None:
        from ftkit.extensions.chats.turns import TurnFinder

        template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", "tried")
        finder = TurnFinder(template, (), (), train_on="assistant", reasoning="split")
        roles = ("user", "assistant") * 5000
        record = {"messages": [{"role": role, "content": "x" * 99} for role in roles]}
        with pytest.raises(UserError, match=r"more than 1.8 s for one conversation"):
            list(finder.written_each([record]))

    def test_a_mistake_of_ours_is_not_taken_for_one_of_the_template(self) -> None:
        with pytest.raises(RuntimeError, match="TypeError"):
            list(run_each_confined(len, [1]))

    def test_one_that_is_killed_between_two_templates_is_replaced(self) -> None:
        assert render("x") == "x"
        child().kill()
        assert render("x") == "x"

    @pytest.mark.usefixtures("short")
    def test_one_that_exceeds_a_bound_is_replaced_and_gone(self) -> None:
        with pytest.raises(UserError):
            render(NESTED)
        assert render("x") == "x"
        assert child().is_running()

    def test_a_fork_has_one_of_its_own(self) -> None:
        assert render("x") == "x"
        mine = child().pid
        context = multiprocessing.get_context("fork")
        with context.Pool(1) as pool:
            assert pool.apply(rendered_in_fork, (mine,))
        assert child().pid == mine
        assert render("y") == "y"

    @pytest.mark.slow
    @pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
    def test_it_ends_with_its_parent_also_in_the_middle_of_a_template(
        self, end: signal.Signals, tmp_path: Path
    ) -> None:
        program = tmp_path / "program.py"
        program.write_text(
            "import sys\n"
            "from ftkit.models.chat_templates.template import ChatTemplate\n"
            "ChatTemplate('x', 'tried').render([])\n"
            "print('now', flush=True)\n"
            f"ChatTemplate({NESTED!r}, 'tried').render([])\n"
        )
        with subprocess.Popen(
            [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as parent:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"now\n"
            (renders,) = psutil.Process(parent.pid).children()
            parent.send_signal(end)
            parent.wait()
        psutil.wait_procs([renders], timeout=10)
        assert not renders.is_running()


def rendered_in_fork(of_parent: int) -> bool:
    return render("x") == "x" and child().pid != of_parent
