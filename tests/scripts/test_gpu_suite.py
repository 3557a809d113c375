"""scripts/gpu_suite: its parts, what is run again, and that all of it runs."""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
from command import ROOT, command_environment
from runs import TIMEOUT_S, wait_for

SUITE = ROOT / "scripts" / "gpu_suite"
ONE_OF_EACH_KIND = [
    "tests", "quick_start_nf4", "speed_full", "speed_qlora", "memory_0", "kernels", "saves",
    "paged",
    "peer: ftkit, full", "peer: litgpt, full", "lever: padding_free, full",
    "fullest: micro_batch_tokens", "scaling_length", "strategies", "shared_sequences",
    "recorded_ddp", "dead_rank",
]  # fmt: skip


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(SUITE.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = spec_from_loader("gpu_suite", SourceFileLoader("gpu_suite", str(SUITE)))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in list(sys.modules):
        if name.partition(".")[0] in ("benchmarking", "gpu_parts"):
            del sys.modules[name]


@pytest.fixture
def arguments(tmp_path: Path) -> Namespace:
    out = tmp_path / "out"
    out.mkdir()
    return Namespace(out=out, archive=tmp_path / "archive.tar.gz", dry_run=True)


def result(outcome: str, *passed: bool | None) -> dict[str, Any]:
    checks = [{"name": f"check {n}", "passed": p, "said": "so"} for n, p in enumerate(passed)]
    return {"outcome": outcome, "checks": checks, "figures": {}, "seconds": 3}


def test_parts_have_names_of_their_own_and_end_within_two_minutes(suite: ModuleType) -> None:
    names = [suite.file_name(part.name) for part in suite.PARTS]
    assert len(set(names)) == len(names)
    assert all(0 < part.usual_s <= 120 for part in suite.PARTS)


def test_the_document_on_performance_names_every_part(suite: ModuleType) -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    rows = text.partition("| Part | Shows |")[2].partition("\n\n")[0].splitlines()[1:]
    named = {name for row in rows for name in re.findall(r"`([\w:]+)`", row.split("|")[1])}
    kinds = {
        re.match(r"\w+:|memory_|speed_|quick_start_|scaling_|\w+", p.name) for p in suite.PARTS
    }
    assert named == {kind[0].rstrip("_") for kind in kinds if kind}


def test_every_recipe_of_the_calibration_and_every_lever_is_a_part(suite: ModuleType) -> None:
    names = [part.name for part in suite.PARTS]
    source = (ROOT / "scripts" / "calibrate_memory").read_text()
    recipes = source.partition("RECIPES")[2].partition("\n]\n")[0].count('\n    ("')
    assert {f"memory_{number}" for number in range(recipes)} <= set(names)
    of_one_device = [one for one in suite.LEVERS if "devices" not in one.on]
    expected = {f"lever: {one.name}, {method}" for one in of_one_device for method in one.methods}
    first = {f"lever: {name}, {method}" for name, method in suite.FIRST_LEVERS}
    assert first <= expected
    expected |= {f"{name}, pair {pair}" for name in first for pair in (2, 3)}
    assert {name for name in names if name.startswith("lever")} == expected


def test_every_speed_is_a_part(suite: ModuleType) -> None:
    names = {part.name for part in suite.PARTS if part.name.startswith("speed")}
    assert names == {f"speed_{name}" for name in suite.measuring.SPEEDS}
    tokens = {
        name: sequences * suite.measuring.LENGTH
        for name, (_, sequences, _) in suite.measuring.SPEEDS.items()
    }
    assert {tokens[name] for name in ("full_2048", "lora_2048")} == {2048}
    assert {tokens[name] for name in ("full_8192", "lora_8192")} == {8192}
    assert tokens["full"] == tokens["lora"] == tokens["lora_8b"] == 4096


def test_nine_minutes_are_enough_for_what_is_asked_first(suite: ModuleType) -> None:
    left_s, begun = 540.0, []
    beside = [part.usual_s for part in suite.PARTS if part.beside_others]
    left_s -= max(*beside, sum(beside) / 4)
    for part in suite.PARTS:
        if not part.beside_others and part.gpus == 1 and part.usual_s <= left_s:
            left_s -= part.usual_s
            begun.append(part.name)
    assert begun[:8] == [
        "speed_full", "speed_full_2048", "speed_full_8192", "kernels",
        "lever: padding_free, full", "lever: kernels liger, full", "lever: compile, full",
        "speed_lora",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "products"),
        ("sm80_xmma_gemm_bf16bf16_bf16f32", "products"),
        ("aten::addmm", "products"),
        ("pytorch_flash::flash_bwd_kernel<cutlass::bfloat16_t>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("elementwise_kernel<128, 4, direct_copy_kernel_cuda(at::TensorIteratorBase&)>", "copies"),
        ("vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add>", "element-wise and sums"),
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "element-wise and sums"),
    ],
)
def test_kernels_have_kinds(suite: ModuleType, name: str, kind: str) -> None:
    assert suite.profiling.kind_of(name) == kind


