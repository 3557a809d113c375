"""Hardware, versions, and the host memory of this process, for reports; no torch."""

import os
import platform
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

PACKAGES = (
    "ftkit",
    "torch",
    "lightning",
    "litgpt",
    "peft",
    "transformers",
    "bitsandbytes",
    "torchao",
    "deepspeed",
    "liger-kernel",
    "safetensors",
    "tokenizers",
    "numpy",
)
"""Packages whose version can change a number of the report."""

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Linux' names of the instructions that multiply bfloat16: two of x86, and Arm's."""


@dataclass(frozen=True, kw_only=True)
class InstalledGpu:
    """One GPU of the machine."""

    name: str
    """Product name, as the driver gives it."""
    memory_bytes: int | None = None
    """Memory of the device; empty where it has none of its own."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The machine of rank 0, without its name."""

    cpu: str | None = None
    """CPU model."""
    physical_cores: int | None = None
    """Cores of the machine."""
    logical_cores: int | None = None
    """Hardware threads of the machine."""
    memory_bytes: int | None = None
    """Host memory of the machine; a container may be allowed less."""
    gpus: list[InstalledGpu] = field(default_factory=list)
    """Every NVIDIA GPU of the machine, used by the run or not."""
    driver: str | None = None
    """Version of the NVIDIA driver."""
    cuda: str | None = None
    """Newest CUDA version the driver supports."""


class HostMemory(NamedTuple):
    """Host memory of this process."""

    rss_bytes: int
    """Resident now, file-mapped pages included."""
    rss_anon_plus_shmem_bytes: int
    """Resident now without file-mapped pages, which the kernel can drop: weights read through
    mmap count in the RSS and cost nothing."""
    peak_rss_bytes: int
    """Highest RSS since the process started."""


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages among PACKAGES; nothing is imported."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> Hardware:
    """Hardware of this machine, with the driver of its GPUs."""
    gpus, driver, cuda = _nvidia()
    return Hardware(
        cpu=_cpu_model(Path("/proc/cpuinfo")),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=gpus,
        driver=driver,
        cuda=cuda,
    )


def multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU has instructions for products of bfloat16.

    Args:
        cpuinfo: Linux' description of the CPU.
    """
    # A system that shows no flags (macOS, Windows, some containers) counts as one without: every
    # CPU is fast in float32, and one that emulates bfloat16 is many times slower in it.
    with suppress(OSError), cpuinfo.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, words = line.partition(":")
            if key.strip() in ("flags", "Features"):  # of x86, of Arm; all cores have the same
                return not _BF16_FLAGS.isdisjoint(words.split())
    return False


def boot_id() -> str | None:
    """Return the id of this start of the machine; None: the system has none."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else None


def host_memory(status: Path = Path("/proc/self/status")) -> HostMemory:
    """Host memory of this process, from ``/proc`` or, where there is none, from psutil.

    Without ``/proc`` the part without file-mapped pages is not known and the RSS stands for it.
    """
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return _host_memory_without_proc()
    kib = {
        key: int(value.split()[0])
        for key, _, value in (line.partition(":") for line in lines)
        if key in ("VmRSS", "VmHWM", "RssAnon", "RssShmem")
    }
    # RssAnon and RssShmem exist since Linux 4.5.
    if len(kib) < 4:
        return _host_memory_without_proc()
    # The kernel's kB are KiB.
    return HostMemory(
        rss_bytes=kib["VmRSS"] * 1024,
        rss_anon_plus_shmem_bytes=(kib["RssAnon"] + kib["RssShmem"]) * 1024,
        peak_rss_bytes=kib["VmHWM"] * 1024,
    )


class HostLimit(NamedTuple):
    """Most host memory that processes of this machine, or of its container, may hold."""

    memory_bytes: int
    """Memory without swap."""
    swap_bytes: int
    """Swap that is available beside it."""


