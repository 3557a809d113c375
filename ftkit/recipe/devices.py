"""Devices of this machine, and whether the installed torch can use them.

CUDA (which includes AMD's GPUs in torch) is queried in detail: driver, builds of torch, MIG, hidden
GPUs. Every other kind of device is queried through torch.accelerator.
"""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from ftkit.errors import UserError
from ftkit.recipe.recipe import AcceleratorKey, Recipe
from ftkit.utils.accelerators.backends import (
    backend_environment,
    is_installed,
    keep_out_backends,
    load_backend,
    missing_text,
    unknown_text,
)
from ftkit.utils.accelerators.kinds import (
    DEVICE_KINDS,
    HOST_KIND,
    USUAL_KIND,
    DeviceKind,
    device_kind,
)
from ftkit.utils.hardware import hardware, multiplies_bf16
from ftkit.utils.imports import quick_imports
from ftkit.utils.process import begin_as_child, own_program

Capability = tuple[int, int]
"""Compute capability of a GPU, major and minor."""

WHEELS = "https://download.pytorch.org/whl"
"""Index of torch's builds, by version of CUDA: WHEELS/cu126, ..."""
OLD_BUILD, NEW_BUILD = "cu126", "cu130"
"""CUDA 12.6: for drivers 525 and later, and the last build for GPUs of before Turing. CUDA 13.0:
for drivers 580 and later, with Blackwell."""
TURING: Capability = (7, 5)
MAXWELL: Capability = (5, 0)
AMPERE: Capability = (8, 0)
ADA: Capability = (8, 9)
CDNA3: Capability = (9, 4)
"""What torch for ROCm says of AMD's Instinct MI300."""
_BETWEEN_LOOKS_S = 0.2
"""Time between two looks at a child whose time is limited."""


@dataclass(frozen=True, kw_only=True)
class VisibleGpu:
    """A GPU as CUDA shows it to this process: a whole one, or a MIG instance."""

    name: str
    capability: Capability
    memory_bytes: int
    """Memory that programs can use."""


@dataclass(frozen=True, kw_only=True)
class Cuda:
    """CUDA on this machine, as the installed torch reports it."""

    torch: str
    """Its version."""
    gpus: tuple[VisibleGpu, ...] = ()
    """GPUs that CUDA_VISIBLE_DEVICES shows, in CUDA's order."""
    architectures: tuple[str, ...] = ()
    """Targets of its kernels: sm_90 is machine code, compute_90 is compiled by the driver."""
    error: str = ""
    """Why it cannot use any GPU; empty: it can."""


@dataclass(frozen=True, kw_only=True)
class Current:
    """The accelerator of this machine, as torch.accelerator reports it."""

    torch: str
    """Its version."""
    name: str | None = None
    """Kind of device; None: this torch has none but the CPU, or cannot use it here."""
    devices: tuple[str, ...] = ()
    """Name of each."""
    memory_bytes: tuple[int, ...] = ()
    """Memory of each; empty: unknown to torch."""
    bf16: bool = False
    """Whether products of bfloat16 can be computed."""
    error: str = ""
    """Error of the query."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices of one machine."""

    accelerator: str
    """Kind of device, as torch calls it."""
    count: int
    """Visible devices of that kind, or the CPU's logical cores."""
    names: tuple[str, ...] = ()
    """Product name of each device, but of CPUs."""
    memory_bytes: tuple[int, ...] = ()
    """Memory of each that programs can use; empty: unknown."""
    bf16_native: bool = True
    """Whether bfloat16 runs in hardware (CUDA compute capability 8.0 and later; CPUs with
    instructions for it, and other kinds that compute it at all)."""
    float8_native: bool = True
    """Whether float8 runs in hardware (see `has_float8`; CPUs count, which emulate it)."""
    notice: str = ""
    """What the user is to know of how they were found."""


