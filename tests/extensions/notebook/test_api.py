"""The Python API: in a real Jupyter kernel, and without one."""

import ast
import dataclasses
import inspect
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest
from command import ROOT, Start, command_environment, start_up_of_ranks
from compared_runs import at_work, make_run, note_in_ranks
from jupyter_kernels import Kernel, kernel
from messages import says
from plugins import write_documented
from runs import DEFAULT_SIGNALS, FOREVER, rows, wait_for, watched

import ftkit
import ftkit.extensions.notebook.plans  # libraries set environment variables
from ftkit.checkpoint.store import Store
from ftkit.errors import UserError
from ftkit.runs.lock import Supervisor
from ftkit.runs.report.report import write_report


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working directory of the kernel."""
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def notebook(directory: Path, common: list[str]) -> Iterator[Kernel]:
    """A kernel in which `keys` is the smallest run there is, and `forever` one without an end."""
    with kernel(directory) as found:
        keys = {word[2:]: value for word, value in zip(common[::2], common[1::2], strict=True)}
        forever = {key.replace("__", "."): str(value) for key, value in FOREVER.items()}
        found.run(
            f"import ftkit\nkeys = {json.dumps(keys)}\nforever = keys | {json.dumps(forever)}"
        )
        yield found


# --- In a kernel --------------------------------------------------------------------------------


def test_a_run_is_followed_in_its_cell_and_ends_in_a_compact_view(notebook: Kernel) -> None:
    cell = notebook.run(
        'run = ftkit.finetune(**keys, out_dir="out/first")\nimport sys\n'
        'print(run, run.out_dir.is_absolute(), "torch" in sys.modules)'
    )
    assert cell.error is None
    assert cell.printed == "<ftkit run out/first: completed> True False\n"
    assert len(cell.shown) == 1
    assert any("<progress" in update for update in cell.updates)
    view, _, rest = cell.text.partition("all that was measured")
    assert re.match(
        r"out/first completed train\.max_steps of 5 reached lora on \w+, .* tokens/s trained 5 ",
        view,
    )
    for words in ("validation", "result out/first/final", "predicted", "measured here", "CPU busy"):
        assert words in view
    assert "checkpoints" not in view
    assert re.match(r" ftkit lora on \w+ completed train\.max_steps of 5 reached parameters", rest)
    assert "checkpoints" in rest

    cell = notebook.run("run.report")
    assert "train.max_steps of 5 reached" in cell.text
    assert notebook.run("print(run.report.outcome, run.report.progress.steps)").printed == (
        "completed 5\n"
    )
    cell = notebook.run("run.plot()")
    assert cell.shown[0]["image/png"].startswith("iVBOR")

    again = notebook.run('run = ftkit.finetune(**keys, out_dir="out/first", resume="auto")')
    assert again.error is None
    assert "complete" in again.text.partition("lora on")[0] + again.text.rpartition("step-")[2]


@pytest.mark.slow
def test_an_interrupt_of_the_kernel_ends_the_run_after_its_step_and_saves(
    notebook: Kernel, directory: Path
) -> None:
    cell = notebook.start('run = ftkit.finetune(**forever, out_dir="out/stopped")')
    cell.wait_for("eta")
    wait_for(lambda: len(rows(directory / "out/stopped")) > 2)
    notebook.interrupt()
    cell.wait_for("ending after the current step")
    cell.end()
    assert cell.error is None
    assert "interrupted Ctrl+C" in cell.text
    newest = Store(directory / "out/stopped/checkpoints").newest()
    assert newest == len(rows(directory / "out/stopped"))
    assert notebook.run("print(run.outcome)").printed == "interrupted\n"

    gone_on = notebook.run(
        'run = ftkit.finetune("out/stopped/recipe.yaml", resume="auto", stop_after=2)'
    )
    assert gone_on.error is None and "stopped --stop_after 2" in gone_on.text
    assert len(rows(directory / "out/stopped")) == newest + 2


def test_bad_input_raises_the_message_of_the_command(notebook: Kernel) -> None:
    cell = notebook.run('ftkit.finetune(**keys, **{"train.max_stepz": 1})')
    assert says(cell.error, "UserError: train.max_stepz ... Did you mean train.max_steps")
    cell = notebook.run(
        'ftkit.finetune(**keys | {"checkpoint_dir": "nowhere", "out_dir": "out/no"})'
    )
    assert says(cell.error, "UserError: checkpoint_dir nowhere")
    assert cell.html == cell.printed == ""
    cell = notebook.run("ftkit.finetune(**keys, loss=print)")
    assert says(cell.error, "UserError: loss is <built-in function print> ... plugin='FILE.py'")
    cell = notebook.run('ftkit.attach("out/no")')
    assert says(cell.error, "UserError: out/no")


@pytest.mark.slow
def test_an_out_of_memory_raises_nothing_and_the_kernel_continues(
    notebook: Kernel, tmp_path: Path
) -> None:
    start_up = start_up_of_ranks(
        tmp_path,
        "import ftkit.training.step, torch\n"
        "def step(*_): raise torch.OutOfMemoryError('CUDA out of memory.')\n"
        "ftkit.training.step.TrainStep.update = step\n",
    )
    cell = notebook.run(
        "import os\nbefore = os.environ['PYTHONPATH']\n"
        f"os.environ['PYTHONPATH'] += ':{start_up}'\n"
        'full = ftkit.finetune(**keys, out_dir="out/memory")\n'
        "os.environ['PYTHONPATH'] = before\n"
        "print(full.outcome, full.report.exit_code)"
    )
    assert (cell.error, cell.printed) == (None, "out_of_memory 3\n")
    cell = notebook.run("ftkit.compare([full])")
    assert "out of memory" in cell.text


@pytest.mark.slow
def test_a_second_interrupt_ends_the_run_at_once(notebook: Kernel, directory: Path) -> None:
    endless = {"train.max_steps": 2, "train.global_batch_size": 200_000}
    cell = notebook.start(f'ftkit.finetune(**forever | {endless}, out_dir="out/killed")')
    cell.wait_for("training:")
    notebook.interrupt()
    cell.wait_for("ending after the current step")
    notebook.interrupt()
    cell.end()
    assert cell.error == "KeyboardInterrupt: "
    assert "interrupted" in cell.text


@pytest.mark.slow
def test_a_run_of_another_process_is_followed_left_alone_and_stopped(
    notebook: Kernel, start: Start, directory: Path
) -> None:
    out_dir = directory / "out/elsewhere"
    with start(out_dir, **FOREVER, before=DEFAULT_SIGNALS) as run:
        run.wait_for_steps(2)
        cell = notebook.start('other = ftkit.attach("out/elsewhere")\nother.wait()')
        cell.wait_for("eta")
        notebook.interrupt()
        cell.end()
        assert cell.error == "KeyboardInterrupt: "
        steps = len(rows(out_dir))
        run.wait_for_steps(steps + 2)
        cell = notebook.run("other.stop()")
        assert cell.error is None and "interrupted Ctrl+C" in cell.text
        assert run.end()[0] == 130
    assert Store(out_dir / "checkpoints").newest() == len(rows(out_dir))


@pytest.mark.slow
def test_a_run_saves_and_ends_when_its_kernel_is_killed(common: list[str], tmp_path: Path) -> None:
    keys = {word[2:]: value for word, value in zip(common[::2], common[1::2], strict=True)}
    keys |= {key.replace("__", "."): str(value) for key, value in FOREVER.items()}
    out_dir = tmp_path / "out"
    with kernel(tmp_path) as dying:
        cell = dying.run(
            f'import ftkit\nrun = ftkit.finetune(**{keys}, out_dir="out", wait=False)\n'
            "print(run.outcome in ('starting', 'running'))"
        )
        assert (cell.error, cell.printed) == (None, "True\n")
        wait_for(lambda: len(rows(out_dir)) > 1)
        found = Supervisor.of(out_dir)
        assert found is not None
        supervisor = psutil.Process(found.process)
        dying.kill()
        wait_for(lambda: not supervisor.is_running())
    run = ftkit.attach(out_dir)
    assert run.outcome == "interrupted"
    assert run.report.exit_reason == "SIGTERM"
    assert Store(out_dir / "checkpoints").newest() == len(rows(out_dir))


# --- Without one --------------------------------------------------------------------------------


@pytest.mark.slow
def test_import_ftkit_imports_nothing_else_of_it_until_it_is_used() -> None:
    program = (
        "import sys, ftkit\n"
        "print(sorted(m for m in sys.modules if m.startswith('ftkit')))\n"
        "assert {'finetune', 'plan', 'compare', 'attach'} <= set(dir(ftkit))\n"
        "ftkit.finetune, ftkit.compare, ftkit.UserError\n"
        "print(sorted(sys.modules.keys() & {'torch', 'lightning', 'IPython', 'matplotlib'}))\n"
        "ftkit.plan\n"
        "print(callable(ftkit.plan))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == (
        "['ftkit', 'ftkit.moved', 'ftkit.version']\n[]\nTrue\n",
        "",
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'finetun'"):
        ftkit.finetun  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_see_all_functions_with_their_parameters() -> None:
    """In the stub beside ftkit/__init__.py; the rest of the package is its own."""
    stub = ast.parse((ROOT / "ftkit/__init__.pyi").read_text(encoding="utf-8"))
    names = {
        alias.asname
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    } - {None}
    written = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert names | written.keys() == {*ftkit.__all__}
    for name, node in written.items():
        there = inspect.signature(getattr(ftkit, name)).parameters
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        assert [a.arg for a in given] + ["keys"] == [*there]
        defaults = [*node.args.defaults, *node.args.kw_defaults]
        assert [ast.literal_eval(d) for d in defaults if d is not None] == [
            p.default for p in there.values() if p.kind is not p.VAR_KEYWORD
        ]
    assert (ROOT / "ftkit/py.typed").is_file()


class Words(HTMLParser):
    """Fails on what a page must not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: Any, attrs: Any) -> None:
        assert tag not in ("script", "style", "img", "a", "b2"), tag
        assert not any(name.startswith("on") for name, _ in attrs)
        self.open.append(tag)

    def handle_endtag(self, tag: Any) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: Any) -> None:
        self.text += f" {data}"


