"""Supervisors on several machines: who vanishes is noticed, and who pauses is not lost."""

import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from subprocess import Popen
from threading import Event

import psutil
import pytest
import torch.distributed as dist
from command import command_environment
from launchers import slurm, torchrun
from runs import DEFAULT_SIGNALS, FOREVER, TIMEOUT_S, Run, command_of, rows, wait_for, watched

from ftkit.extensions.hosts import heartbeats
from ftkit.extensions.hosts.heartbeats import BEAT_S, MISSED_BEATS, Heartbeats, Silence, ended_key
from ftkit.runs.report.report import read_report

TWO_RANKS = {"devices": 2, "strategy": "ddp", "train__micro_batch_size": 1, "eval__interval": 0}
IMPATIENT = f"""{DEFAULT_SIGNALS}
from ftkit.extensions.hosts import heartbeats
heartbeats.BEAT_S, heartbeats.MISSED_BEATS = 0.5, 20
"""
PATIENCE_S = 10
GONE = (
    f"{re.escape(socket.gethostname())} has sent no heartbeat for {PATIENCE_S} s: "
    "the machine is gone, frozen or cut off from the others"
)
SLOW_DOWNLOAD = """
import pathlib, time
import ftkit.launch.supervisor
def find(*_, **__):
    pathlib.Path("looking").touch()
    time.sleep(600)
ftkit.launch.supervisor.find_or_download = find
"""


# --- Judging --------------------------------------------------------------------------------------


def test_a_vanished_machine_is_noticed_in_two_minutes() -> None:
    assert 30 <= BEAT_S * (MISSED_BEATS + 2) < 120


def test_a_rank_that_is_silent_for_too_many_polls_is_lost() -> None:
    silence = Silence()
    assert silence.look({1: 5, 2: 5}) is None
    for beats in range(6, 5 + MISSED_BEATS):
        assert silence.look({1: beats, 2: 5}) is None
    assert silence.look({1: 100, 2: 5}) == 2


def test_one_beat_makes_up_for_all_silence_before() -> None:
    silence = Silence()
    for beats in (0, 1):
        for _ in range(MISSED_BEATS):
            assert silence.look({1: beats}) is None
    assert silence.look({1: 1}) == 1


def test_a_rank_without_any_heartbeat_is_missed() -> None:
    silence = Silence()
    looks = [silence.look({1: 0}) for _ in range(MISSED_BEATS + 1)]
    assert looks == [None] * MISSED_BEATS + [1]


def test_a_rank_that_has_ended_is_not_reported_missing() -> None:
    silence = Silence()
    for _ in range(MISSED_BEATS):
        assert silence.look({1: 7, 2: 7}) is None
    assert silence.look({2: 8}) is None


# --- Between two ----------------------------------------------------------------------------------


