"""Child processes: they end with their parent, however that ends, and leave nothing behind."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from command import command_environment, command_line
from messages import message_of, says
from runs import DEFAULT_SIGNALS, start, wait_for

from ftkit.recipe import plugin
from ftkit.recipe.plugin import open_plugin

SOURCE = Path(plugin.__file__).parents[1]
HANGS = """
import os, pathlib, subprocess, time
sleeper = subprocess.Popen(["sleep", "300"])
file = pathlib.Path(__file__).with_name("begun")
file.with_name("new").write_text(f"{os.getpid()} {sleeper.pid}")
file.with_name("new").rename(file)
time.sleep(300)
"""
"""A plugin whose execution never ends."""
READ = "from ftkit.recipe.plugin import open_plugin\nopen_plugin(sys.argv[1])"
CONFINED = """
from pathlib import Path
from ftkit.utils.confinement import confined
confined("runpy:run_path", sys.argv[1], file=Path(sys.argv[1]))
"""


def has_ended(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("program", [READ, CONFINED])
def test_a_child_that_never_returns_ends_with_its_parent(
    program: str, number: signal.Signals, tmp_path: Path
) -> None:
    file, begun, temporary = tmp_path / "hangs.py", tmp_path / "begun", tmp_path / "tmp"
    file.write_text(HANGS)
    temporary.mkdir()
    line = command_line(file, before=f"{DEFAULT_SIGNALS}import sys\n{program}\nsys.exit()")
    process = start(line, tmp_path, command_environment() | {"TMPDIR": str(temporary)})
    wait_for(lambda: begun.exists() or process.poll() is not None)
    child, sleeper = map(int, begun.read_text().split())
    try:
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        wait_for(lambda: has_ended(child))
        assert (out, err) == ("", "")
        assert list(temporary.iterdir()) == []
        if number != signal.SIGKILL:
            assert process.returncode == 128 + number
            wait_for(lambda: has_ended(sleeper))
    finally:
        if not has_ended(sleeper):
            os.kill(sleeper, signal.SIGKILL)


@pytest.mark.slow
def test_a_plugin_that_never_returns_is_refused_with_the_line_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "MOST_SECONDS", 0.5)
    file = tmp_path / "hangs.py"
    file.write_text("import time\n\n\ntime.sleep(300)\n")
    said = message_of(open_plugin, file)
    assert says(said, "--plugin hangs.py ... 0.5 s ... line 4 ... leave out --plugin")


@pytest.mark.slow
def test_threads_that_a_plugin_leaves_do_not_delay_its_definitions(tmp_path: Path) -> None:
    file = tmp_path / "threads.py"
    file.write_text(
        "import threading, time\nimport ftkit\n"
        "threading.Thread(target=time.sleep, args=(300,)).start()\n"
        "class Mine(ftkit.Callback): pass\n"
    )
    opened = open_plugin(file)
    assert opened is not None and [one.name for one in opened.definitions] == ["Mine"]


def test_every_program_of_ours_ends_with_its_parent() -> None:
    started, begins = set(), set()
    for file in SOURCE.rglob("*.py"):
        text, name = file.read_text(), str(file.relative_to(SOURCE))
        assert "sys.executable" not in text or name == "utils/process.py", name
        started |= set(re.findall(r'(?:own_program|run_program)\(\s*"([\w.]+)"', text))
        if re.search(r"^    (begin_as_child\(|stop_with_parent\(|_main\()", text, re.MULTILINE):
            begins.add(".".join(file.relative_to(SOURCE.parent).with_suffix("").parts))
    assert len(started) >= 6
    assert started <= begins