def words(html: str) -> str:
    """The text of well-formed HTML."""
    parser = Words()
    parser.feed(html.replace("/>", "></polyline>"))
    assert parser.open == []
    return " ".join(parser.text.split())


NASTY = "<script>alert(1)</script>&<b2>"


def test_what_is_shown_of_a_run_is_escaped_html(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("out") / "a", checkpoint_dir=NASTY, out_dir=NASTY)
    run = ftkit.attach("out/a")
    assert says(words(run._repr_html_()), "out/a completed all 2 epochs")
    text = words(run.report._repr_html_())
    assert says(text, "lora on base completed all 2 epochs")
    assert "10.0 GiB allocated" in text
    assert "10.0 GiB" in words(ftkit.compare([run])._repr_html_())
    assert "10.0 GiB" in str(ftkit.compare([run]))
    assert repr(ftkit.compare([run])) == "<ftkit comparison of a>"


def test_what_is_shown_of_a_run_at_work_is_escaped_html(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out" / "<b2>a&amp;"
    report = make_run(out, "failed", steps=20, total_steps=40, write=False)
    note_in_ranks(out, report)
    run = ftkit.attach(out)
    with at_work(out):
        html = run._repr_html_()
        assert run.outcome == "running"
        assert run.report.progress.steps == 20
    assert words(html).startswith("out/<b2>a&amp; running training: lora on base")
    assert "step 20/40" in words(html)
    assert "<polyline" in html


@pytest.mark.slow
def test_a_program_follows_in_lines_and_ctrl_c_stops_the_run(
    common: list[str], tmp_path: Path
) -> None:
    keys = {word[2:]: value for word, value in zip(common[::2], common[1::2], strict=True)}
    keys |= {key.replace("__", "."): str(value) for key, value in FOREVER.items()}
    program = f"{DEFAULT_SIGNALS}\nimport ftkit\nrun = ftkit.finetune(**{keys}, out_dir='out')\n"
    command = [sys.executable, "-c", f"{program}print(run.outcome)"]
    environment = command_environment()
    # Ranks that begin at once would have steps before there is a line to be followed.
    with watched(tmp_path / "out", command, tmp_path, environment, cold=True) as run:
        wait_for(lambda: len(rows(tmp_path / "out")) > 1)
        run.process.send_signal(signal.SIGINT)
        code, out, err = run.end()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("out: ")
    assert lines.count("ending after the current step; interrupt again to end at once") == 1
    assert lines[-1] == "interrupted"


def test_html_has_colours_that_stand_out_from_white_and_from_black(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", "out_of_memory")
    make_run(tmp_path / "c", "interrupted")
    pages = [ftkit.attach(tmp_path / name).report._repr_html_() for name in "abc"]
    pages.append(ftkit.compare([tmp_path])._repr_html_())
    colors = set(re.findall(r"color:\s*(#\w+)", "".join(pages)))
    assert len(colors) == 3
    for color in colors:
        light = luminance(color)
        assert 1.05 / (light + 0.05) >= 4 and (light + 0.05) / (luminance("#111111") + 0.05) >= 3.5


def luminance(color: str) -> float:
    """Relative luminance, as the Web Content Accessibility Guidelines 2 define it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_run_on_another_machine_is_not_stopped_from_here(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = make_run(out, "failed", write=False)
    note_in_ranks(out, report)
    with at_work(out):
        (out / ".run/lock").write_text(json.dumps({"host": "elsewhere", "process": 1}))
        with pytest.raises(UserError, match="running on elsewhere"):
            ftkit.attach(out).stop()


@pytest.mark.parametrize("during", ["os.kill", "ftkit.extensions.notebook.api.Supervisor.of"])
def test_a_run_that_ends_just_before_it_is_stopped_has_ended(
    during: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    report = make_run(out, write=False)
    note_in_ranks(out, report)
    with ExitStack() as lock:
        lock.enter_context(at_work(out))
        here = dataclasses.asdict(Supervisor.here())
        (out / ".run/lock").write_text(json.dumps(here))

        def ended(*_: object) -> None:
            write_report(report, out)
            shutil.rmtree(out / ".run")
            lock.close()
            if during == "os.kill":
                raise ProcessLookupError

        monkeypatch.setattr(during, ended)
        assert ftkit.attach(out).stop().outcome == "completed"


@pytest.mark.matrix
def test_a_plugin_is_an_argument_of_runs_and_plans(notebook: Kernel, directory: Path) -> None:
    write_documented(directory / "my.py", "An objective")
    own = 'plugin="my.py", objective="Focal"'
    cell = notebook.run(
        f'run = ftkit.finetune(**keys, {own}, out_dir="out/own")\n'
        f"plan = ftkit.plan(**keys, {own})\n"
        "print(run.outcome, (run.out_dir / 'plugin.py').exists())\n"
        'print(plan.plan.recipe.objective["class_path"])'
    )
    assert cell.error is None
    assert cell.printed == "completed True\nplugin.Focal\n"