def find_devices(
    accelerator: AcceleratorKey = "auto",
    used: int | Literal["auto"] = "auto",
    *,
    here: bool = False,
    on_asking: Callable[[], None] = lambda: None,
) -> Devices:
    """Devices of this machine for the accelerator of a recipe.

    Args:
        accelerator: key of the recipe.
        used: its key `devices`; GPUs beyond these may be of a kind that torch cannot use.
        here: query torch in this process, which will train. Others query in a child.
        on_asking: called before a child is started, which takes seconds.

    Raises:
        UserError: the installed torch cannot use a GPU, has no kernels for it, or has no device of
            this kind.
    """
    if accelerator not in ("auto", "cpu", "cuda"):
        kind = device_kind(accelerator)
        if kind.package is not None:
            return _of_a_package(kind, here=here, on_asking=on_asking)
        if not here:
            on_asking()
        return _of_another_kind(accelerator, _current() if here else _current_once(accelerator))
    cpu = Devices(accelerator="cpu", count=os.cpu_count() or 1, bf16_native=multiplies_bf16())
    # Device files of NVIDIA's driver and of WSL: they tell of a GPU without importing torch.
    native, windows = (Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg"))
    native = native or (is_for_rocm() and Path("/dev/kfd").exists())
    is_required = accelerator == "cuda"
    if accelerator == "cpu":
        return cpu
    # Hidden GPUs are not there for this process; only accelerator cuda insists on one.
    if not is_required and (gpus_are_hidden() or not (native or windows)):
        return _of_packages(cpu, here=here, on_asking=on_asking)
    if not here:
        on_asking()
    cuda = ask_torch() if here else _asked_once()
    if cuda.error:
        # Windows has /dev/dxg for GPUs of every maker.
        if not (is_required or native or hardware().gpus):
            return _of_packages(cpu, here=here, on_asking=on_asking)
        raise UserError(_unusable(cuda, is_required=is_required))
    count = len(cuda.gpus)
    # Kernels are only needed on those that the run takes: an old card beside them does no harm.
    taken = cuda.gpus[: used if isinstance(used, int) else count]
    for gpu in taken:
        require_kernels(gpu, cuda)
    return Devices(
        accelerator="cuda",
        count=count,
        names=tuple(gpu.name for gpu in cuda.gpus),
        memory_bytes=tuple(gpu.memory_bytes for gpu in cuda.gpus),
        bf16_native=all(gpu.capability >= AMPERE for gpu in taken),
        float8_native=all(has_float8(gpu.capability) for gpu in taken),
    )


def ranks_of(recipe: Recipe, devices: Devices) -> tuple[int, int]:
    """Return the number of ranks of a run on this machine, and that of machines.

    Raises:
        UserError: there are fewer devices.
    """
    count = devices.count if recipe.devices == "auto" else recipe.devices
    # One process on CPUs: torch uses all of their cores in it.
    if recipe.devices == "auto" and devices.accelerator == HOST_KIND:
        count = 1
    if devices.accelerator != HOST_KIND and count > devices.count:
        noun = device_kind(devices.accelerator).noun
        raise UserError(
            f"devices is {count}, but this machine shows {devices.count} {noun}(s). "
            f"Try --devices {devices.count} or --accelerator cpu."
        )
    return count, 1 if recipe.num_nodes == "auto" else recipe.num_nodes


def has_float8(capability: Capability) -> bool:
    """Return whether a GPU multiplies float8: Ada, Hopper, MI300 and later."""
    return capability >= (CDNA3 if is_for_rocm() else ADA)


def visible_gpus() -> tuple[VisibleGpu, ...]:
    """GPUs that programs see on this machine.

    Raises:
        UserError: torch sees none.
    """
    cuda = _asked_once()
    if cuda.error:
        raise UserError(f"torch {cuda.torch} sees no GPU on this machine: {cuda.error}")
    return cuda.gpus


def free_bytes(count: int, accelerator: str = USUAL_KIND) -> list[int]:
    """Free memory of the first `count` visible devices, in bytes.

    The context of the querying child is subtracted, which stands for that of a rank.

    Raises:
        UserError: it is unknown to torch.
    """
    answer = _child("free", str(count), accelerator)
    if "error" in answer:
        noun = device_kind(accelerator).noun
        raise UserError(f"The free memory of the {noun}s is not known: {answer['error']}")
    return [int(number) for number in answer["free_bytes"]]


def is_for_rocm() -> bool:
    """Return whether torch is a build for AMD's GPUs, by its version: 2.13.0+rocm7.2."""
    return "+rocm" in metadata.version("torch")


def gpus_are_hidden() -> bool:
    """Return whether a variable hides every GPU: CUDA_VISIBLE_DEVICES of "", -1, NoDevFiles, ..."""
    names = ["CUDA_VISIBLE_DEVICES"]
    names += ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"] if is_for_rocm() else []
    return any(
        # CUDA ignores all entries from the first invalid one on, so the first one decides.
        name in os.environ and re.match(r"\s*\+?\d|GPU-|MIG-", os.environ[name]) is None
        for name in names
    )


def require_kernels(gpu: VisibleGpu, cuda: Cuda) -> None:
    """Refuse a GPU that the installed torch was not compiled for.

    Raises:
        UserError: names the build that was.
    """
    known = [a for a in cuda.architectures if re.match(r"(sm|compute)_\d", a)]
    if not known or any(runs_on(architecture, gpu.capability) for architecture in known):
        return
    major, minor = gpu.capability
    advice = "Try --accelerator cpu: no build of torch has any."
    if gpu.capability >= MAXWELL:
        build = OLD_BUILD if gpu.capability < TURING else NEW_BUILD
        advice = f"{_install(cuda.torch, build)} has them. Or try --accelerator cpu."
    raise UserError(
        f"{gpu.name} has compute capability {major}.{minor}, for which torch {cuda.torch} has no "
        f"kernels ({' '.join(known)}). {advice}"
    )


def runs_on(architecture: str, capability: Capability) -> bool:
    """Return whether code compiled for an architecture runs on a GPU.

    sm_86 is machine code, for its major version from its minor version on; compute_86 is compiled
    by the driver for whatever is newer. With an "a" behind it, code is for this very version; with
    an "f", for its family, which is within its major version. (CUDA C++ Programming Guide,
    "Binary compatibility" and "PTX compatibility"; nvcc, "GPU feature list".)
    """
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if found is None:
        return False
    made_for = int(found[2]), int(found[3])
    if found[4] == "a":
        return capability == made_for
    if found[1] == "sm" or found[4] == "f":
        return capability[0] == made_for[0] and capability >= made_for
    return capability >= made_for


def _install(version: str, build: str) -> str:
    base = version.partition("+")[0]
    return f"pip install torch=={base}+{build} --index-url {WHEELS}/{build}"


def _unusable(cuda: Cuda, *, is_required: bool) -> str:
    """The error message for GPUs that torch cannot use."""
    found = hardware()
    # Several cards of a kind are named once.
    names = ", ".join(dict.fromkeys(gpu.name for gpu in found.gpus))
    if names:
        start = f"This machine has {names}, but torch {cuda.torch} cannot use it"
    elif is_required:
        start = f"accelerator is cuda, but torch {cuda.torch} sees no GPU"
    else:
        maker = "AMD" if is_for_rocm() else "NVIDIA"
        start = f"This machine has {maker}'s driver, but torch {cuda.torch} cannot use a GPU"
    tool = "rocm-smi" if is_for_rocm() else "nvidia-smi"
    advice = f"Look at {tool}, or try --accelerator cpu."
    build = _build_for_driver(found.cuda)
    if build and re.search("not compiled with CUDA|driver.* too old", cuda.error):
        advice = f"{_install(cuda.torch, build)} is for this driver. Or try --accelerator cpu."
    return f"{start}: {cuda.error}\n{advice}"


def _of_another_kind(accelerator: str, current: Current) -> Devices:
    """Devices of a kind that is neither the CPU nor CUDA."""
    if current.name != accelerator or not current.devices:
        has = "cpu" if current.name in (None, accelerator) else f"cpu and {current.name}"
        why = f": {current.error}" if current.error else ""
        other = "cpu" if current.name in (None, accelerator) else f"{current.name} or cpu"
        raise UserError(
            f"accelerator is {accelerator}, but torch {current.torch} has no such device on this "
            f"machine, only {has}{why}. Install a build of torch for it, or try --accelerator "
            f"{other}."
        )
    return Devices(
        accelerator=accelerator,
        count=len(current.devices),
        names=current.devices,
        memory_bytes=current.memory_bytes,
        bf16_native=current.bf16,
    )


def _of_a_package(kind: DeviceKind, *, here: bool, on_asking: Callable[[], None]) -> Devices:
    """Devices of a kind that a package brings.

    A child asks also where this process will use them: it alone can be given up.

    Raises:
        UserError: there is none.
    """
    if not is_installed(kind):
        raise UserError(missing_text(kind, ""))
    on_asking()
    current = _current_once(kind.name)
    if not current.devices:
        raise UserError(missing_text(kind, current.error))
    if here:
        load_backend(kind.name)
    return _of_another_kind(kind.name, current)


def _of_packages(cpu: Devices, *, here: bool, on_asking: Callable[[], None]) -> Devices:
    """Devices of the first kind that an installed package brings; the CPU if there are none."""
    for kind in DEVICE_KINDS:
        if kind.package is not None and is_installed(kind):
            on_asking()
            current = _current_once(kind.name)
            if current.devices:
                return _of_a_package(kind, here=here, on_asking=lambda: None)
            if current.error:
                cpu = dataclasses.replace(cpu, notice=unknown_text(kind, current.error))
    return cpu


def _build_for_driver(newest_cuda: str | None) -> str | None:
    """The build of torch for a driver with this version of CUDA; None: there is none."""
    # Builds of a major version run on every driver of this version (CUDA's minor version
    # compatibility).
    major = int((newest_cuda or "0").partition(".")[0])
    if major < 12:
        return None
    return OLD_BUILD if major == 12 else NEW_BUILD


def ask_torch() -> Cuda:
    """Query CUDA in this process."""
    import torch

    version = str(torch.__version__)
    try:
        # init raises the reason; is_available would only say no.
        torch.cuda.init()
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except Exception as error:  # AssertionError, RuntimeError, and what a broken driver may bring
        return Cuda(torch=version, error=" ".join(str(error).split()) or type(error).__name__)
    return Cuda(
        torch=version,
        gpus=tuple(
            VisibleGpu(name=p.name, capability=(p.major, p.minor), memory_bytes=p.total_memory)
            for p in found
        ),
        architectures=tuple(torch.cuda.get_arch_list()),
    )


def _current() -> Current:
    """Query torch.accelerator in this process."""
    import torch

    version = str(torch.__version__)
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return Current(torch=version)
    try:
        module: Any = torch.get_device_module(kind)
        devices = [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())]
        name = getattr(module, "get_device_name", lambda device: kind.type)
        names = tuple(str(name(device)) for device in devices)
        # Not tried where all can: it would start a chip that the run starts again.
        bf16 = bool(devices) and (
            device_kind(kind.type).computes_bf16 or _computes_bf16(devices[0])
        )
    except Exception as error:  # a broken driver may bring any
        return Current(torch=version, name=kind.type, error=" ".join(str(error).split()))
    try:
        sizes = tuple(int(module.get_device_properties(d).total_memory) for d in devices)
    except Exception:  # not every kind of device reports it
        sizes = ()
    return Current(torch=version, name=kind.type, devices=names, memory_bytes=sizes, bf16=bf16)


