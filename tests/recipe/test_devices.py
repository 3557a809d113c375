"""Which GPUs there are and whether torch can use them, found before anything starts."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command import ROOT, command_environment
from messages import key_words, message_of, says
from simulated_card.build import needs_card
from simulated_card.machine import cards, with_cards
from simulated_card.machine import machine as process_with

from ftkit.errors import UserError
from ftkit.recipe import devices
from ftkit.recipe.devices import Cuda, Current, VisibleGpu, find_devices, free_bytes, runs_on
from ftkit.utils.hardware import Hardware, InstalledGpu

GIB = 2**30
H100 = VisibleGpu(name="NVIDIA H100 80GB HBM3", capability=(9, 0), memory_bytes=79 * GIB)
V100 = VisibleGpu(name="Tesla V100-SXM2-32GB", capability=(7, 0), memory_bytes=31 * GIB)
L4 = VisibleGpu(name="NVIDIA L4", capability=(8, 9), memory_bytes=22 * GIB)
CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
CUDA_12_6 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CPU_BUILD = Cuda(torch="2.13.0+cpu", error="Torch not compiled with CUDA enabled")
OLD_DRIVER = Cuda(
    torch="2.13.0+cu130",
    error="The NVIDIA driver on your system is too old (found version 12040).",
)
WHEELS = "https://download.pytorch.org/whl"


def here(*gpus: VisibleGpu, architectures: tuple[str, ...] = CUDA_13) -> Cuda:
    return Cuda(torch="2.13.0+cu130", gpus=gpus, architectures=architectures)


class Machine:
    """A machine with the driver's files and GPUs of one's choice, as the command sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.queries = 0
        """How often torch was queried."""
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        self.has(Cuda(torch="2.13.0"), files=(), nvml=())

    def has(
        self,
        cuda: Cuda,
        files: tuple[str, ...] = ("/dev/nvidiactl",),
        nvml: tuple[str, ...] = ("NVIDIA H100",),
        newest_cuda: str = "13.0",
    ) -> None:
        def ask() -> Cuda:
            self.queries += 1
            return cuda

        exists = Path.exists
        self.patch.setattr(devices, "_asked_once", ask)
        self.patch.setattr(devices, "ask_torch", ask)
        self.patch.setattr(
            Path,
            "exists",
            lambda path: str(path) in files if str(path).startswith("/dev/") else exists(path),
        )
        known = Hardware(gpus=[InstalledGpu(name=name) for name in nvml], cuda=newest_cuda)
        self.patch.setattr(devices, "hardware", lambda: known)

    def refusal(self, **keys: Any) -> str:
        return message_of(find_devices, **keys)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


# --- What there is ------------------------------------------------------------------------------


def test_without_a_driver_the_cpu_is_used_and_torch_is_not_queried(machine: Machine) -> None:
    found = find_devices()
    assert (found.accelerator, found.count, machine.queries) == ("cpu", os.cpu_count(), 0)


@pytest.mark.parametrize("accelerator", ["auto", "cpu"])
@pytest.mark.parametrize("fast", [True, False])
def test_a_cpu_is_known_by_whether_it_multiplies_bfloat16(
    machine: Machine, accelerator: Any, fast: bool
) -> None:
    machine.patch.setattr(devices, "multiplies_bf16", lambda: fast)
    assert find_devices(accelerator).bf16_native == fast


def test_a_requested_cpu_needs_no_query_of_torch(machine: Machine) -> None:
    machine.has(here(H100))
    assert find_devices(accelerator="cpu").accelerator == "cpu"
    assert machine.queries == 0


@pytest.mark.parametrize("in_this_process", [False, True])
def test_gpus_are_those_that_torch_is_shown_with_their_own_memory(
    machine: Machine, in_this_process: bool
) -> None:
    """A MIG instance is one of them, with its part of the memory."""
    slice_ = VisibleGpu(
        name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", capability=(9, 0), memory_bytes=9 * GIB
    )
    machine.has(here(slice_, H100))
    found = find_devices(here=in_this_process)
    assert (found.accelerator, found.count) == ("cuda", 2)
    assert found.names == (slice_.name, H100.name)
    assert found.memory_bytes == (9 * GIB, 79 * GIB)
    assert found.bf16_native


