"""Background threads for requests: neither a signal nor the exit of the process waits for them."""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

# Ctrl+C has to take effect at once for the user.
_LOOKS_EVERY_S = 0.1
_Item = TypeVar("_Item")


def ends(
    thread: threading.Thread,
    unless: Callable[[], bool],
    on_waiting: Callable[[], object] = lambda: None,
) -> bool:
    """Wait for a thread to end; return whether it did.

    Args:
        thread: continues if the waiting ends first.
        unless: ends the waiting when true, such as after a signal; called ten times a second.
        on_waiting: called as often.
    """
    while thread.is_alive() and not unless():
        thread.join(_LOOKS_EVERY_S)
        on_waiting()
    return not thread.is_alive()


def pause(seconds: float, unless: Callable[[], bool]) -> None:
    """Sleep for some time, or until `unless` is true, such as after a signal."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s and not unless():
        time.sleep(_LOOKS_EVERY_S)


def begun(work: Callable[[], object]) -> threading.Thread:
    """Start work in a thread that the exit of the process does not wait for."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def each(work: Callable[[_Item], object], items: Iterable[_Item], at_once: int) -> None:
    """Do work for each item, several at a time; after a failure no other one is started.

    Raises:
        Exception: the first that the work raised, once all that was started has ended.
    """
    # A pool of `concurrent.futures` would be waited for when the process exits.
    left: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    for item in items:
        left.put(item)
    failures: list[Exception] = []

    def take() -> None:
        with suppress(queue.Empty):
            # Items that are under way are finished: no file is left half sent.
            while not failures:
                item = left.get_nowait()
                try:
                    work(item)
                except Exception as error:
                    failures.append(error)

    threads = [begun(take) for _ in range(min(at_once, left.qsize()))]
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
