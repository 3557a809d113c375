"""Fetching from a url says how far it is."""

import threading
from pathlib import Path

import pytest

from ftkit.utils.remote import fetch
from ftkit.utils.remote.objects import Objects


def test_a_single_file_that_takes_long_is_told_while_it_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []
    twice = threading.Event()

    def notice(text: str, _: object) -> None:
        told.append(text)
        if len(told) == 2:
            twice.set()

    def download(_: Objects, name: str, path: Path) -> None:
        assert twice.wait(10), "it is not told"
        path.write_text(name)

    monkeypatch.setattr(fetch, "print_notice", notice)
    monkeypatch.setattr(fetch, "_TOLD_AFTER_S", 0.0)
    monkeypatch.setattr(fetch, "_TOLD_EVERY_S", 0.0)
    monkeypatch.setattr(Objects, "download", download)
    before = threading.active_count()
    fetch.fetch_files(tmp_path, Objects("s3://bucket/model"), {"weights": None})
    assert told[0] == "ftkit: fetching s3://bucket/model: 0 of 1 files, 0 s"
    assert (tmp_path / "weights").read_text() == "weights"
    assert threading.active_count() == before, "nothing is told of what has ended"