def _computes_bf16(device: Any) -> bool:
    import torch

    try:
        # Tried, because kinds of devices have no common query for it. .item() waits for the result.
        ones = torch.ones(2, 2, dtype=torch.bfloat16, device=device)
        return bool((ones @ ones).sum().item() == 8)
    except (RuntimeError, TypeError):
        return False


@functools.cache
def _current_once(name: str) -> Current:
    """Query torch.accelerator in a child for a kind of device, once."""
    # Defaults for a child that failed and only answers with an error.
    answer: dict[str, Any] = {"torch": metadata.version("torch"), "devices": ()}
    answer |= {"memory_bytes": ()} | _child("current", kind=device_kind(name))
    lists = {key: tuple(answer[key]) for key in ("devices", "memory_bytes")}
    return Current(**answer | lists)


@functools.cache
def _asked_once() -> Cuda:
    """Query CUDA in a child, once: it takes seconds, and a sweep needs it for every run."""
    answer = {"torch": metadata.version("torch"), "gpus": (), "architectures": ()} | _child("gpus")
    gpus = tuple(
        VisibleGpu(**gpu | {"capability": tuple(gpu["capability"])}) for gpu in answer["gpus"]
    )
    return Cuda(**answer | {"gpus": gpus, "architectures": tuple(answer["architectures"])})


