"""Imports of heavy libraries: quick, silent, and without what nobody here uses."""

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without looking for garbage, neither now nor later in what was imported.

    It takes half of the time that importing torch, Lightning and transformers takes otherwise.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def without_hub_kernels() -> None:
    """Keep bitsandbytes from fetching native code from a hub, and running it, at import.

    It does on some CPUs where the package `kernels` is installed: what a run computes would depend
    on that. The package is hidden from all libraries.
    """
    sys.modules["kernels"] = None  # type: ignore[assignment]  # importing it fails, as expected
    # Else it advises to install the package.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Have libraries find inside the block that a package is not installed; not if it is in use."""
    hides = name not in sys.modules
    if hides:
        sys.modules[name] = None  # type: ignore[assignment]  # see without_hub_kernels
    try:
        yield
    finally:
        if hides:
            del sys.modules[name]


def silence_libraries() -> None:
    """Keep bitsandbytes and DeepSpeed from telling which kernels and devices they do not find.

    For processes that do not train: the log of a run has it all.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # it sets its level itself


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
