"""Fetching from a url says how far it is."""

import threading
from pathlib import Path

import pytest
from messages import says

from ftkit.extensions.object_storage import replica
from ftkit.extensions.object_storage.objects import Objects


def test_a_long_download_of_one_file_reports_progress(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines: list[str] = []
    twice = threading.Event()

    def notice(text: str, _: object) -> None:
        lines.append(text)
        if len(lines) == 2:
            twice.set()

    def download(_: Objects, name: str, path: Path) -> None:
        assert twice.wait(10), "no progress is reported"
        path.write_text(name)

    monkeypatch.setattr(replica, "print_notice", notice)
    monkeypatch.setattr(replica, "_FIRST_NOTICE_S", 0.0)
    monkeypatch.setattr(replica, "_NOTICE_INTERVAL_S", 0.0)
    monkeypatch.setattr(Objects, "download", download)
    before = threading.active_count()
    replica.download_files(tmp_path, Objects("s3://bucket/model"), ["weights"])
    assert says(lines[0], "fetching s3://bucket/model ... 0 of 1 files")
    assert (tmp_path / "weights").read_text() == "weights"
    assert threading.active_count() == before, "nothing is reported after the end"
