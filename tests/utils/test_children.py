"""Child processes: they end with their parent, however that ends, and leave nothing behind."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from command import command_environment, command_line
from runs import DEFAULT_SIGNALS, start, wait_for

import ftkit

SOURCE = Path(ftkit.__file__).parent
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
    if program == READ:
        pytest.importorskip("ftkit.extensions.plugin")  # a core alone lacks it
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


def test_every_program_of_ours_ends_with_its_parent() -> None:
    started, begins = set(), set()
    for file in SOURCE.rglob("*.py"):
        text, name = file.read_text(), str(file.relative_to(SOURCE))
        assert "sys.executable" not in text or name == "utils/process.py", name
        started |= set(re.findall(r'(?:own_program|run_program)\(\s*"([\w.]+)"', text))
        if re.search(r"^    (begin_as_child\(|stop_with_parent\(|_main\()", text, re.MULTILINE):
            begins.add(".".join(file.relative_to(SOURCE.parent).with_suffix("").parts))
    is_whole = (SOURCE / "extensions/plugin").is_dir()  # or a core alone
    assert len(started) >= 5 + is_whole
    assert started <= begins
