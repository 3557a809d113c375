"""Ranks that SLURM starts; at its time limit the run saves, and its job is queued again."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from command import command_environment, command_line
from launchers import slurm
from messages import message_of, says
from runs import DEFAULT_SIGNALS, FOREVER, TIMEOUT_S, Process, command_of, rows, start, wait_for

from ftkit.extensions.hosts import slurm as of_slurm
from ftkit.runs.launchers import launched
from ftkit.runs.report.report import read_report

LINE = ["ftkit", "finetune", "recipe.yaml"]
TASK = {"SLURM_JOB_ID": "7012", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}
TASK |= {"SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "1", "SLURM_NNODES": "2"}
TASK |= {"SLURM_NODELIST": "rack[0-1]n[05-07,9],login", "SLURM_TASKS_PER_NODE": "2(x2)"}
"""The last of four tasks on two nodes."""
FIRST = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
NO_STEP = {"SLURM_STEP_ID": ""}
SHELL = {"SLURM_STEP_ID": str(0xFFFFFFFA)}
"""Of salloc with an interactive step."""
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


# --- Tasks ----------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Replaces the environment until the end of the test."""

    def replace(variables: dict[str, str]) -> None:
        monkeypatch.setattr(os, "environ", {k: v for k, v in variables.items() if v})

    return replace


@pytest.mark.parametrize(
    ("variables", "local", "address", "port"),
    [
        ({}, 2, "rack0n05", "22012"),
        ({"SLURM_TASKS_PER_NODE": "2,2"}, 2, "rack0n05", "22012"),
        ({"SLURM_TASKS_PER_NODE": ""}, 2, "rack0n05", "22012"),
        # Those of the step, not of its job.
        (
            {"SLURM_TASKS_PER_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            2,
            "rack0n05",
            "22012",
        ),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"}, 2, "rack0n05", "22012"),
        ({"SLURM_STEP_NODELIST": "n[3]"}, 2, "n3", "22012"),
        ({"SLURM_STEP_ID": "2"}, 2, "rack0n05", "22214"),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, 2, "10.0.0.1", "29500"),
        ({"PMI_SIZE": "4"}, 2, "rack0n05", "22012"),  # with srun --mpi=pmi2
        (
            {"SLURM_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_LOCALID": "3"},
            4,
            "127.0.0.1",
            "22012",
        ),
        # srun in a shell of salloc, or of srun --pty.
        ({"SLURM_JOB_NAME": "interactive"}, 2, "rack0n05", "22012"),
        ({"SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "1"}, 2, "rack0n05", "22012"),
    ],
)
def test_a_task_of_srun_is_a_rank(
    variables: dict[str, str],
    local: int,
    address: str,
    port: str,
    environment: Callable[[dict[str, str]], None],
) -> None:
    environment(TASK | variables)
    found = launched(LINE)
    assert found is not None
    placed = found[1]
    assert (placed.rank, placed.world_size, placed.local_world_size) == (3, 4, local)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == (address, port)


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": ""},  # a shell of salloc
        FIRST | SHELL | {"SLURM_JOB_NAME": "interactive"},
        FIRST | NO_STEP | {"SLURM_JOB_NAME": "interactive"},
        FIRST | {"SLURM_JOB_NAME": "bash"},  # srun --pty bash
        FIRST | {"SLURM_JOB_NAME": "zsh", "SLURM_PTY_PORT": "4711", "SLURM_TASK_PID": "1"},
    ],
)
def test_a_run_that_is_started_once_under_slurm_has_no_other_ranks(
    variables: dict[str, str], environment: Callable[[dict[str, str]], None]
) -> None:
    environment(TASK | variables)
    assert launched(LINE) is None


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (FIRST | NO_STEP, ["SLURM_NTASKS is 4", "once", "srun ftkit finetune recipe.yaml"]),
        (FIRST | {"SLURM_STEP_ID": str(0xFFFFFFFB)}, ["batch script", "srun ftkit finetune"]),
        ({"SLURM_TASKS_PER_NODE": "3,1"}, ["3,1", "srun --nodes=2 --ntasks=4 --ntasks-per-node=2"]),
        (
            {"SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "2(x3),1"},
            ["2(x3),1", "srun --nodes=4 --ntasks=4 --ntasks-per-node=1 ftkit finetune"],
        ),
        (
            {"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": ""},
            ["5 tasks on 2 nodes", "srun --nodes=2 --ntasks=4 --ntasks-per-node=2"],
        ),
        # Placed in turn.
        ({"SLURM_PROCID": "2"}, ["task 2", "node 1", "srun --distribution=block ftkit finetune"]),
        (FIRST | {"SLURM_GTIDS": "0,2"}, ["task 0", "srun --distribution=block"]),
    ],
)
def test_tasks_that_cannot_train_together_are_refused_with_the_command_that_works(
    variables: dict[str, str],
    said: list[str],
    environment: Callable[[dict[str, str]], None],
) -> None:
    environment(TASK | variables)
    assert says(message_of(launched, LINE), " ... ".join(said))


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_SIZE": "2"},
        {"JSM_NAMESPACE_SIZE": "2"},
        {"FLUX_JOB_SIZE": "2"},
        {"WORLD_SIZE": "2", "RANK": "0"},
        {"PMI_SIZE": "2", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_processes_of_other_launchers_are_refused_by_the_variable(
    variables: dict[str, str], environment: Callable[[dict[str, str]], None]
) -> None:
    environment(variables)
    (name, *_) = variables
    said = message_of(launched, LINE)
    assert says(said, f"{name} is 2 ... torchrun --nproc_per_node 2 -m ftkit finetune recipe.yaml")
    for harmless in ({name: "1"}, {"WORLD_SIZE": "2"}):
        environment(harmless)
        assert launched(LINE) is None


@pytest.mark.slow
def test_a_run_in_a_shell_of_salloc_takes_no_account_of_its_tasks(
    common: list[str], tmp_path: Path
) -> None:
    shell = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2"}
    line = command_line(*command_of(tmp_path / "out", common))
    process = start(line, tmp_path, command_environment() | shell)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, out + err


# --- The limit of time ----------------------------------------------------------------------------


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
    of_slurm.ended(code, received)
    assert (file.read_text() if file.exists() else None) == called


def test_a_failed_requeue_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = stand_in(tmp_path, code=1)
    monkeypatch.setenv("PATH", f"{file.parent / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    of_slurm.ended(138, [USR1])
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
