"""Liger's kernels against torch's: numbers by Triton's interpreter, memory, and code for GPUs.

No GPU is needed. What only a GPU shows is in tests/gpu.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftkit.recipe.kernels import LIGER

MISSING = [name for name in ("triton", "liger_kernel") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]
CASES = Path(__file__).parent.parent / "support" / "liger_cases.py"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """PYTHONPATH with the kernels, which are installed for these tests where they are missing."""
    if not MISSING:
        yield sys.path
        return
    place = tmp_path_factory.mktemp("kernels")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-cache-dir"]
    packages = ["--no-deps", "--target", str(place), LIGER, "triton"]
    done = subprocess.run([*pip, *packages], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    yield [str(place), *sys.path]
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def found(path: list[str]) -> dict[str, dict[str, float]]:
    """Results of the cases, in their own process: the interpreter is chosen before imports."""
    return _run(path, "numbers", TRITON_INTERPRET="1")


def _run(path: list[str], what: str, **variables: str) -> dict[str, dict[str, float]]:
    environment = os.environ | variables
    environment["PYTHONPATH"] = os.pathsep.join(path)
    process = subprocess.run(
        [sys.executable, str(CASES), what],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    answer: dict[str, dict[str, float]] = json.loads(process.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3, padded"])
def test_loss_and_every_gradient_are_those_of_torch(
    found: dict[str, dict[str, float]], family: str
) -> None:
    assert found[family]["kernels"] >= 4, "norm, MLP, rotation and loss"
    assert found[family]["loss"] < 1e-6
    assert found[family]["gradients"] < 1e-5


def test_the_loss_of_16_bit_logits_is_summed_in_32_bits(
    found: dict[str, dict[str, float]],
) -> None:
    assert found["loss in bf16"]["loss"] < 1e-6
    assert found["loss in bf16"]["grad"] < 5e-3


def test_a_residual_keeps_its_gradient_beside_that_of_a_norm(
    found: dict[str, dict[str, float]],
) -> None:
    """In place, the kernel would write one over the other."""
    assert found["norm beside a residual"]["gradients"] < 1e-6


def test_parameters_keep_their_names(found: dict[str, dict[str, float]]) -> None:
    assert found["names"] == {"equal": 1}


@pytest.fixture(scope="module", params=["80", "90"])
def compiled(path: list[str], request: pytest.FixtureRequest) -> dict[str, dict[str, float]]:
    """Results without the interpreter, by compute capability."""
    return _run(path, f"code {request.param}")


def test_the_kernels_compile_for_gpus_that_are_not_here(
    compiled: dict[str, dict[str, float]],
) -> None:
    sizes = compiled["code bytes"]
    assert set(sizes) == {"norm", "norm backward", "silu", "silu backward", "gelu", "rope", "loss"}
    assert min(sizes.values()) > 1000


def test_the_prediction_follows_what_the_kernels_allocate(
    compiled: dict[str, dict[str, float]],
) -> None:
    memory = compiled["memory"]
    assert memory["liger"] < memory["torch"]
    assert memory["liger, activations"] < 0.95 * memory["torch, activations"]
