"""Threads spin for long where each has a core of its own, and briefly where others need it."""

import os
from pathlib import Path

import pytest

from ftkit.utils.process import AT_REST, BUSY, turns_before_sleep


@pytest.mark.parametrize(
    ("cores", "own", "running", "expected"),
    [
        (2, 2, 1, AT_REST),  # this process alone
        (2, 2, 2, BUSY),
        (64, 8, 57, AT_REST),
        (64, 8, 58, BUSY),
        (2, 2, 40, BUSY),
    ],
)
def test_spinning_depends_on_the_idle_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    own: int,
    running: int,
    expected: int,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(own)))
    load = tmp_path / "loadavg"
    load.write_text(f"0.52 1.04 0.98 {running}/412 12345\n")
    assert turns_before_sleep(load) == expected


@pytest.mark.parametrize("content", [None, "", "0.1 0.2 0.3 none 5"])
def test_where_it_cannot_be_known_they_spin_briefly(tmp_path: Path, content: str | None) -> None:
    load = tmp_path / "loadavg"
    if content is not None:
        load.write_text(content)
    assert turns_before_sleep(load) == BUSY
