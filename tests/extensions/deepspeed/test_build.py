"""A process that is killed while it compiles does not make all later ones wait for ever."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from command import command_environment
from rank_jobs import needs_deepspeed
from runs import wait_for

from ftkit.extensions.deepspeed import deepspeed
from ftkit.extensions.deepspeed.deepspeed import STALE_S, sole_builder
from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import make_plan

BUILDER = """
import sys, time
from pathlib import Path
from ftkit.extensions.deepspeed.deepspeed import sole_builder
directory = Path(sys.argv[1])
with sole_builder(directory):
    (directory / "lock").touch()
    time.sleep(100)
"""


@pytest.fixture
def builder(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that compiles, holding torch's lock file."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(tmp_path)], env=command_environment()
    )
    wait_for(lambda: (tmp_path / "lock").exists())
    yield process
    process.kill()
    process.wait()


@pytest.mark.matrix
def test_files_of_a_killed_builder_are_removed(
    builder: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    assert (tmp_path / "lock").exists()
    with sole_builder(tmp_path):
        assert not (tmp_path / "lock").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["ftkit.lock"]


@pytest.mark.slow
def test_a_builder_at_work_is_waited_for(builder: subprocess.Popen[bytes], tmp_path: Path) -> None:
    code = BUILDER.replace('(directory / "lock").touch()', 'print("in", flush=True)')
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=command_environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as second:
        try:
            assert second.stdout is not None
            time.sleep(1)
            assert second.poll() is None
            assert (tmp_path / "lock").exists()
            builder.kill()
            builder.wait()
            assert second.stdout.readline() == "in\n"
            assert not (tmp_path / "lock").exists()
        finally:
            second.kill()


@pytest.mark.parametrize(
    ("keys", "compiles"),
    [
        ({"optimizer": "SGD"}, False),
        ({"optimizer": "NAdam"}, False),
        pytest.param({"optimizer": "AdamW"}, True, marks=[pytest.mark.slow, needs_deepspeed]),
        ({"optimizer": "AdamW", "strategy.offload_optimizer": "false"}, False),
        pytest.param(
            {
                "optimizer": "deepspeed.ops.adam.DeepSpeedCPUAdam",
                "strategy.offload_optimizer": "false",
            },
            True,
            marks=[pytest.mark.slow, needs_deepspeed],
        ),
    ],
)
def test_the_cpu_optimizer_is_compiled_for_those_that_use_it(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, str], compiles: bool
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(deepspeed, "compile_cpu_optimizer", lambda: calls.append(True))
    settings = {"checkpoint_dir": "base", "strategy": "deepspeed", **keys}
    recipe = read_recipe([], list(settings.items()), method="full")
    plan = make_plan(recipe, Devices(accelerator="cpu", count=1))
    deepspeed.DeepSpeed(plan).prepare(lambda _: nullcontext())
    assert bool(calls) == compiles


def test_the_lock_of_another_program_is_left_to_torch_unless_it_is_old(tmp_path: Path) -> None:
    baton = tmp_path / "lock"
    baton.touch()
    with sole_builder(tmp_path):
        assert baton.exists()
    os.utime(baton, (time.time() - STALE_S - 1,) * 2)
    with sole_builder(tmp_path):
        assert not baton.exists()
