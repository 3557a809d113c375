"""Claims on a url as other machines see them: watched, refused while renewed, then taken over."""

import os
import re
import signal
import textwrap
from pathlib import Path

import pytest
import warm
from command import ROOT, command_environment, command_line
from object_servers import Bucket
from runs import TIMEOUT_S, options, wait_for

from ftkit.report.report import read_report

MACHINES = """
import os
from ftkit.runs import remote_claim
remote_claim.RENEWED_EVERY_S, remote_claim.EXPIRES_S = 1.0, 6.0
remote_claim._machine = lambda: os.environ["FTKIT_CACHE_DIR"]
"""
"""Processes with caches of their own take each other for other machines, and have less patience."""


@pytest.mark.slow
def test_another_machine_is_refused_while_a_run_renews_its_claim_and_goes_on_once_it_was_killed(
    common: list[str], bucket: Bucket, tmp_path: Path
) -> None:
    start_up = tmp_path / "start-up"
    start_up.mkdir()
    (start_up / "sitecustomize.py").write_text(
        "import sys\n"
        'if "ftkit.training.rank" not in sys.orig_argv:\n'
        f"{textwrap.indent(MACHINES, '    ')}"
    )

    def begin(machine: str, *more: object) -> warm.Process:
        words = ["finetune", *common, "--out_dir", "s3://bucket/held", "--resume", "auto", *more]
        words += options(train__save_interval=2, eval__interval=0)
        environment = command_environment() | {
            "FTKIT_CACHE_DIR": str(tmp_path / machine),
            "PYTHONPATH": f"{ROOT}:{start_up}",
        }
        return warm.SERVER.start(command_line(*words), environment, cwd=tmp_path)

    def ended(process: warm.Process) -> tuple[int, str]:
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode is not None
        return process.returncode, out + err

    endless = ("--train.max_steps", "1000000", "--train.epochs", "null")
    first = begin("a", *endless)
    try:
        wait_for(lambda: bool(bucket.steps("held")))
        code, said = ended(begin("b", *endless))
        assert code == 2, said
        who = f"process {first.pid} on "
        assert f"s3://bucket/held is claimed by {who}" in said  # it watches, and sees it renewed
        assert f"belongs to a run that is still at work: {who}" in said
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
    newest = max(bucket.steps("held"))
    code, said = ended(begin("b", *endless, "--stop_after", "1"))
    assert code == 0, said
    assert "watching for up to 6 s whether it is still at work" in said
    assert f"going on from step {newest:,}" in said
    assert newest + 1 in bucket.steps("held")
    assert not any(name.startswith(".run/") for name in bucket.names("held"))
    (restart,) = read_report(bucket.fetch("held", tmp_path / "copy")).restarts
    assert restart.from_step == newest and restart.steps_lost >= 0
    assert re.fullmatch(r"rank 0 on \S+ was killed with its supervisor, .*", restart.reason)