def host_limit(
    processes: int = 1,
    *,
    membership: Path = Path("/proc/self/cgroup"),
    groups: Path = Path("/sys/fs/cgroup"),
) -> HostLimit:
    """Most host memory that each of some processes can hold, whatever others hold now.

    A process that needs more is killed, or its allocations fail. The machine's memory counts, the
    control groups of this process and those above them, and the limits of a single process.

    Args:
        processes: that share the memory of the machine, or of the container.
        membership: says which control groups this process is in.
        groups: where control groups are mounted.
    """
    memory = total = psutil.virtual_memory().total
    with warnings.catch_warnings():  # psutil warns where /proc/vmstat lacks counters of swap
        warnings.simplefilter("ignore", RuntimeWarning)
        most = memory + psutil.swap_memory().total
    for directory in _control_groups(membership, groups):
        # Version 2 of control groups, then version 1.
        of_group = _bytes_in(directory / "memory.max", directory / "memory.limit_in_bytes")
        swap = _bytes_in(directory / "memory.swap.max")  # version 2: beside memory.max
        both = _bytes_in(directory / "memory.memsw.limit_in_bytes")  # version 1: memory and swap
        # Version 1 has a huge number where there is no limit.
        memory = min(memory, of_group or total)
        if swap is not None:
            most = min(most, (of_group or total) + swap)
        if both is not None:
            most = min(most, both)
    own = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    limits = [limit for limit in own if limit != resource.RLIM_INFINITY]
    memory, most = (min([shared // processes, *limits]) for shared in (memory, most))
    return HostLimit(memory, max(0, most - memory))


def available_host_bytes(processes: int = 1) -> int:
    """Host memory that each of some processes may take now, within its limits and without swap.

    Args:
        processes: that share the memory of the machine, or of the container.
    """
    limit = host_limit(processes).memory_bytes
    return min(psutil.virtual_memory().available // processes, limit)


def _control_groups(membership: Path, groups: Path) -> Iterator[Path]:
    """Yield the control groups of this process and those above, of versions 2 and 1.

    In a container the path may be the host's, which does not exist there: then the mounted
    directory is the container's own group.
    """
    # Version 2 is mounted at the top; the controller of memory of version 1 in a directory of its
    # own.
    own = {groups: "", groups / "memory": ""}
    with suppress(OSError, ValueError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # Lines are ID:CONTROLLERS:PATH; in version 2 the second is empty.
            if not controllers:
                own[groups] = path
            elif "memory" in controllers.split(","):
                own[groups / "memory"] = path
    for mounted, path in own.items():
        # In a cgroup namespace the path of a group above begins with /.. .
        directory = Path(os.path.normpath(mounted / path.lstrip("/")))
        yield mounted
        while directory != mounted and directory.is_relative_to(mounted):
            yield directory
            directory = directory.parent


def _bytes_in(*files: Path) -> int | None:
    """Read the number in the first of some files that holds one; None: absent, or "max"."""
    for file in files:
        with suppress(OSError, ValueError):
            return int(file.read_text())
    return None


def processes_killed_for_memory(counters: Path = Path("/proc/vmstat")) -> int | None:
    """Number of processes that the kernel has killed since it started because memory was exhausted.

    It includes processes of containers that reached their limit. None: the kernel does not tell.
    """
    with suppress(OSError, ValueError):
        for line in counters.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def _host_memory_without_proc() -> HostMemory:
    rss_bytes = psutil.Process().memory_info().rss
    # macOS counts in bytes, every other system in KiB: getrusage(2).
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return HostMemory(rss_bytes, rss_bytes, max(peak, rss_bytes))


def _cpu_model(cpuinfo: Path) -> str | None:
    try:
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":  # absent on Arm
                return value.strip()
    except OSError:
        pass
    return platform.processor() or os.uname().machine or None


def _nvidia() -> tuple[list[InstalledGpu], str | None, str | None]:
    """Return GPUs, driver and CUDA version; nothing without the library or a driver."""
    try:
        import pynvml as nvml
    except ImportError:
        return [], None, None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return [], None, None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        gpus = [
            InstalledGpu(name=_text(nvml.nvmlDeviceGetName(h)), memory_bytes=_gpu_memory(nvml, h))
            for h in handles
        ]
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        # 12040 is CUDA 12.4.
        return gpus, driver, f"{cuda // 1000}.{cuda % 1000 // 10}"
    except nvml.NVMLError:
        return [], None, None
    finally:
        nvml.nvmlShutdown()


def _gpu_memory(nvml: Any, handle: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:  # not supported where GPU and CPU share their memory
        return None


def _text(value: str | bytes) -> str:
    """Return text: older versions of nvidia-ml-py give bytes."""
    return value.decode() if isinstance(value, bytes) else value


class CpuUtilization:
    """Use of the machine's hardware threads by this process and its children."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._start = (0.0, 0.0)
        self.started = False

    def start(self) -> None:
        """Begin to count."""
        # Not the time of day, which may be set back.
        self._start = (self._seconds(), time.monotonic())
        self.started = True

    def mean(self) -> float:
        """Mean fraction of the threads since the start, at most 1."""
        used_s, began = self._start
        elapsed = time.monotonic() - began
        return min(1.0, (self._seconds() - used_s) / (elapsed * (psutil.cpu_count() or 1)))

    def _seconds(self) -> float:
        times = self._process.cpu_times()
        # Children count from their end on: times(2).
        return float(times.user + times.system + times.children_user + times.children_system)
