"""Faults of storage: tried again where that helps, reported in few words, never taken for good."""

from collections.abc import Callable
from pathlib import Path

import pytest
from object_servers import (
    BROKEN,
    CUT,
    EXPIRED,
    FULL,
    INTERNAL,
    SECRET,
    SLOW_DOWN,
    Fault,
    Proxy,
    gs_error,
    is_write,
    s3_error,
)

from ftkit.extensions.object_storage import objects as objects_module
from ftkit.extensions.object_storage.objects import REQUEST_PATIENCE_S, Objects
from ftkit.utils.url_files import StorageError

PASSING = {
    "InternalError": INTERNAL,
    "SlowDown": SLOW_DOWN,
    "a broken connection": BROKEN,
    "XMinioStorageFull": FULL,
    "slow": Fault(delay_s=0.1),
}
FINAL = {
    "ExpiredToken": EXPIRED,
    "InvalidAccessKeyId": Fault(403, s3_error("InvalidAccessKeyId")),
    "NoSuchBucket": Fault(404, s3_error("NoSuchBucket")),
}
GOOGLES = {
    "internal happened": Fault(500, gs_error(500, "internal")),
    "quota happened": Fault(429, gs_error(429, "quota")),
}


class Clock:
    """Time that passes only by waiting."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waits_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.waits_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(objects_module, "time", clock)
    return clock


@pytest.mark.slow
@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_a_temporary_fault_is_retried(
    s3: Proxy, clock: Clock, tmp_path: Path, fault: Fault
) -> None:
    """An upload in parts, of which some meet it; and its first and its last request."""
    objects = Objects("s3://bucket/passes")
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * 2**17 + b"end")
    met = s3.fails(fault, is_write, times=3)
    objects.upload(large, "large")
    objects.write("small", b"content")
    assert len(met) == 3
    assert objects.read_range("large", 0, 2**25 + 3) == large.read_bytes()
    assert objects.read("small") == b"content"


def test_a_request_is_tried_in_ever_longer_intervals_and_then_given_up(
    s3: Proxy, clock: Clock
) -> None:
    met = s3.fails(FULL, is_write)
    with pytest.raises(StorageError) as found:
        Objects("s3://bucket/full").write("name", b"content")
    assert clock.waits_s == [0.5, 1, 2, 4, 8] and sum(clock.waits_s) < REQUEST_PATIENCE_S
    assert len(met) >= 6
    said = str(found.value)
    assert said.startswith("s3://bucket/full: writing name failed: ")
    assert "XMinioStorageFull" in said and "\n" not in said


@pytest.mark.parametrize("code", FINAL)
def test_final_errors_are_raised_at_once(s3: Proxy, clock: Clock, code: str) -> None:
    met = s3.fails(FINAL[code], is_write)
    said = "there is no such bucket" if code == "NoSuchBucket" else code
    with pytest.raises(StorageError, match=said):
        Objects("s3://bucket/never").write("name", b"content")
    assert len(met) == 1 and clock.waits_s == []


def test_credentials_that_were_renewed_are_taken_without_a_new_start(
    s3: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of a file, as a provider's own program writes it."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def write(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {SECRET}\n")

    write("OLDKEY")
    s3.fails(EXPIRED, lambda request: "OLDKEY" in request.headers["Authorization"])
    objects = Objects("s3://bucket/renewed")
    with pytest.raises(StorageError, match="ExpiredToken") as found:
        objects.write("name", b"content")
    assert SECRET not in str(found.value)
    write("NEWKEY")
    objects.write("name", b"content")
    assert objects.read("name") == b"content"


def test_a_cut_answer_is_an_error(s3: Proxy, clock: Clock, tmp_path: Path) -> None:
    """A file that is fetched stays as it was."""
    objects = Objects("s3://bucket/half", patience_s=1.0)
    content = bytes(range(256)) * 100
    objects.write("name", content)
    target = tmp_path / "target"
    target.write_bytes(b"before")
    asks: list[Callable[[], object]] = [
        lambda: objects.read("name"),
        lambda: objects.read_range("name", 100, 20_000),
        lambda: objects.download("name", target),
    ]
    for ask in asks:
        s3.fails(CUT, lambda request: request.method == "GET")
        with pytest.raises(StorageError, match="reading name failed"):
            ask()
        s3.works()
    assert target.read_bytes() == b"before" and list(tmp_path.glob(".*")) == []
    assert objects.read("name") == content
    assert objects.read_range("name", 100, 20_000) == content[100:20_000]


def test_secrets_of_the_environment_are_in_no_message(s3: Proxy, clock: Clock) -> None:
    body = f"<Error><Code>Odd</Code><Message>key {SECRET} is odd</Message></Error>".encode()
    s3.fails(Fault(400, body), is_write)
    with pytest.raises(StorageError) as found:
        Objects("s3://bucket/secret").write("name", b"content")
    assert SECRET not in str(found.value) and "key $AWS_SECRET_ACCESS_KEY is odd" in str(
        found.value
    )


@pytest.mark.parametrize("said", GOOGLES)
def test_faults_of_google_pass_too(gs: Proxy, clock: Clock, tmp_path: Path, said: str) -> None:
    """Its library tries again by itself; also in the middle of a file that is sent in parts."""
    objects = Objects("gs://bucket/passes")
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * 2**17)
    met = gs.fails(GOOGLES[said], is_write, times=2)
    objects.upload(large, "large")
    assert len(met) == 2
    assert objects.read("large") == large.read_bytes()


def test_credentials_that_google_refuses_are_an_error(gs: Proxy, clock: Clock) -> None:
    met = gs.fails(Fault(401, gs_error(401, "authError")), is_write)
    with pytest.raises(StorageError, match="authError happened"):
        Objects("gs://bucket/never").write("name", b"content")
    assert len(met) == 1 and clock.waits_s == []
