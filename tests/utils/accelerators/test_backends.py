"""Backends out of torch's tree: asked for their devices in a child, and kept out of all else.

The package torch_tpu of these tests is a stand-in: what it does is what was seen of TorchTPU 0.2.0.
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from command import ROOT
from messages import message_of, says
from rich.console import Console

from ftkit.launch.ranks import rank_environment
from ftkit.planning.gpus import CONTEXT_BYTES, WORKSPACE_BYTES, find_gpu
from ftkit.planning.predict import Planned, plan_files
from ftkit.planning.table import plan_table
from ftkit.recipe import devices
from ftkit.recipe.devices import Devices, find_devices
from ftkit.recipe.plan import make_plan
from ftkit.recipe.recipe import Component, LoraRecipe, Recipe
from ftkit.runs.report.meters import ThroughputMeter
from ftkit.strategies.strategy import set_arithmetic
from ftkit.training.step import StepClock
from ftkit.utils.accelerators import backends
from ftkit.utils.accelerators.backends import AUTOLOAD
from ftkit.utils.accelerators.kinds import DEVICE_KINDS
from ftkit.utils.accelerators.use import compilations, free_cached_memory

PAGED = "bitsandbytes.optim.PagedAdamW8bit"
ONE_CHIP = Devices(accelerator="tpu", count=1, names=("TPU v5e",), memory_bytes=(16 * 2**30,))

TORCH = """
import os
from types import SimpleNamespace
__version__ = "2.13.0"
count = CHIPS if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "1" else 0
accelerator = SimpleNamespace(
    current_accelerator=lambda: SimpleNamespace(type="tpu") if count else None,
    device_count=lambda: count,
)
device = lambda kind, index: f"{kind}:{index}"
get_device_module = lambda kind: SimpleNamespace(
    get_device_name=lambda device: "TPU v5e",
    get_device_properties=lambda device: SimpleNamespace(total_memory=16 * 2**30),
)
"""
"""What a child sees of a torch whose backend is imported with it; no part of it starts a chip."""


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(AUTOLOAD, raising=False)
    devices._current_once.cache_clear()
    yield
    os.environ.pop(AUTOLOAD, None)
    devices._current_once.cache_clear()


def install(place: Path, package: str, code: str = "load = lambda: None\n") -> None:
    """A package that torch imports as a backend."""
    (place / f"{package}.py").write_text(code)
    listing = place / f"{package}-0.2.0.dist-info"
    listing.mkdir()
    (listing / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.2.0\n")
    (listing / "entry_points.txt").write_text(f"[torch.backends]\n{package} = {package}:load\n")


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A directory of packages that this process and its children find, with torch_tpu."""
    install(tmp_path, "torch_tpu")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    yield tmp_path
    sys.modules.pop("torch_tpu", None)  # if a test has imported it here


def chips(site: Path, count: int) -> None:
    (site / "torch.py").write_text(TORCH.replace("CHIPS", str(count)))


def hang(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "torch.py").write_text("import time\ntime.sleep(600)\n")
    hasty = dataclasses.replace(DEVICE_KINDS._core["tpu"], answers_within_s=0.3)
    monkeypatch.setitem(DEVICE_KINDS._core, "tpu", hasty)


# --- Where torch may import it -------------------------------------------------------------------


def test_torch_imports_no_backend_where_only_torch_tpu_is_installed(site: Path) -> None:
    with backends.backends_kept_out():
        assert os.environ[AUTOLOAD] == "0"
    assert AUTOLOAD not in os.environ
    backends.keep_out_backends()
    assert os.environ[AUTOLOAD] == "0"


def test_torch_does_as_ever_where_it_is_not_installed() -> None:
    backends.keep_out_backends()
    assert AUTOLOAD not in os.environ


def test_another_backend_is_not_switched_off_with_it(site: Path) -> None:
    install(site, "torch_other")
    backends.keep_out_backends()
    assert AUTOLOAD not in os.environ


@pytest.mark.parametrize("given", ["0", "1"])
def test_a_variable_that_is_set_is_the_users(
    site: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv(AUTOLOAD, given)
    backends.keep_out_backends()
    assert os.environ[AUTOLOAD] == given


def test_only_ranks_on_a_tpu_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTOLOAD, "0")  # of the process that starts them
    recipe = Recipe(checkpoint_dir="model", precision="32-true")
    for found, expected in ((ONE_CHIP, "1"), (Devices(accelerator="cpu", count=8), "0")):
        assert rank_environment(make_plan(recipe, found), None, {})[AUTOLOAD] == expected


