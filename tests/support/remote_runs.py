"""Runs at urls as processes, each on a machine of its own, that is with a cache of its own."""

import csv
from collections.abc import Callable
from pathlib import Path

import warm
from messages import says
from object_servers import Bucket
from runs import TIMEOUT_S

from ftkit.checkpoint.store import Store
from ftkit.runs.report.report import read_report

LEARNED = ("step", "samples", "loss", "lr", "tokens")
Attempt = warm.Process
Ftkit = Callable[..., Attempt]
"""Starts a command on a machine."""


def learned(directory: Path) -> list[tuple[str, ...]]:
    """Rows of metrics.csv without times."""
    with (directory / "metrics.csv").open() as file:
        return [tuple(row[name] for name in LEARNED) for row in csv.DictReader(file)]


def ended(attempt: Attempt) -> tuple[int, str]:
    """Exit code and all that was said."""
    out, err = attempt.communicate(timeout=TIMEOUT_S)
    assert attempt.returncode is not None
    return attempt.returncode, out + err


def assert_another_machine_goes_on(
    run: Callable[..., str], bucket: Bucket, scheme: str, whole: Path, place: Path
) -> None:
    """Check that another machine ends a run as if nothing had stopped it, and that all can read it.

    Args:
        run: of a machine by its name; "a" has stopped after two steps.
        bucket: where it has.
        scheme: of its url.
        whole: the run that nothing stopped.
        place: with a directory for each machine.
    """
    url = f"{scheme}://bucket/on/run"
    assert bucket.steps("on/run") == [2]
    said = run("b", url, "--resume", "auto")
    assert says(said, f"step 2 ... {url}/checkpoints/step-00000002")
    assert list((place / "b").rglob("step-00000002/shard-*")) == []  # read by ranges
    copy = bucket.fetch("on/run", place / "copy")
    assert learned(copy) == learned(whole)
    assert read_report(copy).outcome == "completed"
    store = Store(copy / "checkpoints")
    assert [store.verify(step) for step in store.steps()] == [[], [], []]
    assert not any(name.startswith(".run/") for name in bucket.names("on/run"))
    listed = run("c", "list", url, command="checkpoints")
    assert [step in listed for step in ("2", "4", "5")] == [True] * 3
    assert run("c", "verify", url, command="checkpoints").count("intact") == 3
    run("c", url, whole, command="compare")
