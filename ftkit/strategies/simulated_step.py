"""The simulated step: what was found without numbers, for a strategy to say where that memory is.

`ftkit.planning.simulate` makes it.
"""

from collections.abc import Collection
from dataclasses import dataclass

from ftkit.strategies.step_memory import Category


@dataclass(frozen=True)
class Snapshot:
    """Bytes alive at one moment."""

    bytes: dict[Category, int]
    """By category."""

    @property
    def total_bytes(self) -> int:
        """Of all categories."""
        return sum(self.bytes.values())


Peaks = dict[str, Snapshot]
"""The highest moment of each stretch of a step."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a whole model, however it is spread over ranks."""

    parameters: int
    """Numbers in its parameters, however many of them a byte holds."""
    parameter_bytes: int
    """Of its parameters; scales of quantised ones apart."""
    trained: int
    """Numbers that an optimizer updates."""
    trained_bytes: int
    """Of these parameters."""
    hidden: int
    """Numbers in matrices of the blocks that an optimizer updates."""
    elements: int
    """Elements of its parameters: a quantised one holds two numbers in one."""
    small_elements: int
    """Those of small parameters, which ZeRO-3 never parts again once they are gathered."""
    pinned_bytes: int
    """One rank's rows of its parameters, each in page-locked memory of its own."""
    pinned_trained_bytes: int
    """Of those that an optimizer updates."""


@dataclass(frozen=True)
class OnDevice:
    """The memory of a step on one rank, by where it is."""

    peaks: Peaks
    """On the device."""
    host: dict[Category, int]
    """What is kept in host memory while the device trains."""


@dataclass(frozen=True)
class Simulation:
    """What came of running a step without numbers."""

    peaks: Peaks
    sizes: Sizes
    hosted_bytes: int = 0
    """Page-locked host memory for activations."""

    def without(self, kinds: Collection[Category]) -> OnDevice:
        """With some categories in host memory instead."""
        host = {kind: max(peak.bytes[kind] for peak in self.peaks.values()) for kind in kinds}
        peaks = {
            name: Snapshot({k: 0 if k in kinds else v for k, v in peak.bytes.items()})
            for name, peak in self.peaks.items()
        }
        return OnDevice(peaks, host)