@pytest.mark.slow
def test_a_child_without_a_tpu_has_the_real_torch_import_no_backend(site: Path) -> None:
    """The variable is set before torch is imported; beside it, torch does import the backend."""
    mark = site / "mark"
    code = f"load = lambda: open({str(mark)!r}, 'w').close()\n"
    (site / "torch_tpu.py").write_text(code)
    for words, expected in (
        (["-c", "import torch"], True),
        (["-m", "ftkit.recipe.devices", str(os.getpid()), "current"], False),
    ):
        mark.unlink(missing_ok=True)
        subprocess.run([sys.executable, "-P", *words], check=True, capture_output=True)
        assert mark.exists() is expected


def test_where_torch_came_first_a_plan_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: its backward pass would wait for a chip for minutes."""
    backends.refuse_idle_backend()
    monkeypatch.setitem(sys.modules, "torch_tpu", ModuleType("torch_tpu"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert says(message_of(backends.refuse_idle_backend), f"torch_tpu ... no TPU ... {AUTOLOAD}=0")
    tpu = SimpleNamespace(type="tpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: tpu)
    backends.refuse_idle_backend()


# --- Whether there is a TPU ----------------------------------------------------------------------


@pytest.mark.parametrize("accelerator", ["tpu", "auto"])
def test_a_tpu_is_found_by_asking_torch_tpu_in_a_child(
    site: Path, monkeypatch: pytest.MonkeyPatch, accelerator: str
) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)  # no file of a driver of GPUs
    monkeypatch.setenv(AUTOLOAD, "0")
    chips(site, 1)
    assert find_devices(accelerator) == ONE_CHIP


@pytest.mark.parametrize("hangs", [False, True])
def test_without_a_tpu_auto_is_the_cpu_and_says_so_if_the_query_was_given_up(
    site: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)
    chips(site, 0)
    if hangs:
        hang(site, monkeypatch)
    found = find_devices("auto")
    assert found.accelerator == "cpu"
    plan = make_plan(Recipe(checkpoint_dir="model", precision="32-true"), found)
    said = "torch_tpu 0.2.0 ... within 0.3 s ... CPU ... --accelerator tpu"
    assert [says(notice, said) for notice in plan.notices] == [True] * hangs


def test_cpu_is_never_asked_about(site: Path) -> None:
    (site / "torch.py").write_text("raise AssertionError\n")

    def asked() -> None:
        raise AssertionError("torch was asked")

    assert find_devices("cpu", on_asking=asked).accelerator == "cpu"


def test_a_tpu_that_is_not_there_is_refused_with_what_was_asked(site: Path) -> None:
    chips(site, 0)
    asked = "torch_tpu 0.2.0 ... torch.accelerator.device_count() ... none ... --accelerator cpu"
    assert says(message_of(find_devices, "tpu"), f"accelerator is tpu ... {asked}")


def test_a_query_that_hangs_is_given_up(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (DEVICE_KINDS._core["tpu"].answers_within_s or 60) < 15
    hang(site, monkeypatch)
    asked = "torch.accelerator.device_count() ... within 0.3 s ... --accelerator cpu"
    assert says(message_of(find_devices, "tpu"), f"accelerator is tpu ... {asked}")


def test_without_the_package_the_refusal_names_the_extra() -> None:
    message = message_of(find_devices, "tpu")
    assert says(message, "torch_tpu is not installed ... ftkit[tpu] ... --accelerator cpu")


# --- How it is used ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"devices": "auto"}, "devices is 4 ... accelerator is tpu ... one TPU ... --devices 1"),
        ({"devices": 1, "num_nodes": 2}, "num_nodes is 2 ... accelerator is tpu ... --num_nodes 1"),
    ],
)
def test_several_chips_are_refused(keys: dict[str, int | str], said: str) -> None:
    recipe = Recipe(checkpoint_dir="model", precision="32-true", **keys)
    assert says(message_of(make_plan, recipe, dataclasses.replace(ONE_CHIP, count=4)), said)


def test_one_of_several_chips_is_used_and_the_plan_says_what_was_rehearsed() -> None:
    recipe = Recipe(checkpoint_dir="model", precision="32-true")
    plan = make_plan(recipe, dataclasses.replace(ONE_CHIP, count=4))
    assert (plan.devices, plan.strategy) == (1, "single")
    rehearsed, predicted = plan.notices
    assert says(rehearsed, "rehearsed ... no TPU has run it yet")
    assert says(predicted, "Memory of a TPU ... without ... layouts")


def test_a_backend_that_cannot_start_is_refused_with_its_reason(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def launch(*, nproc_per_node: int) -> None:
        started.append(nproc_per_node)
        if len(started) > 1:
            raise RuntimeError("No TPU topology found for count: 1")

    module = SimpleNamespace(distributed=SimpleNamespace(set_tpu_launch_env=launch))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    backends.load_backend("cpu")
    assert started == []
    backends.load_backend("tpu")
    assert (started, os.environ[AUTOLOAD]) == ([1], "1")
    message = message_of(backends.load_backend, "tpu")
    assert says(
        message, "accelerator is tpu ... torch_tpu 0.2.0 ... count: 1 ... --accelerator cpu"
    )


# --- What it computes ----------------------------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"precision": "16-mixed"}, "precision is 16-mixed ... tpu ... --precision bf16-mixed"),
        (
            {"optimizer": Component(class_path=PAGED, init_args={})},
            f"optimizer is {PAGED} ... tpu ... bitsandbytes ... --optimizer AdamW",
        ),
        (
            {"optimizer": Component(class_path="torchao.optim.AdamW4bit", init_args={})},
            "optimizer is torchao.optim.AdamW4bit ... tpu ... --optimizer AdamW",
        ),
        (
            {"quantize": "bnb.nf4"},
            "quantize is bnb.nf4 ... tpu ... bitsandbytes ... --quantize null",
        ),
    ],
)
def test_what_a_tpu_cannot_compute_is_refused_by_name(keys: dict[str, Any], said: str) -> None:
    recipe = LoraRecipe(**{"checkpoint_dir": "model", "precision": "32-true"} | keys)
    assert says(message_of(make_plan, recipe, ONE_CHIP), said)


@pytest.mark.parametrize(
    ("found", "keys", "expected"),
    [
        (ONE_CHIP, {"precision": "32-true"}, "highest"),
        (ONE_CHIP, {"precision": "bf16-true"}, "high"),
        (ONE_CHIP, {"precision": "bf16-true", "deterministic": True}, "highest"),
        (Devices(accelerator="cuda", count=1), {"precision": "32-true"}, "high"),
    ],
)
def test_float32_is_not_rounded_to_bfloat16_in_products(
    monkeypatch: pytest.MonkeyPatch, found: Devices, keys: dict[str, Any], expected: str
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # restored, as what follows
    asked: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda _: None)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    set_arithmetic(make_plan(Recipe(checkpoint_dir="model", **keys), found))
    assert asked == [expected]


def test_cached_memory_is_freed_where_its_module_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.tpu has no empty_cache of its own."""
    freed: list[str] = []
    tpu = SimpleNamespace(type="tpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: tpu)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: freed.append("tpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    free_cached_memory()
    assert freed == ["tpu"]


# --- What is measured of it ----------------------------------------------------------------------


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The host as a kind that computes late; what it has compiled can be set."""
    misses = [0]
    facts = DEVICE_KINDS._core["tpu"]
    row = dataclasses.replace(DEVICE_KINDS._core["cpu"], computes_late=facts.computes_late)
    monkeypatch.setitem(DEVICE_KINDS._core, "cpu", row)
    module = SimpleNamespace(_get_cache_misses=lambda: misses[0])
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return misses


def test_parts_of_a_step_are_not_told_where_nothing_is_computed_before_its_end(
    late: list[int],
) -> None:
    clock = StepClock(torch.device("cpu"))
    clock.mark("forward")
    assert clock.take() == {}
    meter = ThroughputMeter()
    meter.add(duration_s=2.0, tokens=10, samples=1, parts_s={})
    times = meter.step_times()
    assert (times.total, times.forward, times.other) == (2.0, None, None)


def test_programs_that_a_device_compiles_are_counted(late: list[int]) -> None:
    late[0] = 60
    assert compilations(torch.device("cpu")) == 60


@pytest.mark.slow
def test_memory_of_a_tpu_is_predicted_without_what_cuda_takes() -> None:
    """The same tensors as on a GPU, and none of its libraries."""

    def planned(gpu: str) -> Planned:
        keys = [("checkpoint_dir", "random:pythia-14m"), ("train.max_seq_length", "64")]
        more = [("precision", "bf16-true"), ("train.padding_free", "false")]
        more.append(("train.micro_batch_size", "1"))
        return plan_files((), [*keys, *more], gpu=find_gpu(gpu))

    tpu, gpu = planned("v5e"), planned("l4")
    assert (tpu.plan.accelerator, gpu.plan.accelerator) == ("tpu", "cuda")
    # But for CUDA's blocks of 512 bytes.
    difference = gpu.memory.peak_bytes - tpu.memory.peak_bytes
    assert difference == pytest.approx(WORKSPACE_BYTES, rel=0.01)
    assert gpu.memory.high_bytes - tpu.memory.high_bytes > CONTEXT_BYTES
    with (console := Console(width=200)).capture() as of_tpu:
        console.print(plan_table(tpu))
    with console.capture() as of_gpu:
        console.print(plan_table(gpu))
    assert says(of_tpu.get(), "not counted ... layouts") and "not counted" not in of_gpu.get()
