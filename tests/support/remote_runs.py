"""Runs at urls as processes, each on a machine of its own, that is with a cache of its own."""

import csv
from collections.abc import Callable
from pathlib import Path

import warm
from runs import TIMEOUT_S

LEARNED = ("step", "samples", "loss", "lr", "tokens")
Attempt = warm.Process
Ftkit = Callable[..., Attempt]
"""Starts a command on a machine."""


def learned(directory: Path) -> list[tuple[str, ...]]:
    """What metrics.csv says about each step, times left out."""
    with (directory / "metrics.csv").open() as file:
        return [tuple(row[name] for name in LEARNED) for row in csv.DictReader(file)]


def ended(attempt: Attempt) -> tuple[int, str]:
    """Exit code and all that was said."""
    out, err = attempt.communicate(timeout=TIMEOUT_S)
    assert attempt.returncode is not None
    return attempt.returncode, out + err
