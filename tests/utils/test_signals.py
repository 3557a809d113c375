"""Signals that a process passes on to its child: each once, whenever they come."""

import signal
import sys
from types import FrameType
from typing import Any

from ftkit.utils.process import PassingOn


class Child:
    """A process that only notes its signals."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def send_signal(self, number: int) -> None:
        self.received.append(number)


def passed_on(moment: int) -> tuple[list[int], bool]:
    """Signals that a child gets if SIGUSR1 came before it, and SIGUSR2 while it was passed on.

    Args:
        moment: number of the instruction of `PassingOn` before which SIGUSR2 comes.

    Returns:
        The signals, and whether there were so many instructions.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != sys.modules[PassingOn.__module__].__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == moment:
                signal.raise_signal(signal.SIGUSR2)
        return trace

    child: Any = Child()
    before = sys.gettrace()
    with PassingOn(signal.SIGUSR1, signal.SIGUSR2) as signals:
        signal.raise_signal(signal.SIGUSR1)
        sys.settrace(trace)
        try:
            signals.to(child)
        finally:
            sys.settrace(before)
    return child.received, count >= moment


def test_a_signal_that_comes_while_another_is_passed_on_is_passed_on_too() -> None:
    moment = 1
    while True:
        received, has_come = passed_on(moment)
        if not has_come:
            break
        assert sorted(received) == sorted([signal.SIGUSR1, signal.SIGUSR2]), moment
        moment += 1
    assert moment > 10


def test_signals_wait_for_the_next_child_in_their_order() -> None:
    first: Any = Child()
    second: Any = Child()
    with PassingOn(signal.SIGUSR1, signal.SIGUSR2) as signals:
        for number in (signal.SIGUSR2, signal.SIGUSR1):
            signal.raise_signal(number)
        signals.to(first)
        signal.raise_signal(signal.SIGUSR2)
        signals.to(second)
    assert first.received == [signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2]
    assert second.received == []
    assert signals.received == first.received
