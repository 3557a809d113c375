"""Signals that stop training: at the end of a step, or at once."""

import signal
from types import FrameType

from ftkit.errors import EXIT_BY_SIGNAL
from ftkit.strategies.distributed import broadcast_ints


class Interrupted(BaseException):
    """The user stopped the run where there is no optimizer step to finish."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number
        super().__init__(signal.Signals(signal_number).name)


class StopRequest:
    """A signal asks the run to end; what it does depends on the moment.

    During training it only sets a flag, and the run ends after the current optimizer step.
    Anywhere else it raises `Interrupted` at once.
    """

    SIGNALS = tuple(EXIT_BY_SIGNAL)

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.wait_for_step = False
        self.raised: Interrupted | None = None
        """What was raised, whatever became of it: libraries turn it into errors of their own."""

    def requested(self) -> int:
        """The signal that asks for the end, or 0; the same on all ranks, which all call this.

        The supervisor passes a signal to every rank, but not at the same moment: what rank 0 has
        seen counts.
        """
        (number,) = broadcast_ints(self.signal_number or 0)
        return number

    def install(self) -> None:
        """Take over the signals of this process."""
        for number in self.SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.signal_number = number
        if not self.wait_for_step:
            self.raised = Interrupted(number)
            raise self.raised
