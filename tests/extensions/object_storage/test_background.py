"""Background work: a signal is never waited for what the storage may do."""

import threading
from pathlib import Path

import pytest
from object_servers import Proxy

from ftkit.errors import UserError
from ftkit.extensions.object_storage import objects as objects_module
from ftkit.extensions.object_storage.background import begun, each, ends
from ftkit.extensions.object_storage.objects import Objects


def test_a_thread_is_left_alone_when_the_waiting_ends() -> None:
    is_over = threading.Event()
    thread = begun(is_over.wait)
    waits = iter(range(3))
    assert not ends(thread, lambda: next(waits, None) is None)
    is_over.set()
    assert ends(thread, lambda: False)
    assert thread.daemon


def test_after_a_failure_no_work_is_started_and_the_first_error_is_raised() -> None:
    done: list[int] = []

    def work(item: int) -> None:
        done.append(item)
        if item == 3:
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        each(work, range(100), at_once=1)
    assert done == [0, 1, 2, 3]
    each(done.append, range(4, 100), at_once=4)
    assert sorted(done) == list(range(100))


def test_a_signal_that_ends_a_preparation_is_not_a_storage_error(
    s3: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its handler raises in whatever the main thread does, which may be waiting for an answer."""

    class Interrupting:
        def __getattr__(self, name: str) -> None:
            raise UserError("stopped by Ctrl+C before the run began")

    monkeypatch.setattr(objects_module, "open_storage", lambda _: Interrupting())
    with pytest.raises(UserError, match="stopped by"):
        Objects("s3://bucket/interrupted").listing()
    assert s3.requests == []
