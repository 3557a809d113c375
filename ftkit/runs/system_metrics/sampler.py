"""The sampler of system metrics: a thread that asks host and devices, at most every two seconds.

A run of a few seconds has a series, too: the first samples follow each other quickly.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from ftkit.runs.system_metrics.nvml import gpus_in_use
from ftkit.runs.system_metrics.table import SystemWriter
from ftkit.strategies.distributed import local_world_size
from ftkit.utils.accelerators.kinds import device_kind
from ftkit.utils.hardware import host_memory

_FIRST_S, _LONGEST_S = 0.1, 2.0
_GROWTH = 1.25
"""Of the time from sample to sample: 8 samples in 2 s, 14 in 8 s, then one every 2 s."""
_PATIENCE_S = 10.0
_PREFIX = "system/"


class SystemSampler:
    """What host and devices are doing, for system.csv, for loggers and for the report.

    Nothing of it waits for a device: its driver is asked, and torch's count of its memory.
    """

    def __init__(
        self,
        device: torch.device,
        step: Callable[[], int],
        *,
        path: Path | None,
        after_step: int | None,
    ) -> None:
        """Prepare.

        Args:
            device: of this rank.
            step: how many optimizer steps are done.
            path: of system.csv, for the GPUs of the whole run on this host; None: no file is
                written, and only the GPU of this rank is asked.
            after_step: as of `MetricsWriter`.
        """
        self._device, self._step = device, step
        self._gpus = gpus_in_use(device, 1 if path is None else local_world_size())
        self._path, self._after_step = path, after_step
        self._writer: SystemWriter | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)
        self._newest: dict[str, float] = {}
        self._seconds = self._busy_s = 0.0
        self._energy_j: float | None = None

    @property
    def started(self) -> bool:
        """Whether it has begun."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Ask once more, and no more."""
        self._ended.set()
        if self.started:
            self._thread.join(_PATIENCE_S)

    def newest(self) -> dict[str, float]:
        """The sample that has not been given before, for loggers: memory in GiB."""
        values, self._newest = self._newest, {}
        return {
            _PREFIX + name.replace("_bytes", "_gib"): v / 2**30 if name.endswith("_bytes") else v
            for name, v in values.items()
        }

    @property
    def device_utilization(self) -> float | None:
        """Mean fraction of time the GPU of this rank was busy; None: it is not known."""
        return self._busy_s / self._seconds if self._seconds else None

    @property
    def energy_wh(self) -> float | None:
        """What the GPUs have taken since the start; None: it is not known."""
        return None if self._energy_j is None else self._energy_j / 3600

    def sample(self) -> dict[str, float]:
        """What is told now, by its name."""
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
        """What the thread does; a host that tells nothing costs the run its system metrics."""
        with suppress(OSError, ValueError, RuntimeError, psutil.Error):
            psutil.cpu_percent()  # of a thread, from its first call on
            taken_s, interval_s = time.monotonic(), _FIRST_S
            while not self._ended.wait(interval_s):
                taken_s = self._take(taken_s)
                interval_s = min(interval_s * _GROWTH, _LONGEST_S)
            self._take(taken_s)
        if self._writer is not None:
            self._writer.close()

    def _take(self, before_s: float) -> float:
        """A sample, which counts for the time since the one before; when it was taken."""
        values, now_s = self.sample(), time.monotonic()
        if self._path is not None and self._writer is None:
            self._writer = SystemWriter(self._path, tuple(values), self._after_step)
        if self._writer is not None:
            self._writer.write(self._step(), time.time(), values)
        self._newest = values
        passed_s = now_s - before_s
        if "device0_utilization" in values:
            self._seconds += passed_s
            self._busy_s += values["device0_utilization"] * passed_s
        powers = [v for name, v in values.items() if name.endswith("_power_w")]
        if powers:
            self._energy_j = (self._energy_j or 0.0) + sum(powers) * passed_s
        return now_s
