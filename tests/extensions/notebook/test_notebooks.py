"""The notebooks: what they call exists, and what they show was computed by them."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm
import yaml
from command import ROOT, command_environment
from notebook_cells import SINGLE_GPU, cells, read_notebook

GPU_SERVER = ROOT / "notebooks/0_gpu_server.ipynb"
EXECUTED = sorted((ROOT / "notebooks").glob("[1-9]*.ipynb"))
QUICKEST = ROOT / "notebooks/4_your_data_to_huggingface.ipynb"
LONG = tuple(
    ROOT / f"notebooks/{name}.ipynb"
    for name in (
        "1_single_gpu",
        "2_multi_gpu",
        "3_switch_hardware",
        "5_chat",
        "6_preference",
        "7_images",
    )
)
"""Two minutes and one or more each: in the matrix."""
KERNEL = """
import json, sys
import nbformat
from ipykernel.inprocess.manager import InProcessKernelManager

manager = InProcessKernelManager()
manager.start_kernel()
client = manager.client()
client.start_channels()
for cell in nbformat.read(sys.argv[1], as_version=4).cells:
    if cell.cell_type == "code":
        client.execute(cell.source)
        shown = []
        while client.iopub_channel.msg_ready():
            shown.append(client.get_iopub_msg(timeout=1))
        print(json.dumps([message["msg_type"] for message in shown]))
        for message in shown:
            if message["msg_type"] == "error":
                sys.exit("\\n".join([cell.source, *message["content"]["traceback"]]))
"""
"""Runs a notebook; prints the kinds of what each cell shows."""


def types_of(program: str, directory: Path) -> str:
    """Types that mypy reports for a program that uses the installed python-chi."""
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


@pytest.mark.slow
def test_the_calls_of_python_chi_are_those_of_the_installed_one(tmp_path: Path) -> None:
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


def test_the_notebook_that_tests_cannot_execute_says_so_and_has_no_outputs() -> None:
    notebook = read_notebook(GPU_SERVER)
    assert "not executed" in notebook.cells[0].source
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.parametrize("script", ["setup_gpu_host", "serve_notebook"])
def test_the_notebook_uses_the_scripts_with_options_that_they_have(script: str) -> None:
    program = "\n".join(cells(GPU_SERVER))
    used = [line for line in program.splitlines() if f"scripts/{script}" in line]
    assert used
    usage = subprocess.run(
        [ROOT / "scripts" / script, "--help"], capture_output=True, text=True, check=True
    ).stdout
    for word in " ".join(used).replace('"', " ").replace("{", " ").split():
        if word.startswith("--"):
            assert f"{word}" in usage


@pytest.mark.parametrize("notebook", EXECUTED, ids=lambda notebook: notebook.stem)
def test_what_a_notebook_shows_comes_from_one_run_from_top_to_bottom(notebook: Path) -> None:
    read = read_notebook(notebook)
    code = [cell for cell in read.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    shown = [output for cell in code for output in cell.outputs]
    assert any("text/html" in output.get("data", {}) for output in shown)
    assert not [output for output in shown if output.output_type == "error"]


def test_the_experiments_on_a_single_gpu_are_those_of_the_committed_sweep() -> None:
    program = "\n".join(cells(SINGLE_GPU))
    sweep = yaml.safe_load((ROOT / "recipes/sweeps/single_gpu.yaml").read_text())["runs"]
    sweep = [{key: run[key] for key in run if key != "note"} for run in sweep]
    experiments: list[dict[str, object]] = []

    def experiment(name: Any, command: Any, recipe: Any, force: Any = False, **keys: Any) -> None:
        experiments.append(
            {"name": name, "command": command, "config": f"../{recipe}.yaml", **keys}
        )

    calls = [node for node in ast.parse(program).body if isinstance(node, ast.Expr)]
    calls = [node for node in calls if ast.unparse(node).startswith("experiment(")]
    module = ast.Module(body=list(calls), type_ignores=[])
    exec(compile(module, str(SINGLE_GPU), "exec"), {"experiment": experiment})
    assert experiments == sweep


@pytest.mark.parametrize("notebook", [GPU_SERVER, *EXECUTED], ids=lambda notebook: notebook.stem)
def test_a_notebook_has_goals_questions_and_exercises(
    notebook: Path,
) -> None:
    read = read_notebook(notebook)
    first, *_, last = read.cells
    assert first.source.startswith("# ")
    assert "**What you will learn**" in first.source and "**Why it matters.**" in first.source
    texts = [cell.source for cell in read.cells if cell.cell_type == "markdown"]
    assert sum("**Question" in text for text in texts) >= 2
    assert last.cell_type == "markdown" and re.search(r"^## Exercises\n\n1\. ", last.source, re.M)


@pytest.mark.parametrize("notebook", EXECUTED, ids=lambda notebook: notebook.stem)
def test_what_a_notebook_shows_has_no_warning_of_a_library(notebook: Path) -> None:
    read = read_notebook(notebook)
    shown = [output for cell in read.cells for output in cell.get("outputs", [])]
    assert not [output for output in shown if output.get("name") == "stderr"]
    assert not [output for output in shown if "WARNING" in str(output.get("text", ""))]


@pytest.mark.parametrize(
    "notebook",
    [
        pytest.param(
            path, id=path.stem, marks=pytest.mark.matrix if path in LONG else pytest.mark.slow
        )
        for path in EXECUTED
        if path != QUICKEST
    ],
)
def test_each_cell_of_a_notebook_runs_in_a_kernel(notebook: Path, tmp_path: Path) -> None:
    """The kernel and what it starts are forks of a process that has imported the libraries."""
    command = [sys.executable, "-c", KERNEL, str(notebook)]
    # Some show the memory that a run's report predicts.
    environment = command_environment() | {warm.WHOLE: "1"}
    program = warm.SERVER.start(command, environment, cwd=tmp_path)
    out, err = program.communicate(timeout=900)
    assert program.returncode == 0, out + err
    kinds = [set(json.loads(line)) for line in out.splitlines()]
    assert len(kinds) == len(cells(notebook)) and not any("error" in kind for kind in kinds)
    assert any("update_display_data" in kind for kind in kinds)


@pytest.mark.parametrize(
    "notebook",
    [
        pytest.param(
            path, id=path.stem, marks=[pytest.mark.slow if path == QUICKEST else pytest.mark.matrix]
        )
        for path in EXECUTED
        if path != SINGLE_GPU  # which tests/scripts/test_serve_notebook.py runs
    ],
)
def test_a_notebook_runs_from_any_directory_and_keeps_what_it_shows(
    notebook: Path, tmp_path: Path
) -> None:
    copy = tmp_path / notebook.name
    # Fewer epochs show as much, worse learned, in a third of the time.
    copy.write_text(notebook.read_text().replace('\\"train.epochs\\": 6', '\\"train.epochs\\": 1'))
    run = subprocess.run(
        [sys.executable, ROOT / "scripts/execute_notebooks", copy],
        capture_output=True,
        text=True,
        env=command_environment(),
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    assert [path.name for path in tmp_path.iterdir()] == [copy.name]
    test_what_a_notebook_shows_comes_from_one_run_from_top_to_bottom(copy)
