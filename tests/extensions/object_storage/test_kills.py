"""Kills -9 while a checkpoint is sent: readers find whole ones, and the run goes on from there."""

import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from object_servers import BROKEN, Bucket, Fault, Proxy, Request
from remote_runs import Ftkit, ended, learned
from runs import wait_for

from ftkit.checkpoint.store import Store
from ftkit.extensions.object_storage.download import refresh
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.report import read_report
from ftkit.utils.urls import local_path

STEPS, BEFORE = 5, 2
Moment = Callable[[Request], bool]
"""Whether a request is the one at which everything is killed."""


class Killed:
    """A run at a url that stopped at step 2, and is killed at a moment after it has gone on.

    It keeps one checkpoint, so that each that is sent takes the place of another.
    """

    def __init__(
        self,
        begin: Ftkit,
        s3: Proxy,
        bucket: Bucket,
        patch: pytest.MonkeyPatch,
        whole: Path,
        tmp_path: Path,
    ) -> None:
        self._begin, self._s3, self._bucket, self._tmp_path = begin, s3, bucket, tmp_path
        self._patch, self._whole = patch, whole
        self._complete("a", "s3://bucket/kills/before", "--stop_after", BEFORE)
        self.seen: set[tuple[int, ...]] = set()
        """Steps that readers found after the kills."""

    def _words(self, out_dir: object, *more: object) -> tuple[object, ...]:
        return (out_dir, "--checkpoint.keep_last", "1", *more)

    def _complete(self, machine: str, out_dir: object, *more: object) -> str:
        code, said = ended(self._begin(machine, *self._words(out_dir, *more)))
        assert code == 0, said
        return said

    def at(self, name: str, moment: Moment, *, arrives: bool, elsewhere: bool) -> bool:
        """Kill it, read what is there, and let it go on; whether it came to that.

        Args:
            name: of the case.
            moment: called with each request that changes something.
            arrives: whether the storage gets the request; nobody gets its answer.
            elsewhere: whether another machine goes on.
        """
        place = f"killed/{name}"
        for key in self._bucket.names("kills/before"):
            self._bucket.write(f"{place}/{key}", self._bucket.read(f"kills/before/{key}"))
        url, machine = f"s3://bucket/{place}", f"machine-{name}"
        has_begun, lock, killed = threading.Event(), threading.Lock(), list[Request]()

        def decide(request: Request) -> Fault | None:
            if request.method in ("GET", "HEAD") or f"/{place}/" not in request.path:
                return None
            with lock:
                if not killed and moment(request):
                    killed.append(request)
                    if arrives:
                        return Fault(when_whole=end)
                    end()
                    return BROKEN
            return BROKEN if killed else None

        def end() -> None:
            has_begun.wait()
            os.kill(attempt.pid, signal.SIGKILL)

        self._s3.decide = decide
        attempt = self._begin(machine, *self._words(url, "--resume", "auto"))
        has_begun.set()
        code, said = ended(attempt)
        wait_for(lambda: not self._s3.under_way)
        self._s3.works()
        assert code == (-signal.SIGKILL if killed else 0), said
        self._assert_whole(url, name)
        if killed:
            said = self._complete("other" if elsewhere else machine, url, "--resume", "auto")
            assert "Traceback" not in said
        self._assert_equal(place, name)
        return bool(killed)

    def _assert_whole(self, url: str, name: str) -> None:
        """To a reader on a third machine."""
        self._patch.setenv("FTKIT_CACHE_DIR", str(self._tmp_path / f"reader-{name}"))
        run = RunDirectory(local_path(url))
        refresh(run.path)
        steps = run.store.steps()
        assert steps and max(steps) >= BEFORE
        assert [run.store.verify(step) for step in steps] == [[] for _ in steps]
        self.seen.add(tuple(steps))

    def _assert_equal(self, place: str, name: str) -> None:
        """To the run that nothing had stopped, with nothing left of what had."""
        copy = self._bucket.fetch(place, self._tmp_path / f"copy-{name}")
        assert learned(copy) == learned(self._whole)
        assert read_report(copy).outcome == "completed"
        store = Store(copy / "checkpoints")
        assert store.steps() == [STEPS] and store.verify(STEPS) == []
        shard = f"checkpoints/step-{STEPS:08}/shard-00000-of-00001.safetensors"
        assert (copy / shard).read_bytes() == (self._whole / shard).read_bytes()
        assert not (copy / ".run").exists()


@pytest.fixture
def kill(
    begin: Ftkit,
    s3: Proxy,
    bucket: Bucket,
    whole: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Killed:
    return Killed(begin, s3, bucket, monkeypatch, whole("finetune"), tmp_path)


def commits(request: Request) -> bool:
    """The metadata of a new checkpoint are written."""
    return request.method == "PUT" and request.path.endswith("/metadata.json")


@pytest.mark.slow
def test_a_checkpoint_does_not_exist_before_its_last_object(kill: Killed) -> None:
    assert kill.at("before", commits, arrives=False, elsewhere=True)
    assert kill.seen == {(BEFORE,)}


@pytest.mark.matrix
def test_a_checkpoint_exists_with_its_last_object(kill: Killed) -> None:
    assert kill.at("after", commits, arrives=True, elsewhere=False)
    assert any(BEFORE in steps and len(steps) == 2 for steps in kill.seen)


@pytest.mark.matrix
@pytest.mark.timeout(7200)
def test_a_run_survives_a_kill_at_each_request_that_changes_something(kill: Killed) -> None:
    """Every other one still arrives; every other pair of them goes on elsewhere."""

    def killed_at(number: int) -> bool:
        count = itertools.count()
        return kill.at(
            str(number),
            lambda _: next(count) == number,
            arrives=number % 2 == 0,
            elsewhere=number // 2 % 2 == 0,
        )

    number = next(number for number in itertools.count() if not killed_at(number))
    assert number > 15
    assert (BEFORE,) in kill.seen and (STEPS,) in kill.seen
