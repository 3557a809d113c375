"""System metrics: a thread samples host and devices while a run trains, for system.csv.

The interval is two seconds at most. It starts shorter, so that a run of a few seconds has a series,
too.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from ftkit.runs.report.metrics import SYSTEM_COLUMNS, CsvWriter, cell_text
from ftkit.strategies.distributed import local_world_size
from ftkit.utils.accelerators.kinds import device_kind
from ftkit.utils.files import widen_table
from ftkit.utils.hardware import host_memory

_FIRST_S, _LONGEST_S = 0.1, 2.0
_GROWTH = 1.25
"""Growth of the interval: 8 samples in 2 s, 14 in 8 s, then one every 2 s."""
_PATIENCE_S = 10.0
_PREFIX = "system/"


class SystemSampler:
    """Samples host and devices, for system.csv, for loggers and for the report.

    No sample waits for a device: it comes from the driver and from torch's count of memory.
    """

    def __init__(
        self,
        device: torch.device,
        step: Callable[[], int],
        *,
        path: Path | None,
        after_step: int | None,
        stretch: Callable[[], int | None],
    ) -> None:
        """Find the GPUs; `start` begins to sample.

        Args:
            device: of this rank.
            step: returns the number of optimizer steps done.
            path: of system.csv, for the GPUs of the whole run on this host; None: no file is
                written, and only the GPU of this rank is sampled.
            after_step: as of `MetricsWriter`.
            stretch: returns the number of the uninterrupted stretch of steps at full speed that it
                is now; None: it is none.
        """
        self._device, self._step, self._stretch = device, step, stretch
        # The rank that writes the file samples all GPUs of the run on this host; others only their
        # own.
        self._gpus = gpus_in_use(device, 1 if path is None else local_world_size())
        self._path, self._after_step = path, after_step
        self._writer: SystemWriter | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)
        self._newest: dict[str, float] = {}
        self._sampled_in: int | None = None
        """Stretch of the last sample."""
        self._seconds = self._busy_s = 0.0
        self._energy_j: float | None = None

    @property
    def started(self) -> bool:
        """True once sampling has begun."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample."""
        self._ended.set()
        if self.started:
            # A driver that hangs must not hold up the end of the run.
            self._thread.join(_PATIENCE_S)

    def newest(self) -> dict[str, float]:
        """The newest sample, once, for loggers: memory in GiB."""
        # A sample goes to loggers once: steps may be shorter than the interval.
        values, self._newest = self._newest, {}
        return {
            _PREFIX + name.replace("_bytes", "_gib"): v / 2**30 if name.endswith("_bytes") else v
            for name, v in values.items()
        }

    @property
    def device_utilization(self) -> float | None:
        """Mean fraction of time at full speed that the GPU of this rank was busy; None: unknown."""
        return self._busy_s / self._seconds if self._seconds else None

    @property
    def energy_wh(self) -> float | None:
        """Energy that the GPUs used since the start; None: unknown."""
        return None if self._energy_j is None else self._energy_j / 3600

    def sample(self) -> dict[str, float]:
        """Take a sample: values by name."""
        values = {
            "host_memory_bytes": float(host_memory().rss_anon_plus_shmem_bytes),
            "host_cpu_utilization": psutil.cpu_percent() / 100,
        }
        if device_kind(self._device.type).counts_memory:
            allocated = torch.accelerator.memory_allocated(self._device)
            reserved = torch.accelerator.memory_reserved(self._device)
            values |= {"allocated_bytes": float(allocated), "reserved_bytes": float(reserved)}
        for number, gpu in enumerate(self._gpus):
            values |= {f"device{number}_{name}": v for name, v in gpu.read().items()}
        return values

    def _run(self) -> None:
        """Sample until the end; errors of the host cost only the system metrics."""
        with suppress(OSError, ValueError, RuntimeError, psutil.Error):
            psutil.cpu_percent()  # of a thread, from its first call on
            taken_s, interval_s = time.monotonic(), _FIRST_S
            while not self._ended.wait(interval_s):
                taken_s = self._take(taken_s)
                interval_s = min(interval_s * _GROWTH, _LONGEST_S)
            # The last one covers the time up to the end, so energy is complete.
            self._take(taken_s)
        if self._writer is not None:
            self._writer.close()

    def _take(self, before_s: float) -> float:
        """Take a sample, which counts for the time since the last one; return its time."""
        values, now_s = self.sample(), time.monotonic()
        if self._path is not None and self._writer is None:
            self._writer = SystemWriter(self._path, tuple(values), self._after_step)
        if self._writer is not None:
            self._writer.write(self._step(), time.time(), values)
        self._newest = values
        passed_s = now_s - before_s
        stretch, before = self._stretch(), self._sampled_in
        self._sampled_in = stretch
        # A sample is of the time since the one before, which a validation may have been part of.
        if "device0_utilization" in values and stretch is not None and stretch == before:
            # Weighted by time, because the interval grows.
            self._seconds += passed_s
            self._busy_s += values["device0_utilization"] * passed_s
        powers = [v for name, v in values.items() if name.endswith("_power_w")]
        if powers:
            # Not NVML's own counter of energy, which not every GPU has.
            self._energy_j = (self._energy_j or 0.0) + sum(powers) * passed_s
        return now_s


