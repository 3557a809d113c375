"""Backends of torch out of its tree, such as TorchTPU: when their packages are imported; no torch.

`import torch` imports every such package that is installed, unless a variable says no. torch_tpu
0.2.0 harms a process that computes elsewhere: without a chip its import takes seconds, and the
first backward pass, on a CPU too, waits for minutes for a chip. So it is imported only by processes
that use or look for a TPU.
"""

import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import import_module, metadata, util

from ftkit.errors import UserError
from ftkit.utils.accelerators.kinds import DEVICE_KINDS, DeviceKind, device_kind

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Variable that torch reads once, when it is imported; "0": it imports no backend."""
_GROUP = "torch.backends"
"""Entry points by which torch finds backends; the name is that of the package."""


def is_installed(kind: DeviceKind) -> bool:
    """Whether the package is installed that brings this kind of device; True: it needs none."""
    return kind.package is None or util.find_spec(kind.package) is not None


def keep_out_backends() -> None:
    """Have torch import no backend, in this process and its children; called before torch is.

    Nothing changes if the variable is set, or if a backend is installed that ftkit does not know.
    """
    known = {kind.package for kind in DEVICE_KINDS if kind.package is not None}
    # Looked for first: reading the entry points of all packages takes longer.
    if AUTOLOAD in os.environ or not any(util.find_spec(package) for package in known):
        return
    if {point.name for point in metadata.entry_points(group=_GROUP)} <= known:
        os.environ[AUTOLOAD] = "0"


@contextmanager
def backends_kept_out() -> Iterator[None]:
    """Have torch import no backend if it is imported inside the block; later children may."""
    before = os.environ.get(AUTOLOAD)
    keep_out_backends()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(AUTOLOAD, None)


def backend_environment(kind: DeviceKind) -> dict[str, str]:
    """Variables of a process that uses this kind of device."""
    return {} if kind.package is None else {AUTOLOAD: "1"}


def load_backend(name: str) -> None:
    """Make this process ready to use a kind of device, before its first tensor there.

    Args:
        name: kind of device.

    Raises:
        UserError: the backend cannot use it.
    """
    kind = device_kind(name)
    if kind.package is None:
        return
    os.environ.update(backend_environment(kind))  # it reads the variable, too
    # It says that it is loaded, and of each function that it may change.
    with redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module(kind.package)
        import torch

        try:
            # The variables of a launch that it asks for: topology, and a free port.
            torch.get_device_module(name).distributed.set_tpu_launch_env(nproc_per_node=1)
        except Exception as error:  # ValueError, RuntimeError, and what it may bring
            raise UserError(
                f"accelerator is {name}, but {_version(kind.package)} cannot start one process on "
                f"one chip here: {error}. Try --accelerator cpu."
            ) from error


def refuse_idle_backend() -> None:
    """Refuse to compute in a process where torch has imported a backend without a device.

    Raises:
        UserError: names the variable that prevents it.
    """
    for kind in DEVICE_KINDS:
        if kind.package in sys.modules and "torch" in sys.modules:
            import torch

            found = torch.accelerator.current_accelerator()
            if found is None or found.type != kind.name:
                raise UserError(
                    f"torch was imported first in this process and has imported {kind.package}, "
                    f"but there is no {kind.noun}: a backward pass would wait for one for minutes. "
                    f"Restart Python, and set {AUTOLOAD}=0 or import ftkit before torch is "
                    "imported."
                )


def missing_text(kind: DeviceKind, error: str) -> str:
    """The message that there is no device of a kind that a package brings.

    Args:
        kind: one with a package.
        error: of the query; empty: it found none.
    """
    assert kind.package is not None
    start = f"accelerator is {kind.name}, but "
    if not is_installed(kind):
        return (
            f"{start}{kind.package} is not installed, by which torch uses a {kind.noun}. "
            f"Try pip install 'ftkit[{kind.name}]' on a machine with one, or --accelerator cpu."
        )
    found = error or "found none"
    return (
        f"{start}there is no {kind.noun} here: {_version(kind.package)} was asked for "
        f"torch.accelerator.device_count() and {found}. Run on a machine with a {kind.noun}, or "
        "try --accelerator cpu."
    )


def unknown_text(kind: DeviceKind, error: str) -> str:
    """The notice that the CPU is used because the query for a kind of device failed."""
    assert kind.package is not None
    return (
        f"{_version(kind.package)} was asked for a {kind.noun} and {error}: the CPU is used. If "
        f"there is one, try --accelerator {kind.name} when this machine is less busy."
    )


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return package
