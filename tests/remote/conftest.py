"""The object storage that these tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from object_servers import Bucket, Proxy, s3_server


@pytest.fixture(scope="session")
def storage() -> Iterator[Proxy]:
    """S3, which works unless a test lets it fail."""
    pytest.importorskip("moto", reason="the extra dev is not installed")
    with s3_server() as proxy:
        yield proxy


@pytest.fixture
def s3(storage: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Proxy]:
    """The same for this process and those that it starts, and a cache of its own."""
    for name, value in storage.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    storage.works()
    storage.requests.clear()
    yield storage
    storage.works()


@pytest.fixture
def bucket(s3: Proxy) -> Bucket:
    """What lies there."""
    return Bucket(s3.environment)