def test_only_the_gpus_in_use_decide_about_bfloat16(machine: Machine) -> None:
    machine.has(here(H100, V100, architectures=CUDA_12_6))
    assert find_devices(used=1).bf16_native
    assert not find_devices(used=2).bf16_native


def test_only_the_gpus_in_use_decide_about_float8(machine: Machine) -> None:
    a100 = VisibleGpu(name="NVIDIA A100", capability=(8, 0), memory_bytes=39 * GIB)
    machine.has(here(L4, a100))
    assert find_devices(used=1).float8_native
    assert not find_devices(used=2).float8_native


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_a_user_who_hides_every_gpu_gets_the_cpu(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    machine.has(Cuda(torch="2.13.0", error="No CUDA GPUs are available"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert find_devices().accelerator == "cpu"


@pytest.mark.parametrize("shown", ["0", "3,1", "GPU-8a1f", "MIG-2c0e"])
def test_a_user_who_shows_some_gpus_gets_these(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    machine.has(here(L4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert find_devices().names == ("NVIDIA L4",)


# --- What torch cannot use ----------------------------------------------------------------------


@pytest.mark.parametrize("cuda", [CPU_BUILD, OLD_DRIVER], ids=["CPU build", "old driver"])
def test_a_gpu_that_torch_cannot_use_is_refused_with_its_reason_never_replaced_by_the_cpu(
    machine: Machine, cuda: Cuda
) -> None:
    machine.has(cuda, newest_cuda="12.4")
    message = machine.refusal()
    start = f"This machine has NVIDIA H100, but torch {cuda.torch} cannot use it: {cuda.error}"
    assert message.startswith(start)
    assert f"pip install torch==2.13.0+cu126 --index-url {WHEELS}/cu126" in message
    assert message.endswith("Or try --accelerator cpu.")
    assert find_devices(accelerator="cpu").accelerator == "cpu"


@pytest.mark.parametrize(
    ("newest_cuda", "advice"),
    [
        ("13.2", f"--index-url {WHEELS}/cu130"),
        ("12.0", f"--index-url {WHEELS}/cu126"),
        ("11.4", "Look at nvidia-smi"),
    ],
)
def test_the_advice_is_a_build_of_torch_for_the_driver(
    machine: Machine, newest_cuda: str, advice: str
) -> None:
    machine.has(CPU_BUILD, newest_cuda=newest_cuda)
    assert advice in machine.refusal()


def test_a_driver_that_does_not_answer_is_refused_too(machine: Machine) -> None:
    """As after its update without a restart: neither torch nor NVML can speak to it."""
    machine.has(Cuda(torch="2.13.0", error="CUDA unknown error"), nvml=())
    message = machine.refusal()
    assert says(message, "NVIDIA's driver ... torch 2.13.0")
    assert "CUDA unknown error" in message


def test_a_gpu_of_another_maker_under_windows_means_the_cpu(machine: Machine) -> None:
    machine.has(CPU_BUILD, files=("/dev/dxg",), nvml=())
    assert find_devices().accelerator == "cpu"
    machine.has(CPU_BUILD, files=("/dev/dxg",), nvml=("NVIDIA GeForce RTX 4090",))
    assert "has NVIDIA GeForce RTX 4090, but torch" in machine.refusal()


def test_requested_cuda_that_is_missing_is_refused(machine: Machine) -> None:
    machine.has(CPU_BUILD, files=(), nvml=())
    message = machine.refusal(accelerator="cuda")
    assert says(message, "accelerator is cuda ... torch 2.13.0+cpu")


# --- Kinds that are neither ----------------------------------------------------------------------

XPU = Current(
    torch="2.13.0+xpu", name="xpu", devices=("Intel Arc B580",), memory_bytes=(12 * GIB,), bf16=True
)


def test_another_kind_is_what_torch_calls_its_accelerator(machine: Machine) -> None:
    machine.patch.setattr(devices, "_current_once", lambda _: XPU)
    found = find_devices(accelerator="xpu")
    assert (found.accelerator, found.count, found.names) == ("xpu", 1, ("Intel Arc B580",))
    assert (found.memory_bytes, found.bf16_native) == ((12 * GIB,), True)
    assert machine.queries == 0


@pytest.mark.parametrize(
    ("current", "has", "others"),
    [
        (Current(torch="2.13.0+cpu"), "cpu", "cpu"),
        (dataclasses.replace(XPU, torch="2.13.0+cpu"), "cpu and xpu", "xpu or cpu"),
        (
            Current(torch="2.13.0+cpu", name="mps", error="the driver is too old"),
            "cpu ... driver is too old",
            "cpu",
        ),
    ],
)
def test_a_kind_that_this_torch_does_not_have_is_refused_with_those_that_it_has(
    machine: Machine, current: Current, has: str, others: str
) -> None:
    machine.patch.setattr(devices, "_current_once", lambda _: current)
    assert says(
        machine.refusal(accelerator="mps"),
        f"accelerator is mps ... torch 2.13.0+cpu ... only {has} ... --accelerator {others}",
    )


def test_a_kind_is_looked_for_by_the_installed_torch() -> None:
    """In this process, which computes itself; the name is a slip of the pen."""
    with pytest.raises(UserError, match=key_words("accelerator is gpu")):
        find_devices(accelerator="gpu", here=True)


def test_amds_gpus_are_cudas_to_a_torch_for_rocm(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    amd = VisibleGpu(name="AMD Instinct MI300X", capability=(9, 4), memory_bytes=192 * GIB)
    machine.has(here(amd, architectures=("gfx942",)), files=("/dev/kfd",), nvml=())
    assert find_devices().accelerator == "cpu"  # nothing was installed for it
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0+rocm7.2")
    found = find_devices()
    assert (found.accelerator, found.names, found.bf16_native) == ("cuda", (amd.name,), True)
    assert found.float8_native
    older = dataclasses.replace(amd, name="AMD Instinct MI250X", capability=(9, 0))
    machine.has(here(older, architectures=("gfx90a",)), files=("/dev/kfd",), nvml=())
    assert not find_devices().float8_native
    machine.has(Cuda(torch="2.13.0+rocm7.2", error="no device"), files=("/dev/kfd",), nvml=())
    assert says(
        machine.refusal(),
        "AMD's driver ... torch 2.13.0+rocm7.2 ... no device ... rocm-smi ... --accelerator cpu",
    )
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")
    assert find_devices().accelerator == "cpu"


# --- Kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_75", (7, 0), False),
        ("sm_120", (12, 0), True),
        ("sm_120", (12, 1), True),
        ("sm_100", (12, 0), False),
        ("compute_90", (12, 0), True),
        ("compute_90", (9, 0), True),
        ("compute_90", (8, 9), False),
        ("sm_90a", (9, 0), True),
        ("compute_90a", (10, 0), False),
        ("compute_100f", (10, 3), True),
        ("compute_100f", (12, 0), False),
        ("gfx942", (9, 4), False),
    ],
)
def test_machine_code_runs_within_its_major_version_and_ptx_on_what_is_newer(
    architecture: str, capability: tuple[int, int], runs: bool
) -> None:
    assert runs_on(architecture, capability) == runs


def test_a_card_without_kernels_is_named_with_the_build_that_has_them(machine: Machine) -> None:
    machine.has(here(V100))
    message = machine.refusal()
    assert says(message, "Tesla V100-SXM2-32GB ... 7.0 ... torch 2.13.0+cu130 ... sm_75 sm_80")
    assert says(message, f"torch==2.13.0+cu126 --index-url {WHEELS}/cu126")
    machine.has(here(V100, architectures=CUDA_12_6))
    assert find_devices().names == (V100.name,)


def test_a_card_newer_than_the_build_is_named_with_a_newer_build(machine: Machine) -> None:
    new = dataclasses.replace(H100, name="NVIDIA B200", capability=(10, 0))
    machine.has(here(new, architectures=CUDA_12_6))
    assert says(machine.refusal(), f"torch==2.13.0+cu130 --index-url {WHEELS}/cu130")


def test_a_card_that_no_build_knows_is_named(machine: Machine) -> None:
    machine.has(here(dataclasses.replace(V100, name="Tesla K80", capability=(3, 7))))
    assert says(machine.refusal(), "--accelerator cpu ... no build")


def test_a_card_that_is_not_used_needs_no_kernels(machine: Machine) -> None:
    machine.has(here(H100, V100))
    assert find_devices(used=1).count == 2
    assert "Tesla V100" in machine.refusal(used=2)


# --- Asking torch -------------------------------------------------------------------------------


def test_the_reason_comes_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver is too old.\n  Please update.")

    monkeypatch.setattr(torch.cuda, "init", init)
    found = devices.ask_torch()
    assert found.error == "The NVIDIA driver is too old. Please update."
    assert found.torch == torch.__version__


def test_the_properties_of_gpus_come_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = SimpleNamespace(name="NVIDIA L4", major=8, minor=9, total_memory=22 * GIB)
    for name, value in {
        "init": lambda: None,
        "device_count": lambda: 2,
        "get_device_properties": lambda _: shown,
        "get_arch_list": lambda: ["sm_80"],
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert devices.ask_torch() == Cuda(
        torch=torch.__version__, gpus=(L4, L4), architectures=("sm_80",)
    )


TORCH = """
from types import SimpleNamespace
from typing import Any
__version__ = "2.13.0+cu130"
def free(index):
    if index > 1:
        raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable")
    return (20 - index) * 2**30, 22 * 2**30
one = SimpleNamespace(name="NVIDIA L4", major=8, minor=9, total_memory=22 * 2**30)
cuda = SimpleNamespace(
    init=lambda: None,
    device_count=lambda: 2,
    get_device_properties=lambda _: one,
    get_arch_list=lambda: ["sm_80", "sm_90"],
    mem_get_info=free,
)
"""


@pytest.fixture
def torch_of_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The torch that children import."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    file = tmp_path / "torch.py"
    file.write_text(TORCH)
    devices._asked_once.cache_clear()
    yield file
    devices._asked_once.cache_clear()


def test_a_child_answers_for_cuda_so_that_this_process_holds_no_context(
    torch_of_children: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_here(*_: object) -> None:
        raise AssertionError("CUDA was queried in this process")

    for name in ("init", "is_available", "get_device_properties", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, not_here)
    assert devices.visible_gpus() == (L4, L4)
    assert devices._asked_once().architectures == ("sm_80", "sm_90")
    assert free_bytes(2) == [20 * GIB, 19 * GIB]
    with pytest.raises(UserError, match=key_words("free memory of the GPUs ... busy")):
        free_bytes(3)


def test_a_child_that_ends_without_an_answer_is_a_reason_too(torch_of_children: Path) -> None:
    torch_of_children.write_text("import os\nos._exit(7)")
    assert "ended with 7" in devices._asked_once().error
    with pytest.raises(UserError, match=key_words("no GPU ... ended with 7")):
        devices.visible_gpus()


@needs_card
@pytest.mark.slow
def test_on_cards_the_answer_is_cudas_and_nothing_of_them_is_taken_here() -> None:
    """CUDA's order and share of the cards, and no context in this process."""
    made = cards("h100", "l4", "v100", "h100-mig-1g.10gb")

    def body(shown: str) -> list[object]:
        import os

        from simulated_card.counts import contexts

        from ftkit.errors import UserError
        from ftkit.recipe.devices import find_devices, free_bytes

        os.environ["CUDA_VISIBLE_DEVICES"] = shown
        try:
            found = find_devices()
        except UserError as error:
            return [str(error).partition(",")[0]]
        free = free_bytes(found.count)
        return [list(found.names), list(found.memory_bytes), free, contexts()]

    h100, l4, mig = (int(gib * GIB) for gib in (79.1, 22.0, 9.75))
    with process_with(with_cards(command_environment(), made)) as process:
        names = ["NVIDIA L4", "NVIDIA H100 80GB HBM3"]
        assert process.run(body, "1,0") == [names, [l4, h100], [l4, h100], []]
        slice_name = ["NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
        assert process.run(body, made.uuid(3)) == [slice_name, [mig], [mig], []]
        assert process.run(body, "2") == ["Tesla V100-SXM2-32GB has compute capability 7.0"]
