"""The claim on a url: who is taken for gone, whatever the clocks say and whatever lies there."""

import dataclasses
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from messages import key_words, says

from ftkit.errors import UserError
from ftkit.extensions.object_storage import claim
from ftkit.extensions.object_storage.claim import ClaimHolder, ClaimWatch, RemoteClaim
from ftkit.extensions.object_storage.objects import ObjectEntry, Objects

CLAIM = ".run/claim-000001.json"
LOOKS = round(claim.EXPIRES_S / claim._LOOK_S)
BEHIND_OR_AHEAD = [timedelta(hours=hours) for hours in (-24 * 365, -2, 0, 2, 24 * 365)]
DAMAGED = {
    "empty": b"",
    "nested": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "not text": b"\xff\xfe\x00",
    "a number of 10,000 digits": b"1" * 10_000,
    "null": b"null",
    "a list": b"[1, 2]",
    "nothing of a claim": b"{}",
    "too large": b" " * 10_000_000,
    **{
        f"{key} is {value!r}": json.dumps(
            dataclasses.asdict(ClaimHolder.here()) | {key: value}
        ).encode()
        for key, value in (
            ("process", "a"),
            ("process", None),
            ("process", [1]),
            ("process_started", "long ago"),
            ("machine", 1),
            ("host", {}),
            ("renewed_at", 5),
            ("renewed_at", "yesterday"),
            ("renewed_at", None),
        )
    },
}


class Bucket(Objects):
    """Objects in memory; a version is how often one was written."""

    def __init__(self, **contents: bytes) -> None:
        super().__init__("s3://bucket/claimed")
        self.contents: dict[str, bytes] = {}
        self.writes = 0

    def listing(self) -> dict[str, ObjectEntry]:
        return {
            name: ObjectEntry(len(content), f"{self.writes} {hash(content)}")
            for name, content in self.contents.items()
        }

    def read(self, name: str) -> bytes:
        return self.contents[name]

    def write(self, name: str, content: bytes) -> None:
        self.contents[name] = content
        self.writes += 1

    def create(self, name: str, content: bytes) -> bool:
        if name in self.contents:
            return False
        self.write(name, content)
        return True

    def delete(self, names: list[str]) -> None:  # type: ignore[override]
        for name in names:
            self.contents.pop(name, None)


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[int], None]]:
    """Actions elsewhere during each second that this process waits, by its number.

    Nobody really waits, and the clocks of this machine stand still.
    """
    happens: list[Callable[[int], None]] = []
    waited = 0

    def sleep(_: float) -> None:
        nonlocal waited
        waited += 1
        for one in happens:
            one(waited)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    happens.append(lambda number: waits.append(number))
    waits: list[int] = []
    return happens


def elsewhere(clock: timedelta) -> ClaimHolder:
    """The holder of a claim on a machine whose clock is wrong by so much."""
    now = datetime.now(UTC) + clock
    return dataclasses.replace(
        ClaimHolder.here(), machine="another", renewed_at=now.strftime("%Y-%m-%dT%H:%M:%SZ")
    )


def take(bucket: Bucket) -> tuple[RemoteClaim, list[str]]:
    claim, said = RemoteClaim(bucket), list[str]()
    claim.take(said.append)
    claim.release()
    return claim, said


@pytest.mark.parametrize("clock", BEHIND_OR_AHEAD, ids=str)
def test_a_live_run_is_never_taken_over_whatever_its_clock_shows(
    clock: timedelta, bucket: Bucket, seconds: list[Callable[[int], None]]
) -> None:
    holder = elsewhere(clock)
    bucket.write(CLAIM, holder.to_bytes())

    def renew(second: int) -> None:
        if second == 15:
            renewed = datetime.fromisoformat(holder.renewed_at) + timedelta(seconds=15)
            again = dataclasses.replace(holder, renewed_at=renewed.isoformat())
            bucket.write(CLAIM, again.to_bytes())

    seconds.append(renew)
    with pytest.raises(UserError, match=r"still running: process \d+ on"):
        take(bucket)
    assert list(bucket.contents) == [CLAIM]


