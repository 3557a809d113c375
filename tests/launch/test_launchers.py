"""SLURM's time limit: the run saves, the job goes back into the queue, and goes on from there."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launchers import slurm
from messages import says
from runs import DEFAULT_SIGNALS, FOREVER, TIMEOUT_S, Process, command_of, rows, wait_for

from ftkit.launch.launchers import requeue_if_out_of_time
from ftkit.runs.report.report import read_report

USR1, TERM = signal.SIGUSR1, signal.SIGTERM
SCONTROL = """#!/bin/sh
echo "$@" >> {file}
exit {code}
"""


def stand_in(directory: Path, code: int = 0) -> Path:
    """An scontrol that notes how it was called; that file."""
    script = directory / "bin/scontrol"
    script.parent.mkdir()
    script.write_text(SCONTROL.format(file=directory / "called", code=code))
    script.chmod(0o755)
    return directory / "called"


@pytest.mark.parametrize(
    ("code", "received", "variables", "called"),
    [
        (138, [USR1], {"SLURM_JOB_ID": "7"}, "requeue 7\n"),
        (138, [USR1, TERM], {"SLURM_JOB_ID": "7"}, "requeue 7\n"),
        (
            138,
            [USR1],
            {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"},
            "requeue 7_2\n",
        ),
        (0, [USR1], {"SLURM_JOB_ID": "7"}, None),  # the step was the last one
        (143, [TERM], {"SLURM_JOB_ID": "7"}, None),
        (138, [USR1], {}, None),
    ],
)
def test_only_a_job_whose_time_is_up_is_requeued(
    code: int,
    received: list[signal.Signals],
    variables: dict[str, str],
    called: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = stand_in(tmp_path)
    monkeypatch.setenv("PATH", f"{file.parent / 'bin'}:{os.environ['PATH']}")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    requeue_if_out_of_time(code, received)
    assert (file.read_text() if file.exists() else None) == called


def test_a_failed_requeue_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = stand_in(tmp_path, code=1)
    monkeypatch.setenv("PATH", f"{file.parent / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    requeue_if_out_of_time(138, [USR1])
    assert says(capsys.readouterr().err, "job 7 ... scontrol requeue 7")


def of_session(number: int, called: Path) -> Callable[[int], dict[str, str]]:
    """Variables of every task of a job that was requeued so often."""
    variables = {"PATH": f"{called.parent / 'bin'}:{os.environ['PATH']}"}
    if number:
        variables["SLURM_RESTART_COUNT"] = str(number)
    return lambda _: variables


def wait_for_more_rows(out_dir: Path, task: Process) -> None:
    done = len(rows(out_dir))
    wait_for(lambda: len(rows(out_dir)) >= done + 2 or task.poll() is not None)


@pytest.mark.slow
def test_a_run_near_its_time_limit_saves_and_continues_in_the_requeued_job(
    common: list[str], tmp_path: Path
) -> None:
    """With an interval between checkpoints that it chooses itself."""
    out_dir, file = tmp_path / "out", stand_in(tmp_path)
    keys = FOREVER | {"devices": 2, "strategy": "ddp", "eval__interval": 0, "resume": "auto"}
    keys |= {"checkpoint__save_every": "auto", "train__micro_batch_size": 1}
    words = command_of(out_dir, common, **keys)
    steps = []
    for session in range(2):
        tasks = slurm(
            out_dir,
            words,
            tmp_path,
            before=DEFAULT_SIGNALS,
            of_task=of_session(session, file),
        )
        with tasks as (zero, one):
            wait_for_more_rows(out_dir, zero)
            for task in (zero, one):
                task.send_signal(USR1)
            out, err = zero.communicate(timeout=TIMEOUT_S)
            one.communicate(timeout=TIMEOUT_S)
            assert zero.returncode == 138, out + err
            assert "job 4711 was requeued" in out
        report = read_report(out_dir)
        assert (report.outcome, report.exit_reason) == ("interrupted", "SIGUSR1")
        assert report.progress and report.checkpoints
        assert report.checkpoints.last == f"checkpoints/step-{report.progress.steps:08}"
        assert report.checkpoints.advised_every_s is not None
        steps.append(report.progress.steps)
    assert file.read_text() == "requeue 4711\n" * 2
    assert report.resumed and report.resumed.from_step == steps[0] < steps[1]
    (restart,) = report.restarts
    assert (restart.reason, restart.from_step, restart.steps_lost) == ("SIGUSR1", steps[0], 0)
