"""Process groups of the backend "nccl": gloo carries them, and CPU tensors are refused.

The operators of torch.distributed for tensors on cards are in kernels.cpp, where they are counted;
a group of "nccl" alone has no backend for tensors of the host, so torch itself refuses them.
"""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d


class _Options(SimpleNamespace):
    def __init__(self, **values: Any) -> None:
        super().__init__(_timeout=timedelta(minutes=10), **values)


class GlooInName(ProcessGroupGloo):
    """A backend of another name."""

    Options = _Options

    def __init__(self, store: Any, rank: int, size: int, options: _Options) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)
        self._own_options = options

    @property
    def options(self) -> _Options:  # type: ignore[override]
        """Options of the group; torch copies them for groups of some of the ranks."""
        return self._own_options

    def eager_connect_single_device(self, device: torch.device) -> None:  # type: ignore[override]
        """The connections are there."""

    def abort(self) -> None:
        """There is nothing under way."""


class ProcessGroupNCCL(GlooInName):
    """NCCL in name."""


def make_in_name(store: Any, rank: int, size: int, timeout: timedelta) -> GlooInName:
    """As torch makes a backend that others have registered."""
    options = _Options()
    options._timeout = timeout
    return GlooInName(store, rank, size, options)


def install() -> None:
    """Make torch.distributed believe that it was built with NCCL."""
    if not dist.is_available():
        return
    for module in (dist, distributed_c10d):
        module.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
    distributed_c10d._NCCL_AVAILABLE = True
    never_split()
    distributed_c10d.default_pg_nccl_timeout = timedelta(minutes=10)  # type: ignore[attr-defined]


def never_split() -> None:
    """Have a group of some ranks made anew, as gloo cannot split one."""
    make = distributed_c10d._new_process_group_helper

    def without_splitting(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **kwargs | {"device_id": None})

    distributed_c10d._new_process_group_helper = without_splitting
