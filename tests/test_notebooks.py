"""The notebooks: what they call exists, and what they show was computed by them."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
GPU_SERVER = ROOT / "notebooks/0_gpu_server.ipynb"


def cells(notebook: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    read = nbformat.read(notebook, as_version=4)
    nbformat.validate(read)
    return [cell.source for cell in read.cells if cell.cell_type == "code"]


def types_of(program: str, directory: Path) -> str:
    """What mypy says about a program that uses the installed python-chi, which it reads."""
    found = importlib.util.find_spec("chi")
    assert found is not None, "scripts/setup_env --dev installs python-chi"
    sources = directory / "sources"
    shutil.copytree(Path(found.origin).parent, sources / "chi", dirs_exist_ok=True)
    file = directory / "program.py"
    file.write_text(program)
    options = ["--config-file=", "--no-site-packages", "--ignore-missing-imports"]
    options += ["--follow-imports=silent", "--check-untyped-defs", "--no-implicit-optional"]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--cache-dir", directory / "cache", file],
        capture_output=True,
        text=True,
        cwd=directory,
        env=os.environ | {"MYPYPATH": str(sources)},
    )
    return run.stdout + run.stderr


def test_the_calls_of_python_chi_are_those_of_the_installed_one(tmp_path):
    program = "\n".join(cells(GPU_SERVER))
    assert "server.Server(" in program and "lease.Lease(" in program
    assert types_of(program, tmp_path).startswith("Success")

    for right, wrong, complaint in [
        (
            "node.submit(idempotent=True)",
            "node.submit(idempotnt=1, wait_timeout='x')",
            "wait_timeout",
        ),
        ("amount=1, node_type", "count=1, node_type", 'Unexpected keyword argument "count"'),
        ("node.check_connectivity()", "node.check_connection()", "check_connection"),
        ("reservation_id=", "reservation=", 'Unexpected keyword argument "reservation"'),
        ("choose_site(default=SITE)", "choose_place(SITE)", "choose_place"),
    ]:
        assert right in program
        assert complaint in types_of(program.replace(right, wrong), tmp_path), wrong


def test_the_notebook_that_no_test_can_execute_says_so_and_has_no_outputs():
    notebook = nbformat.read(GPU_SERVER, as_version=4)
    assert "not executed" in notebook.cells[0].source
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.parametrize("script", ["setup_gpu_host", "serve_notebook"])
def test_the_notebook_uses_the_scripts_with_options_that_they_have(script):
    program = "\n".join(cells(GPU_SERVER))
    used = [line for line in program.splitlines() if f"scripts/{script}" in line]
    assert used
    usage = subprocess.run(
        [ROOT / "scripts" / script, "--help"], capture_output=True, text=True, check=True
    ).stdout
    for word in " ".join(used).replace('"', " ").replace("{", " ").split():
        if word.startswith("--"):
            assert f"{word}" in usage
