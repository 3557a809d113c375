"""Background work: requests on threads that neither a signal nor an exit waits for."""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

_LOOKS_EVERY_S = 0.1
_Item = TypeVar("_Item")


def ends(
    thread: threading.Thread,
    unless: Callable[[], bool],
    on_waiting: Callable[[], object] = lambda: None,
) -> bool:
    """Wait for a thread; whether it has ended.

    Args:
        thread: it is left alone if it is not waited for any longer.
        unless: what ends the waiting, such as a signal; asked ten times a second.
        on_waiting: called as often.
    """
    while thread.is_alive() and not unless():
        thread.join(_LOOKS_EVERY_S)
        on_waiting()
    return not thread.is_alive()


def pause(seconds: float, unless: Callable[[], bool]) -> None:
    """Wait for some time, or for what ends the waiting, such as a signal."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s and not unless():
        time.sleep(_LOOKS_EVERY_S)


def begun(work: Callable[[], object]) -> threading.Thread:
    """A thread that does some work, and that the end of this process does not wait for."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def each(work: Callable[[_Item], object], items: Iterable[_Item], at_once: int) -> None:
    """Do work for each item, several at a time; after a failure no other one is begun.

    A pool of `concurrent.futures` would be waited for when the process exits.

    Raises:
        Exception: the first that the work has raised, once all that was begun has ended.
    """
    left: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    for item in items:
        left.put(item)
    failures: list[Exception] = []

    def take() -> None:
        with suppress(queue.Empty):
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
