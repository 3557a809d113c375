"""Durations while somebody sets the clock of the machine: they are of another clock."""

import json
import time
from pathlib import Path

import pytest
from command import Start
from recorders import make_recorder

from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import read_recipe
from ftkit.runs.job import Job
from ftkit.runs.report.report import read_report

DAYS_S = 2 * 24 * 3600.0


@pytest.mark.extensions
@pytest.mark.parametrize("shift_s", [-DAYS_S, DAYS_S])
def test_phases_are_as_long_as_they_took(
    shift_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = make_recorder(tmp_path)
    now_s = time.time
    recorder.enter("training")
    monkeypatch.setattr(time, "time", lambda: now_s() + shift_s)
    assert 0 <= recorder.training_s < 600
    recorder.enter("saving")
    phases = recorder.report.phases_s
    assert phases is not None and phases.total is not None and 0 <= phases.total < 600
    assert phases.training is not None and 0 <= phases.training < 600


def test_a_job_of_another_machine_begins_where_it_is_read(tmp_path: Path) -> None:
    """Each machine has a clock of its own that begins with it."""
    file = tmp_path / "job.json"
    made = Job(
        recipe=read_recipe([], [("checkpoint_dir", "base")], method="lora"),
        devices=Devices(accelerator="cpu", count=1),
        base="base",
        command=(),
        started_at_s=0.0,
    )
    made.write(file)
    assert Job.read(file).began_s == made.began_s
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {"began": ["another start", made.began_s - DAYS_S]}))
    assert Job.read(file).began_s >= made.began_s


@pytest.mark.slow
@pytest.mark.parametrize("shift_s", [pytest.param(-DAYS_S, marks=pytest.mark.matrix), DAYS_S])
def test_a_run_goes_on_and_reports_its_time_when_the_clock_is_set(
    shift_s: float, start: Start, tmp_path: Path
) -> None:
    set_clock = f"import time\nreal = time.time\ntime.time = lambda: real() + {shift_s}"
    with start(
        tmp_path / "run",
        train__max_steps=2,
        train__max_time=3600,
        stop_after="60min",
        in_ranks=set_clock,
        cold=True,
    ) as run:
        code, _, errors = run.end()
        assert code == 0, errors
    report = read_report(tmp_path / "run" / "report.json")
    phases = report.phases_s
    assert report.outcome == "completed" and phases is not None
    assert phases.total is not None and 0 < phases.total < 3600
    assert min(phases.set_up or 0, phases.training or 0) >= 0
