"""Progress of long work, as it is told to whoever shows it."""

from collections.abc import Callable

OnProgress = Callable[[int, int], None]
"""Called with what is done and what there is in all: bytes, parameters, records."""