def test_the_time_of_a_step_is_that_of_its_kinds_and_of_waiting(suite: ModuleType) -> None:
    ran = [
        suite.profiling.Ran(name, began_us, ended_us)
        for name, began_us, ended_us in (
            ("gemm", 90e6, 95e6),  # of the step before
            ("add", 101e6, 102e6),
            ("flash", 103e6, 105e6),
            ("gemm", 105e6, 108e6),
            ("Memcpy", 104e6, 109e6),  # beside the other two
            ("gemm", 120e6, 121e6),  # of the step after
        )
    ]
    assert suite.profiling.by_kind(ran, 100e6, 110e6) == {
        "attention": 2, "copies": 5, "products": 3, "element-wise and sums": 1, "idle": 3
    }  # fmt: skip
    assert suite.profiling.by_kind([], 100e6, 110e6)["idle"] == 10


def test_a_profile_counts_kernels_alone_and_the_last_step(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, events of operations and annotations also have the times of their kernels."""

    def event(name: str, began_s: int, ended_s: int, *, device: str, is_annotation: bool) -> Any:
        return SimpleNamespace(
            name=name,
            key=name,
            count=1,
            time_range=SimpleNamespace(start=began_s * 1e6, end=ended_s * 1e6),
            device_type=SimpleNamespace(name=device),
            is_user_annotation=is_annotation,
            self_device_time_total=(ended_s - began_s) * 1e6,
        )

    events = [
        event(name, *span, device=device, is_annotation=name in (suite.profiling.STEP, "AdamW"))
        for name, span, device in (
            (suite.profiling.STEP, (0, 10), "CPU"),
            ("flash_fwd", (2, 4), "CUDA"),
            (suite.profiling.STEP, (20, 30), "CPU"),
            (suite.profiling.STEP, (21, 29), "CUDA"),
            ("aten::mm", (20, 21), "CPU"),
            ("nvjet", (22, 25), "CUDA"),
            ("AdamW", (25, 29), "CUDA"),
            ("multi_tensor_apply_kernel", (26, 28), "CUDA"),
            ("cudaDeviceSynchronize", (29, 30), "CPU"),
        )
    ]
    profiled = SimpleNamespace(
        events=lambda: events, key_averages=lambda: events, export_chrome_trace=lambda _: None
    )
    monkeypatch.setattr("torch.profiler.profile", lambda **_: nullcontext(profiled))
    monkeypatch.setattr(suite.profiling, "_train", lambda _: None)
    part = sys.modules["gpu_parts.part"]
    scene = part.Scene(directory=tmp_path, results=tmp_path, models=tmp_path, dry=False, limit_s=9)
    found = part.Found(lambda _: None)
    suite.profiling.kernels(scene, found)
    assert found.figures["a step by kind, seconds"] == {
        "attention": 0, "copies": 0, "products": 3, "element-wise and sums": 2, "idle": 5,
        "whole": 10,
    }  # fmt: skip
    assert found.figures["seconds"]["on the device"] == 7
    assert next(iter(found.figures["kernels: count, seconds"])) == "nvjet"
    assert found.figures["waits"] == {"cudaDeviceSynchronize": 1}
    assert [check.passed for check in found.checks] == [True, None]


def begins(suite: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects names of parts that are begun, instead of running them."""
    begun: list[str] = []

    class Ended:
        pid = 0

        def __init__(self, words: list[str], **_: Any) -> None:
            begun.append(words[words.index("--inside") + 1])

        def wait(self, _: float) -> int:
            return 0

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(suite.subprocess, "Popen", Ended)
    return begun


def run(suite: ModuleType, arguments: Namespace, *parts: Any, left_s: float = 1000) -> None:
    for part in parts:
        suite.run_part(part, arguments, gpus=1, ends_s=suite.time.monotonic() + left_s)


def test_what_was_right_is_not_run_again_and_what_was_wrong_is(
    suite: ModuleType, arguments: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = begins(suite, monkeypatch)
    right, wrong, failed, new = suite.PARTS[:4]
    suite.write_result(arguments.out, right.name, result("done", True))
    suite.write_result(arguments.out, wrong.name, result("done", True, False))
    suite.write_result(arguments.out, failed.name, result("not done after 9 s", True))
    run(suite, arguments, right, wrong, failed, new)
    assert begun == [wrong.name, failed.name, new.name]


def test_a_part_that_cannot_run_is_named_and_none_is_begun_too_late(
    suite: ModuleType, arguments: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = begins(suite, monkeypatch)
    arguments.dry_run = False
    two = next(part for part in suite.PARTS if part.gpus == 2)
    needy = suite.dataclasses.replace(suite.PARTS[0], name="needy", needs=("absent_package",))
    late = suite.PARTS[0]
    run(suite, arguments, two, needy)
    run(suite, arguments, late, left_s=late.usual_s - 1)
    assert begun == []
    assert suite.read_result(arguments.out, two.name)["outcome"] == "needs 2 GPUs"
    assert suite.read_result(arguments.out, needy.name)["outcome"] == "needs absent_package"
    assert suite.read_result(arguments.out, late.name) is None
    assert late.name in suite.pack(arguments).partition("Left: ")[2]


def test_another_machine_goes_on_from_the_archive(
    suite: ModuleType, arguments: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = begins(suite, monkeypatch)
    done, new = suite.PARTS[:2]
    suite.write_result(arguments.out, done.name, result("done", True))
    (arguments.out / "models").mkdir()  # large, and made again
    suite.pack(arguments)
    other = Namespace(**vars(arguments) | {"out": tmp_path / "other"})
    other.out.mkdir()
    suite.unpack(other.archive, other.out)
    run(suite, other, done, new)
    assert begun == [new.name]
    assert not (other.out / "models").exists()


def test_packages_on_the_python_path_reach_parts_and_commands_of_tests(
    suite: ModuleType, arguments: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "carried.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = [sys.executable, "-c", "import carried, ftkit"]
    assert suite.correctness.call(words).returncode == 0
    environment = {"PYTHONPATH": command_environment()["PYTHONPATH"]}
    assert subprocess.run(words, env=environment).returncode == 0


def test_parts_keep_the_bytecode_of_what_they_import(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    words = [sys.executable, "-c", "import sys; sys.exit(sys.dont_write_bytecode)"]
    assert subprocess.run(words, env=suite.offline()).returncode == 0


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("raise SystemExit(3)", "failed, see tests.log"),
        ("import time; time.sleep(600)", "not done after 2 s"),
    ],
)
def test_a_part_that_fails_or_hangs_keeps_its_results(
    suite: ModuleType,
    arguments: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    outcome: str,
) -> None:
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen

    def begin(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
        suite.write_result(arguments.out, "tests", result("under way", True, None))
        return start([sys.executable, "-c", program], **more)

    monkeypatch.setattr(suite.subprocess, "Popen", begin)
    run(suite, arguments, suite.PARTS[0], left_s=1.9 if "sleep" in program else 60)
    found = suite.read_result(arguments.out, "tests")
    assert found["outcome"] == outcome
    assert [check["passed"] for check in found["checks"]] == [True, None]
    assert suite.is_wrong(found)


@pytest.mark.slow
def test_a_suite_that_is_stopped_ends_its_parts(tmp_path: Path) -> None:
    words = [sys.executable, str(SUITE), "--dry_run", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parts = ["--parts", "quick_start_lora", "speed_full"]
    suite = subprocess.Popen([*words, *parts], stdout=subprocess.PIPE, text=True, env=environment)
    assert "quick_start_lora: it learns" in suite.stdout.readline()
    wait_for(lambda: len(psutil.Process(suite.pid).children(recursive=True)) > 1)
    inside = psutil.Process(suite.pid).children(recursive=True)
    suite.terminate()
    said, _ = suite.communicate(timeout=TIMEOUT_S)
    assert suite.returncode == 143 and "speed_full" not in said
    assert not any(process.is_running() for process in inside)


@pytest.mark.parametrize(("dry", "passed"), [(True, None), (False, False)])
def test_a_lever_that_needs_a_gpu_is_wrong_only_where_there_is_one(
    suite: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dry: bool,
    passed: bool | None,
) -> None:
    pairs = {"pairs": [{"lever": "kernels liger", "refused": "needs a GPU"}]}
    monkeypatch.setattr(suite.measuring, "_benchmark", lambda *_: pairs)
    part = sys.modules["gpu_parts.part"]
    scene = part.Scene(directory=tmp_path, results=tmp_path, models=tmp_path, dry=dry, limit_s=9)
    found = part.Found(lambda _: None)
    suite.measuring.lever("kernels liger", "full", 1)(scene, found)
    assert [(check.passed, check.said) for check in found.checks] == [(passed, "needs a GPU")]


def test_a_pair_of_a_lever_is_added_to_those_before_and_says_how_many_steps_count(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [{"ended_s": number, "loss": 1.0, "tokens": 9} for number in range(6)]
    on, off = {"steps": steps, "slowed": [3, 4], "failure": None}, {"steps": steps, "failure": None}
    asked: list[Any] = []

    def figures(*arguments: Any) -> dict[str, Any]:
        asked.extend(arguments[-1])
        return {"pairs": [{"lever": "compile", "on": on, "off": off}]}

    monkeypatch.setattr(suite.measuring, "_benchmark", figures)
    part = sys.modules["gpu_parts.part"]
    scene = part.Scene(directory=tmp_path, results=tmp_path, models=tmp_path, dry=False, limit_s=9)
    found = part.Found(lambda _: None)
    suite.measuring.lever("compile", "full", 2)(scene, found)
    assert asked[asked.index("--pairs") + 1] == 2
    (check,) = found.checks
    assert (check.passed, check.said) == (True, "2 of 6 steps count off, 2 on")


def test_what_is_left_is_what_the_next_run_does(suite: ModuleType, arguments: Namespace) -> None:
    right, wrong, cannot, *new = [part.name for part in suite.PARTS]
    suite.write_result(arguments.out, right, result("done", True, None))
    suite.write_result(arguments.out, wrong, result("done", True, False))
    suite.write_result(arguments.out, cannot, result("needs 2 GPUs"))
    text = suite.pack(arguments)
    left = json.loads((arguments.out / "results.json").read_text())["left"]
    assert left == [wrong, *new]
    assert f"Left: {'; '.join(left)}." in text


def test_problems_are_listed_below_the_table(suite: ModuleType) -> None:
    text = suite.summary(
        {"tests": result("done", True, None), "saves": result("done", True, False)}, []
    )
    assert "| tests | done | 3 s | 1 right, 0 wrong |" in text
    assert text.endswith("- saves: check 1: so")
    assert not suite.is_wrong(result("needs 2 GPUs"))


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(["kernels"], marks=pytest.mark.slow),
        pytest.param(["peer: ftkit, full"], marks=pytest.mark.matrix),
        pytest.param(ONE_OF_EACH_KIND, marks=pytest.mark.matrix),
    ],
    ids=["one", "a peer", "one of each kind"],
)
def test_parts_run_through_on_a_cpu(tmp_path: Path, parts: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(SUITE), "--dry_run", "--out", str(tmp_path)]
    words += ["--parts", *parts]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results.json").read_text())["parts"]
    ran = {name for name, part in found.items() if part["outcome"] == "done"}
    assert all(found[name]["outcome"].startswith("needs ") for name in found.keys() - ran)
    assert sorted(found) == sorted(parts)
    if "kernels" in parts:
        (by_kind,) = found["kernels"]["figures"].values()
        assert by_kind["products"] > 0 and 0 < by_kind["idle"] < by_kind["whole"]
    assert (tmp_path / "results.md").read_text().strip() in done.stdout


def test_no_helper_of_tests_has_the_name_of_a_package_that_transformers_looks_for() -> None:
    """Such a package would seem to be installed: transformers imports `kernels` if it finds it."""
    known = Path(find_spec("transformers").origin).parent / "utils" / "import_utils.py"
    packages = set(re.findall(r"""_is_package_available\(["'](\w+)["']""", known.read_text()))
    assert len(packages) > 20
    assert not packages & {file.stem for file in (ROOT / "tests" / "support").iterdir()}
