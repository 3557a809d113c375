"""Reading a plugin: in a process of its own, which is ended if it takes too long."""

import subprocess
import sys
from pathlib import Path

import pytest
from command import command_environment
from messages import message_of, says

from ftkit.extensions.plugin import reading
from ftkit.recipe.plugin import PLUGIN_READERS, PluginReader, open_plugin
from ftkit.utils.registry import Registry


@pytest.mark.slow
def test_a_plugin_that_never_returns_is_refused_with_the_line_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_SECONDS", 0.5)
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
    assert opened is not None and opened.names("callback") == ["Mine"]


def test_the_program_is_found_by_its_old_name_with_a_notice() -> None:
    line = [sys.executable, "-m", "ftkit.training.plugin_contents"]
    ended = subprocess.run(line, capture_output=True, text=True, env=command_environment())
    assert "ftkit.training.plugin_contents is ftkit.extensions.plugin.contents now" in ended.stderr
    assert "ftkit/extensions/plugin/contents.py" in ended.stderr, "it asks for its arguments"


def test_without_the_extension_a_plugin_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry: Registry[PluginReader] = Registry("nothing", (PluginReader,), core=())
    monkeypatch.setattr("ftkit.recipe.plugin.PLUGIN_READERS", registry)
    assert any(PLUGIN_READERS), "here it is"
    assert says(message_of(open_plugin, "my.py"), "--plugin my.py ... extension plugin ... missing")