class SystemWriter(CsvWriter):
    """Writes samples; a run that continues on other devices has further columns."""

    def __init__(self, path: Path, names: tuple[str, ...], after_step: int | None) -> None:
        """Start a new file, or append to that of an earlier session.

        Args:
            path: of the file.
            names: of what is sampled. Columns of earlier sessions stay, new ones are empty there.
            after_step: as of `MetricsWriter`.

        Raises:
            OSError: the file cannot be written.
            ValueError: it has a row after ``after_step``.
        """
        self._columns = (*SYSTEM_COLUMNS, *names)
        if after_step is not None and path.exists():
            self._columns = widen_table(path, self._columns)
        super().__init__(path, self._columns, after_step)

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Add a sample.

        Args:
            step: optimizer steps done.
            time_s: when, in seconds since 1970.
            values: by their names.
        """
        cells = (cell_text(values.get(name)) for name in self._columns[len(SYSTEM_COLUMNS) :])
        self._write_cells((str(step), f"{time_s:.2f}", *cells))


class NvmlDevice:
    """A GPU, read through NVML: the driver has these numbers anyway, so nothing waits."""

    def __init__(self, index: int) -> None:
        """Find the GPU.

        Args:
            index: among those that CUDA shows.

        Raises:
            Exception: no library or driver, or it does not know the GPU.
        """
        import pynvml as nvml

        nvml.nvmlInit()
        # Not by its index, which is another one: NVML lists every GPU, in the order of the bus.
        uuid = torch.cuda.get_device_properties(index).uuid
        gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self._readers: dict[str, Callable[[], Any]] = {
            "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            # NVML counts milliwatts.
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
        }

    def read(self) -> dict[str, float]:
        """Fraction of time it was busy, power, and memory in use by all processes.

        Values that it does not have, such as the power of a MIG slice, are left out.
        """
        found = {}
        for name, read in self._readers.items():
            try:
                found[name] = float(read())
            except Exception:  # NVMLError, which cannot be imported without the library
                continue
        return found


def gpus_in_use(device: torch.device, count: int) -> list[NvmlDevice]:
    """GPUs of a run on this host; none where NVML does not know them.

    Args:
        device: of this rank, which is the first.
        count: how many to find.
    """
    if not device_kind(device.type).nvml_tells_use:
        return []
    own = device.index or 0
    others = [i for i in range(torch.cuda.device_count()) if i != own]
    try:
        return [NvmlDevice(index) for index in (own, *others)[:count]]
    except Exception:
        return []