class Silent:
    """Whom heartbeats have reported."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self.reported = Event()

    def __call__(self, rank: int, text: str) -> None:
        self.found.append((rank, text))
        self.reported.set()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:  # type: ignore[name-defined]
    monkeypatch.setattr(heartbeats, "BEAT_S", 0.05)
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False
    )


def test_heartbeats_that_stop_without_a_word_are_reported_once(store: dist.TCPStore) -> None:  # type: ignore[name-defined]
    silent = Silent()
    with Heartbeats(store, 0, {1: "node1", 2: "node2"}, silent):
        while not silent.reported.wait(0.02):
            store.add("beats-2", 1)
    ((rank, text),) = silent.found
    assert (rank, text[:34]) == (1, "node1 has sent no heartbeat for 0.")


def test_a_supervisor_that_ended_properly_is_not_missed(store: dist.TCPStore) -> None:  # type: ignore[name-defined]
    silent = Silent()
    with Heartbeats(store, 1, {0: "node0"}, silent):
        wait_for(lambda: store.add("beats-1", 0) > 0)
    wait_for(lambda: store.check([ended_key(1)]))
    with Heartbeats(store, 0, {1: "node1"}, silent):
        wait_for(lambda: store.add("beats-0", 0) > 1.5 * MISSED_BEATS)
    assert silent.found == []


# --- Runs -----------------------------------------------------------------------------------------


def everything(process: "Popen[str]") -> list[psutil.Process]:
    """A supervisor, its rank and their workers, as if they were all that runs on a machine."""
    supervisor = psutil.Process(process.pid)
    return [supervisor, *supervisor.children(recursive=True)]


@contextmanager
def two_machines(common: list[str], tmp_path: Path) -> Iterator[list["Popen[str]"]]:
    """A run without end of two ranks that nothing but heartbeats connects; it has made steps."""
    words = command_of(tmp_path / "out", common, **FOREVER | TWO_RANKS)
    with slurm(tmp_path / "out", words, tmp_path, before=IMPATIENT) as tasks:
        wait_for(lambda: len(rows(tmp_path / "out")) >= 2 or any(task.poll() for task in tasks))
        yield tasks  # type: ignore[misc]


@pytest.mark.slow
def test_a_machine_that_vanishes_ends_the_run_and_is_named(
    common: list[str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "out"
    with two_machines(common, tmp_path) as tasks:
        frozen = everything(tasks[1])
        for process in frozen:
            process.suspend()
        out, err = tasks[0].communicate(timeout=TIMEOUT_S)
        wait_for(lambda: set(Run(run_dir, tasks[0]).processes()) <= set(frozen))
        assert (tasks[0].returncode, err) == (1, "")
    report = read_report(run_dir)
    assert (report.outcome, report.exit_code, report.phase) == ("failed", 1, "training")
    assert re.fullmatch(f"rank 1: {GONE}", report.exit_reason)
    assert f"failed {report.exit_reason}" in " ".join(out.split())
    assert "nothing was saved" in out
    assert not (run_dir / ".run").exists()


@pytest.mark.slow
def test_other_ranks_end_by_themselves_when_the_machine_of_rank_0_is_lost(
    common: list[str], tmp_path: Path
) -> None:
    with two_machines(common, tmp_path) as tasks:
        frozen = everything(tasks[0])
        for process in frozen:
            process.suspend()
        out, err = tasks[1].communicate(timeout=TIMEOUT_S)
        wait_for(lambda: set(Run(tmp_path / "out", tasks[1]).processes()) <= set(frozen))
    assert (tasks[1].returncode, out) == (1, "")
    assert re.fullmatch(f"ftkit: rank 0: {GONE}\n", err)


@pytest.mark.slow
def test_machines_that_are_paused_together_continue(common: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "out"
    with two_machines(common, tmp_path) as tasks:
        processes = [process for task in tasks for process in everything(task)]
        for process in processes:
            process.suspend()
        time.sleep(PATIENCE_S + 2)
        before = len(rows(run_dir))
        for process in processes:
            process.resume()
        wait_for(lambda: len(rows(run_dir)) > before + 5 or any(task.poll() for task in tasks))
        for task in tasks:
            task.send_signal(signal.SIGINT)
        out, err = tasks[0].communicate(timeout=TIMEOUT_S)
        others = tasks[1].communicate(timeout=TIMEOUT_S)
        assert [task.returncode for task in tasks] == [130, 130], (out, err, others)
    assert others == ("", "")
    assert read_report(run_dir).outcome == "interrupted"


@pytest.mark.slow
def test_a_machine_that_vanishes_while_the_run_is_prepared_leaves_nothing(
    common: list[str], tmp_path: Path
) -> None:
    words = command_of(tmp_path / "out", common, **FOREVER | TWO_RANKS)
    with slurm(tmp_path / "out", words, tmp_path, before=IMPATIENT + SLOW_DOWNLOAD) as tasks:
        wait_for((tmp_path / "looking").exists)
        tasks[1].send_signal(signal.SIGSTOP)
        out, err = tasks[0].communicate(timeout=TIMEOUT_S)
        assert (tasks[0].returncode, out) == (1, "")
    assert re.fullmatch(f"ftkit: rank 1: {GONE}; nothing has changed\n", err)
    assert not (tmp_path / "out").exists()


@contextmanager
def under_torchrun(common: list[str], tmp_path: Path) -> Iterator[Run]:
    """A run without end that has made steps."""
    program = tmp_path / "command.py"
    program.write_text(f"{IMPATIENT}\nfrom ftkit.cli.app import main\nmain()")
    words = torchrun(command_of(tmp_path / "out", common, **FOREVER | TWO_RANKS), [program])
    with watched(tmp_path / "out", words, tmp_path, command_environment()) as run:
        run.wait_for_steps(2)
        yield run


@pytest.mark.matrix
def test_a_machine_that_vanishes_ends_the_run_under_torchrun_too(
    common: list[str], tmp_path: Path
) -> None:
    with under_torchrun(common, tmp_path) as run:
        supervisors = psutil.Process(run.process.pid).children()
        (frozen,) = [p for p in supervisors if p.environ()["RANK"] == "1"]
        for process in [frozen, *frozen.children(recursive=True)]:
            process.suspend()
        code, _, _ = run.end()
    assert code == 1
    assert re.fullmatch(f"rank 1: {GONE}", read_report(run.out_dir).exit_reason)


@pytest.mark.slow
def test_the_run_continues_while_ctrl_z_stops_only_torchrun(
    common: list[str], tmp_path: Path
) -> None:
    """It starts the ranks in sessions of their own; a store of its own stands still meanwhile."""
    with under_torchrun(common, tmp_path) as run:
        run.process.send_signal(signal.SIGSTOP)
        time.sleep(PATIENCE_S + 5)
        run.wait_for_steps(len(rows(run.out_dir)) + 5)
        run.process.send_signal(signal.SIGCONT)
        run.process.send_signal(signal.SIGINT)
        _, out, _ = run.end()
    assert read_report(run.out_dir).outcome == "interrupted", out
