"""A run at a url as other machines see it: watched, refused, taken over, and cleaned up."""

import os
import re
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import warm
from command import ROOT, command_environment, command_line
from messages import says
from object_servers import Bucket
from runs import TIMEOUT_S, options, wait_for

from ftkit.checkpoint.store import Store
from ftkit.runs.report.report import read_report

URL = "s3://bucket/seen"
MACHINES = """
import os
from ftkit.extensions.object_storage import claim
claim.RENEWED_EVERY_S, claim.EXPIRES_S = 1.0, 6.0
claim._machine = lambda: os.environ["FTKIT_CACHE_DIR"]
"""
"""Processes with caches of their own take each other for other machines, and have less patience."""
Begin = Callable[..., warm.Process]


@pytest.fixture
def begin(common: list[str], tmp_path: Path, bucket: Bucket) -> Begin:
    """Starts the command on a machine: `begin("a", "watch", URL)`."""
    start_up = tmp_path / "start-up"
    start_up.mkdir()
    (start_up / "sitecustomize.py").write_text(
        "import sys\n"
        'if "ftkit.training.rank" not in sys.orig_argv:\n'
        f"{textwrap.indent(MACHINES, '    ')}"
    )

    def start(machine: str, *words: object) -> warm.Process:
        if words[0] == "finetune":
            every = options(train__save_interval=2, eval__interval=0, resume="auto", out_dir=URL)
            words = ("finetune", *common, *every, *words[1:])
        environment = command_environment() | {
            "FTKIT_CACHE_DIR": str(tmp_path / machine),
            "PYTHONPATH": f"{ROOT}:{start_up}",
        }
        return warm.SERVER.start(command_line(*words), environment, cwd=tmp_path)

    return start


def ended(process: warm.Process) -> tuple[int, str]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode is not None
    return process.returncode, out + err


@pytest.mark.slow
def test_other_machines_see_a_run_at_work_are_refused_and_take_it_over_once_its_claim_has_expired(
    begin: Begin, bucket: Bucket, tmp_path: Path
) -> None:
    code, said = ended(begin("b", "watch", URL))
    assert code == 2 and f"{URL} holds no run" in said
    endless = options(train__max_steps=1_000_000, train__epochs="null", checkpoint__keep_last=100)
    run = begin("a", "finetune", *endless)
    try:
        wait_for(lambda: len(bucket.steps("seen")) > 2)
        watching = begin("b", "watch", URL, "--interval", "1s")
        refused = begin("c", "finetune", *endless)
        code, said = ended(begin("d", "watch", URL, "--once"))
        assert code == 0, said
        assert f"{URL}  running" in said and "checkpoint" in said and "loss" in said
        code, said = ended(begin("d", "checkpoints", "clean", URL, "--keep_last", "1"))
        who = f"belongs to a run that is still running: process {run.pid} on "
        assert code == 2 and who in said
        code, said = ended(refused)
        assert code == 2 and who in said
        assert says(said, f"{URL} ... process {run.pid} on")  # it watched, and saw it live
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()
    code, said = ended(watching)
    assert code == 0
    assert f"{URL}: " in said and "lora on tiny" in said and "killed at step" in said

    newest = max(bucket.steps("seen"))
    code, said = ended(begin("b", "finetune", *endless, "--stop_after", "1"))
    assert code == 0, said
    assert says(said, "up to 6 s")
    assert f"continuing from step {newest:,}" in said
    steps = bucket.steps("seen")
    assert steps[-1] == newest + 1
    assert not any(name.startswith(".run/") for name in bucket.names("seen"))
    (restart,) = read_report(bucket.fetch("seen", tmp_path / "copy")).restarts
    assert restart.from_step == newest and restart.steps_lost >= 0
    assert re.fullmatch(r"rank 0 on \S+ was killed with its supervisor, .*", restart.reason)
    code, said = ended(begin("d", "watch", URL))
    assert code == 0 and f"{URL}  stopped" in said

    bucket.write("seen/checkpoints/step-00999998/shard-00000-of-00002.safetensors", b"half")
    before = bucket.names("seen/checkpoints")
    clean = ("checkpoints", "clean", URL, "--keep_last", "2")
    code, said = ended(begin("d", *clean, "--dry_run"))
    assert code == 0, said
    assert all(f"would remove step-{step:08}" in said for step in (*steps[:-2], 999_998))
    assert bucket.names("seen/checkpoints") == before
    code, said = ended(begin("d", *clean))
    assert code == 0, said
    assert "removed step-00999998 (4 B)" in said
    left = {name.split("/")[0] for name in bucket.names("seen/checkpoints")}
    assert left == {"latest", *(f"step-{step:08}" for step in steps[-2:])}
    store = Store(bucket.fetch("seen", tmp_path / "cleaned") / "checkpoints")
    assert [store.verify(step) for step in store.steps()] == [[], []]