@pytest.mark.parametrize("clock", BEHIND_OR_AHEAD, ids=str)
def test_a_dead_run_is_taken_over_after_the_same_number_of_polls_whatever_its_clock_shows(
    clock: timedelta, bucket: Bucket, seconds: list[Callable[[int], None]]
) -> None:
    looks: list[int] = []
    seconds.append(looks.append)
    bucket.write(CLAIM, elsewhere(clock).to_bytes())
    claim, said = take(bucket)
    assert looks == list(range(1, LOOKS + 1))
    assert claim.former is not None and bucket.contents == {}
    assert "watching for up to 60 s" in said[0] and f"delete s3://bucket/claimed/{CLAIM}" in said[0]
    assert [text.split()[-3:] for text in said[1:]] == [[f"{s}", "s", "more"] for s in (45, 30, 15)]


def test_the_wait_for_a_dead_run_is_needed_once(
    bucket: Bucket, seconds: list[Callable[[int], None]]
) -> None:
    bucket.write(CLAIM, elsewhere(timedelta()).to_bytes())
    take(bucket)
    looks: list[int] = []
    seconds.append(looks.append)
    _, said = take(bucket)
    assert not looks and not said


def test_deleting_the_claim_ends_the_wait_at_once(
    bucket: Bucket, seconds: list[Callable[[int], None]]
) -> None:
    bucket.write(CLAIM, elsewhere(timedelta()).to_bytes())
    looks: list[int] = []
    seconds += [looks.append, lambda second: bucket.delete([CLAIM]) if second == 3 else None]
    take(bucket)
    assert looks == [1, 2, 3]


def test_setting_the_clock_of_this_machine_makes_no_living_process_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder = ClaimHolder.here()
    real = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: real(process) + 7200)
    assert not holder.is_dead
    assert dataclasses.replace(holder, process_started=holder.process_started + 1).is_dead
    assert dataclasses.replace(holder, process=2**30).is_dead


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_claim_may_be_that_of_a_run_at_work_until_it_was_watched(
    content: bytes, bucket: Bucket, seconds: list[Callable[[int], None]], tmp_path: Path
) -> None:
    assert ClaimHolder.parse(content) is None
    bucket.write(CLAIM, content)
    seconds.append(lambda second: bucket.write(CLAIM, content + b" ") if second == 5 else None)
    with pytest.raises(UserError, match=key_words("damaged")) as refused:
        take(bucket)
    assert len(str(refused.value)) < 400
    seconds.pop()
    claim, said = take(bucket)
    assert claim.former is None and bucket.contents == {}
    assert says(said[0], f"{CLAIM} ... damaged")


@pytest.mark.parametrize("clock", BEHIND_OR_AHEAD, ids=str)
def test_a_watched_run_is_at_work_until_its_claim_is_unchanged_for_too_long(
    clock: timedelta, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.write(CLAIM, elsewhere(clock).to_bytes())
    watch = ClaimWatch(bucket)

    def look(now_s: float) -> tuple[bool, bool]:
        monkeypatch.setattr(time, "monotonic", lambda: now_s)
        return watch.look(bucket.listing())

    assert look(0.0) == (True, True)
    assert watch.is_in_doubt == (clock < -timedelta(hours=1))
    assert look(30.0) == look(60.0) == (True, True)
    bucket.write(CLAIM, elsewhere(clock).to_bytes())
    assert look(61.0) == look(121.0) == (True, True)
    assert not watch.is_in_doubt
    assert look(122.0) == (True, False)


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_watched_run_with_a_damaged_claim_is_at_work_while_the_claim_changes(
    content: bytes, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.write(CLAIM, content)
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    watch = ClaimWatch(bucket)
    assert watch.look(bucket.listing()) == (True, True)
    assert watch.is_in_doubt
    now_s = 61.0
    assert watch.look(bucket.listing()) == (True, False)


def test_a_claim_of_a_later_version_with_more_keys_can_be_read() -> None:
    holder = ClaimHolder.here()
    content = json.dumps(dataclasses.asdict(holder) | {"colour": "blue"}).encode()
    assert ClaimHolder.parse(content) == holder