def _child(*words: str, kind: DeviceKind | None = None) -> dict[str, Any]:
    """Run this module as a program; returns its answer, or its last line as `error`.

    One that takes longer than a kind of device may take is killed.
    """
    kind = kind or device_kind(USUAL_KIND)
    # A process that queries CUDA keeps a context: half a gigabyte on each GPU, and no other process
    # can use the GPU in exclusive-process mode. A child takes its contexts with it.
    asked = subprocess.Popen(
        [*own_program("ftkit.recipe.devices"), *words],
        env=os.environ | backend_environment(kind),
        # Standard input may hold the recipe, which the child must not read.
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        written = _written(asked, kind.answers_within_s)
    finally:
        asked.kill()
    if written is None:
        return {"error": f"did not answer within {kind.answers_within_s:g} s"}
    output, errors = written
    if asked.returncode == 0:
        # The last line: libraries may print before it.
        answer: dict[str, Any] = json.loads(output.splitlines()[-1])
        return answer
    lines = errors.strip().splitlines()
    return {"error": lines[-1] if lines else f"asking it ended with {asked.returncode}"}


def _written(child: subprocess.Popen[str], within_s: float | None) -> tuple[str, str] | None:
    """What a child writes until it ends; None: that takes longer than `within_s` seconds.

    The time that it waits for a processor does not count: a busy machine delays every answer.
    """
    began = time.monotonic()
    while True:
        try:
            return child.communicate(timeout=within_s and _BETWEEN_LOOKS_S)
        except subprocess.TimeoutExpired:
            assert within_s is not None
            if time.monotonic() - began - _starved_s(child.pid) > within_s:
                child.kill()
                child.communicate()
                return None


def _starved_s(pid: int) -> float:
    """Seconds that a process has waited for a processor (Linux' scheduler statistics)."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _answer(words: Sequence[str]) -> dict[str, Any]:
    with quick_imports():
        import torch
    if words[0] == "gpus":
        return dataclasses.asdict(ask_torch())
    if words[0] == "current":
        return dataclasses.asdict(_current())
    free = torch.cuda.mem_get_info if words[2] == "cuda" else torch.accelerator.get_memory_info
    return {"free_bytes": [free(i)[0] for i in range(int(words[1]))]}


if __name__ == "__main__":
    begin_as_child()
    keep_out_backends()  # but for one that is asked
    print(json.dumps(_answer(sys.argv[1:])))
