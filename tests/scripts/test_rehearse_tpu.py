"""scripts/rehearse_tpu: runs that move between a CPU and a TPU, over XLA's CPU client."""

import csv
import json
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from command import ROOT
from object_servers import BUCKET, Bucket, s3_server

SCRIPT = ROOT / "scripts" / "rehearse_tpu"
MADE = ROOT / "out" / "tpu_rehearsal"
"""Default directory of the environment that the script makes."""
PYTHON = MADE / "venv" / "bin" / "python"


def rehearsed(test: Callable[..., None]) -> Any:
    """A test that computes in that environment."""
    reason = f"scripts/rehearse_tpu has not made {MADE.relative_to(ROOT)} (torch_tpu, 4 GB)"
    is_there = (MADE / "venv" / "done").exists()
    timed = pytest.mark.timeout(3600)(pytest.mark.skipif(not is_there, reason=reason)(test))
    return pytest.mark.matrix(timed)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.syspath_prepend(SCRIPT.parent)
        spec = spec_from_loader("rehearse_tpu", SourceFileLoader(SCRIPT.name, str(SCRIPT)))
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def rehearsal(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("rehearsal")
    return script.Rehearsal(str(PYTHON), place, script.library_in(MADE))


@pytest.fixture(scope="module")
def on_cpu(rehearsal: Any) -> list[float]:
    """Losses of the full fine-tuning on the CPU."""
    found: list[float] = rehearsal.losses("full", "alone", ("cpu",), "32-true")
    return found


@pytest.fixture
def words(script: ModuleType, rehearsal: Any) -> Callable[..., list[str]]:
    """The command line of such a run by directory and kind of device."""
    of_all = ("--precision", "32-true", *script.SHORT)

    def line(out: str, kind: str, *more: str) -> list[str]:
        found: list[str] = rehearsal.words("full", out, kind, rehearsal.data, *of_all, *more)
        return found

    return line


def losses_in(text: str) -> list[float]:
    return [float(row["loss"]) for row in csv.DictReader(text.splitlines())]


def test_another_file_is_never_loaded_in_the_place_of_the_chip(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "fastatomstruct_xla_cpu-2026-py3-none-any.whl", "w") as wheel:
        wheel.writestr(script.IN_PLUGIN, b"code")
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="another hash"):
        script.plugin("python", tmp_path)
    assert not (tmp_path / "plugin").exists()


@pytest.mark.parametrize(("last", "differs"), [(2.000001, False), (2.00001, True)])
def test_a_run_whose_losses_differ_is_wrong(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, last: float, differs: bool
) -> None:
    rehearsal = script.Rehearsal.__new__(script.Rehearsal)
    losses = {"cpu": [3.0, 2.0], "tpu": [3.0, 2.0], "moved": [3.0, last]}
    monkeypatch.setattr(rehearsal, "losses", lambda _, name, kinds, precision: losses[name])
    assert bool(rehearsal.compare("full", 1e-6)) is differs


@pytest.mark.parametrize(
    ("compiled", "is_wrong"),
    [([9] * 15 + [0] * 15, False), ([9] * 16 + [0] * 14, True), ([0] * 30, True)],
)
def test_a_step_that_compiles_after_the_first_epoch_is_wrong(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    compiled: list[int],
    is_wrong: bool,
) -> None:
    rehearsal = script.Rehearsal.__new__(script.Rehearsal)
    rehearsal.directory, rehearsal.more = tmp_path, tmp_path / "more.json"

    def train(method: str, out: Path, *_: object) -> None:
        out.mkdir()
        (out / "compiled.json").write_text(json.dumps(compiled))
        (out / "metrics.csv").write_text("loss\n3.0\n2.0\n")

    monkeypatch.setattr(rehearsal, "train", train)
    assert bool(rehearsal.shapes(1e-6)) is is_wrong


@rehearsed
def test_a_run_moves_to_a_tpu_and_back_and_learns_the_same(tmp_path: Path) -> None:
    (tmp_path / "plugin").symlink_to(MADE / "plugin")
    words = [sys.executable, str(SCRIPT), "--directory", str(tmp_path), "--python", str(PYTHON)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@rehearsed
def test_it_moves_through_object_storage(
    rehearsal: Any,
    words: Callable[..., list[str]],
    on_cpu: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with s3_server() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        for kind, more in (
            ("cpu", ["--stop_after", "2"]),
            ("tpu", ["--stop_after", "2", "--resume", "auto"]),
            ("cpu", ["--resume", "auto"]),
        ):
            ran = rehearsal.ftkit(*words(f"s3://{BUCKET}/moved", kind, *more), chips=1)
            assert ran.returncode == 0, ran.stderr
        found = losses_in(Bucket(s3).read("moved/metrics.csv").decode())
    assert found == pytest.approx(on_cpu, rel=1e-6)


@rehearsed
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_what_ended_on_a_tpu_goes_on_on_a_cpu(
    script: ModuleType,
    rehearsal: Any,
    words: Callable[..., list[str]],
    on_cpu: list[float],
    tmp_path: Path,
    sent: signal.Signals,
    code: int,
) -> None:
    command = [str(PYTHON), "-m", "ftkit", *words(str(tmp_path), "tpu")]
    rows, end = tmp_path / "metrics.csv", time.monotonic() + 600
    with subprocess.Popen(command, env=script.variables(rehearsal.library, 1)) as process:
        # Two steps are saved by then.
        while not rows.exists() or len(losses_in(rows.read_text())) < 3:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(sent)
    assert process.returncode == code
    ran = rehearsal.ftkit(*words(str(tmp_path), "cpu", "--resume", "auto"), chips=1)
    assert ran.returncode == 0, ran.stderr
    assert losses_in(rows.read_text()) == pytest.approx(on_cpu, rel=1e-6)
