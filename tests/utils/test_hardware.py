"""Limits of host memory, of the machine, its containers and processes; what the CPU multiplies."""

import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ftkit.utils.hardware import (
    CpuUtilization,
    HostLimit,
    available_host_bytes,
    host_limit,
    multiplies_bf16,
)

GIB = 2**30
RESTING = 9223372036854771712
"""What version 1 says where there is no limit."""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 GiB, of which others leave 40, with 8 GiB of swap."""
    memory = SimpleNamespace(total=64 * GIB, available=40 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=8 * GIB))


def write(files: dict[str, object], directory: Path) -> None:
    for name, value in files.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")


@pytest.mark.parametrize(
    ("membership", "files", "memory_gib", "swap_gib"),
    [
        ("", {}, 64, 8),
        ("0::/a/b", {"a/memory.max": "max", "a/b/memory.max": "max"}, 64, 8),
        ("0::/a/b", {"a/b/memory.max": 24 * GIB, "a/b/memory.swap.max": "max"}, 24, 48),
        ("0::/a/b", {"a/memory.max": 24 * GIB, "a/memory.swap.max": 0}, 24, 0),
        ("0::/", {"memory.max": 24 * GIB, "memory.swap.max": 2 * GIB}, 24, 2),
        ("0::/a", {"a/memory.max": "max", "a/memory.swap.max": 0}, 64, 0),
        ("0::/host/path/of/it", {"memory.max": 24 * GIB, "memory.swap.max": 0}, 24, 0),
        (
            "4:memory:/a",
            {
                "memory/memory.limit_in_bytes": RESTING,
                "memory/a/memory.limit_in_bytes": 24 * GIB,
                "memory/a/memory.memsw.limit_in_bytes": 25 * GIB,
            },
            24,
            1,
        ),
        ("4:cpu,memory:/a\n0::/", {"memory/memory.limit_in_bytes": 24 * GIB}, 24, 48),
    ],
)
def test_the_limits_of_control_groups_count_with_those_above_them(
    membership: str, files: dict[str, object], memory_gib: int, swap_gib: int, tmp_path: Path
) -> None:
    write({"membership": membership} | {f"groups/{name}": v for name, v in files.items()}, tmp_path)
    found = host_limit(membership=tmp_path / "membership", groups=tmp_path / "groups")
    assert found == HostLimit(memory_gib * GIB, swap_gib * GIB)


def test_ranks_share_what_the_machine_has_and_each_has_the_limits_of_a_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nowhere = {"membership": tmp_path / "none", "groups": tmp_path}
    assert host_limit(4, **nowhere) == HostLimit(16 * GIB, 2 * GIB)
    limits = {resource.RLIMIT_DATA: 10 * GIB, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    assert host_limit(2, **nowhere) == HostLimit(10 * GIB, 0)
    assert host_limit(8, **nowhere) == HostLimit(8 * GIB, 1 * GIB)
    assert available_host_bytes(2) <= 10 * GIB
    assert available_host_bytes(8) <= 5 * GIB


def test_use_of_the_cpu_does_not_depend_on_the_time_of_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use = CpuUtilization()
    use.start()
    times = SimpleNamespace(user=1e9, system=0.0, children_user=0.0, children_system=0.0)
    # Of this one alone: what measures the tests asks other processes.
    monkeypatch.setattr(use, "_process", SimpleNamespace(cpu_times=lambda: times))
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert use.mean() == 1.0


@pytest.mark.parametrize(
    ("line", "fast"),
    [
        ("flags\t\t: fpu sse4_2 avx avx2 fma", False),
        ("flags\t\t: fpu avx2 avx512f avx512bw avx512_vnni", False),
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", True),
        ("flags\t\t: fpu avx2 amx_bf16 amx_tile", True),
        ("Features\t: fp asimd i8mm bf16", True),
        ("Features\t: fp asimd", False),
        ("bugs\t\t: bf16 avx512_bf16", False),
        ("", False),
        (None, False),
    ],
    ids=[
        "AVX2",
        "AVX-512",
        "AVX-512 BF16",
        "AMX",
        "Arm with",
        "Arm",
        "other",
        "no line",
        "no file",
    ],
)
def test_a_cpu_multiplies_bfloat16_by_its_flags(
    line: str | None, fast: bool, tmp_path: Path
) -> None:
    file = tmp_path / "cpuinfo"
    if line is not None:
        file.write_text(f"processor\t: 0\nmodel name\t: bf16\n{line}\n\nprocessor\t: 1\n")
    assert multiplies_bf16(file) == fast
