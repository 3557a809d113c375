"""DeepSpeed's CPU optimizer, compiled once for this machine."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

STALE_S = 600.0
"""Nobody compiles longer: a lock file of torch's that is older was left by a killed process."""


def compile_cpu_optimizer() -> None:
    """Have DeepSpeed compile its CPU optimizer, or find it compiled; ranks wait for each other."""
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from torch.utils.cpp_extension import _get_build_directory

    builder = CPUAdamBuilder()
    with sole_builder(Path(_get_build_directory(builder.name, verbose=False))):
        builder.load(verbose=False)


@contextmanager
def sole_builder(directory: Path) -> Iterator[None]:
    """Let one process after the other compile into a directory, also if one of them is killed.

    torch holds a file there while it compiles or looks whether it has to, and waits for ever for
    one that a killed process has left. The lock here goes with its process; who has it knows by a
    mark whether the one before came to an end, and removes what that one left.
    """
    baton, mark = directory / "lock", directory / "ftkit.building"
    with FileLock(directory / "ftkit.lock"):
        if baton.exists() and (mark.exists() or time.time() - baton.stat().st_mtime > STALE_S):
            baton.unlink(missing_ok=True)
        mark.touch()
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)
