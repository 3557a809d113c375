"""Directories that stand for urls."""

from pathlib import Path

import pytest
from messages import message_of, says

from ftkit.utils.urls import local_path, url_of


@pytest.mark.parametrize("part", ["a" * 200, "ü" * 100])
def test_a_part_of_a_url_is_the_name_of_a_file(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path))
    directory = local_path(f"s3://bucket/{part}/run")
    directory.mkdir(parents=True)
    assert url_of(directory) == f"s3://bucket/{part}/run"


@pytest.mark.parametrize("part", ["a" * 201, "ü" * 101])
def test_a_part_that_is_too_long_for_a_file_name_is_refused(part: str) -> None:
    message = message_of(local_path, f"s3://bucket/{part}/run")
    assert says(message, "at most 200")
