"""A CPU in the part of a device that compiles programs for each shape."""

import dataclasses

import pytest

from ftkit.utils.accelerators.kinds import DEVICE_KINDS, HOST_KIND


def compile_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kind of the CPU have the fact that decides."""
    kind = dataclasses.replace(DEVICE_KINDS._core[HOST_KIND], compiles_shapes=True)
    monkeypatch.setitem(DEVICE_KINDS._core, HOST_KIND, kind)
