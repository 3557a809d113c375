"""scripts/rehearse_tpu: runs that move between a CPU and a TPU, over XLA's CPU client."""

import subprocess
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from command import ROOT

SCRIPT = ROOT / "scripts" / "rehearse_tpu"
MADE = ROOT / "out" / "tpu_rehearsal"
"""Where the script makes its environment, if nothing else is asked."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = spec_from_loader("rehearse_tpu", SourceFileLoader(SCRIPT.name, str(SCRIPT)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    monkeypatch.setattr(rehearsal, "losses", lambda _, name, kinds: losses[name])
    assert bool(rehearsal.compare("full", 1e-6)) is differs


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not (MADE / "venv" / "done").exists(),
    reason=f"scripts/rehearse_tpu has not made {MADE.relative_to(ROOT)} (torch_tpu, 4 GB)",
)
def test_a_run_moves_to_a_tpu_and_back_and_learns_the_same(tmp_path: Path) -> None:
    python = str(MADE / "venv" / "bin" / "python")
    (tmp_path / "plugin").symlink_to(MADE / "plugin")
    words = [sys.executable, str(SCRIPT), "--directory", str(tmp_path), "--python", python]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
