"""System metrics: what host and devices report, and the file of it."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftkit.runs.report.metrics import SYSTEM_COLUMNS, RowsReader, cut_rows, read_system
from ftkit.runs.system_metrics import NvmlDevice, SystemSampler, SystemWriter

GIB = 2**30


class NvmlError(Exception):
    """The stand-in's error."""


def refused(_: int) -> Any:
    raise NvmlError("Not Supported")


def library(**other: Any) -> SimpleNamespace:
    """Two GPUs that use 300 W and 100 W."""
    calls = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": ["GPU-first", "GPU-second"].index,
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=[20, 80][gpu]),
        "nvmlDeviceGetPowerUsage": lambda gpu: [100_000, 300_000][gpu],
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=[1, 2][gpu] * GIB),
    }
    return SimpleNamespace(**calls | other)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts them the other way round: only the UUID is the same."""
    of_cuda = {0: SimpleNamespace(uuid="second"), 1: SimpleNamespace(uuid="first")}
    monkeypatch.setattr("torch.cuda.get_device_properties", of_cuda.__getitem__)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.accelerator.memory_allocated", lambda _: 3 * GIB)
    monkeypatch.setattr("torch.accelerator.memory_reserved", lambda _: 4 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


def sampler(path: Path | None, device: str = "cpu", after: int | None = None) -> SystemSampler:
    return SystemSampler(
        torch.device(device), lambda: 7, path=path, after_step=after, stretch=lambda: 0
    )


@pytest.mark.usefixtures("two_gpus")
def test_every_gpu_of_the_host_is_sampled_with_that_of_the_rank_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library())
    values = sampler(tmp_path / "system.csv", "cuda:0").sample()
    assert values.pop("host_memory_bytes") > 0
    assert 0 <= values.pop("host_cpu_utilization") <= 1
    assert values == {
        "allocated_bytes": 3 * GIB,
        "reserved_bytes": 4 * GIB,
        "device0_utilization": 0.8,
        "device0_power_w": 300,
        "device0_memory_bytes": 2 * GIB,
        "device1_utilization": 0.2,
        "device1_power_w": 100,
        "device1_memory_bytes": 1 * GIB,
    }
    assert "device1_power_w" not in sampler(None, "cuda:0").sample()


@pytest.mark.usefixtures("two_gpus")
def test_values_that_a_gpu_does_not_have_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a slice of one, or a driver of another age."""
    silent = library(nvmlDeviceGetUtilizationRates=refused)
    del silent.nvmlDeviceGetPowerUsage
    monkeypatch.setitem(sys.modules, "pynvml", silent)
    assert NvmlDevice(0).read() == {"memory_bytes": 2 * GIB}


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("found", [None, library(nvmlDeviceGetHandleByUUID=refused)])
def test_without_nvml_only_torch_is_used(
    found: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", found)
    values = sampler(None, "cuda:0").sample()
    assert [name for name in values if name.startswith("device")] == []
    assert values["allocated_bytes"] == 3 * GIB


@pytest.mark.usefixtures("two_gpus")
def test_a_sample_counts_for_the_time_since_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the energy, the power of all GPUs; in the use, that of the rank's."""
    use = iter([0, 0, 0, 0, 100, 0])
    nvml = library(nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=next(use)))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    clock = iter([100.0, 101.0, 110.0])
    made = sampler(tmp_path / "system.csv", "cuda:0")
    monkeypatch.setattr(
        "ftkit.runs.system_metrics.time",
        SimpleNamespace(monotonic=lambda: next(clock), time=lambda: 5.0),
    )
    assert made.energy_wh is None and made.device_utilization is None
    assert made._take(made._take(made._take(100.0))) == 110.0
    assert made.energy_wh == pytest.approx(400 * 10 / 3600)
    assert made.device_utilization == pytest.approx(0.9)


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_is_busy_or_not_in_steps_at_full_speed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not while its driver idles before them, nor where a validation came between two samples."""
    use, stretches = iter([0, 0, 0, 80, 10, 90]), iter([None, None, 1, 1, 3, 3])
    nvml = library(nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=next(use)))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    clock = iter([1.0, 2.0, 3.0, 4.0, 5.0, 8.0])
    made = SystemSampler(
        torch.device("cuda:0"),
        lambda: 7,
        path=None,
        after_step=None,
        stretch=lambda: next(stretches),
    )
    monkeypatch.setattr(
        "ftkit.runs.system_metrics.time", SimpleNamespace(monotonic=lambda: next(clock))
    )
    taken = 0.0
    for _ in range(6):
        taken = made._take(taken)
    assert made.device_utilization == pytest.approx((80 * 1 + 90 * 3) / 4 / 100)
    assert made.energy_wh == pytest.approx(300 * 8 / 3600), "of all the time"


def test_a_short_run_has_a_series_and_a_long_one_a_row_every_two_seconds(tmp_path: Path) -> None:
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) > 30

    made = sampler(tmp_path / "system.csv")
    made._ended = SimpleNamespace(wait=wait, set=lambda: None)
    made.start()
    made.stop()
    rows = read_system(tmp_path / "system.csv")
    assert [row["step"] for row in rows] == [7] * 31
    assert all((row["host_memory_bytes"] or 0) > 2**20 for row in rows)
    assert sum(waited[:8]) < 2 and waited[0] == 0.1
    assert waited[14:] == [2.0] * 17
    assert made.energy_wh is None


def test_a_run_that_ends_at_once_has_a_row(tmp_path: Path) -> None:
    made = sampler(tmp_path / "system.csv")
    made.start()
    made.stop()
    assert read_system(tmp_path / "system.csv")


def test_loggers_get_each_sample_once_with_memory_in_gib(tmp_path: Path) -> None:
    made = sampler(None)
    made.start()
    made.stop()
    values = made.newest()
    assert set(values) == {"system/host_memory_gib", "system/host_cpu_utilization"}
    assert 0 < values["system/host_memory_gib"] < 1000
    assert made.newest() == {}


def test_a_run_continued_on_another_machine_adds_columns(tmp_path: Path) -> None:
    path = tmp_path / "system.csv"
    with SystemWriter(path, ("host", "gpu0"), None) as writer:
        for step in (1, 1, 2, 3):
            writer.write(step, 10.0 + step, {"host": 1.0, "gpu0": 0.5})
    with path.open("a") as file:
        file.write("4,12")  # the machine died
    assert cut_rows(path, 2, tmp_path / "later.csv") == 1
    with SystemWriter(path, ("host", "gpu1"), 2) as writer:
        writer.write(3, 20.0, {"host": 2.0, "gpu1": 0.25})
    assert path.read_text().splitlines() == [
        "step,time_s,host,gpu0,gpu1",
        "1,11.00,1.0,0.5,",
        "1,11.00,1.0,0.5,",
        "2,12.00,1.0,0.5,",
        "3,20.00,2.0,,0.25",
    ]


def test_a_reader_of_a_file_that_grows_keeps_all_samples_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "system.csv"
    reader = RowsReader(path, SYSTEM_COLUMNS, several_in_step=True)
    with SystemWriter(path, ("host",), None) as writer:
        writer.write(1, 1.0, {"host": 1.0})
        assert len(reader.read_on()) == 1
        writer.write(1, 2.0, {"host": 2.0})
        writer.write(2, 3.0, {"host": 3.0})
    assert [row["host"] for row in reader.read_on()] == [1.0, 2.0, 3.0]
