"""The first cell where ftkit is not installed, as in a runtime of Colab's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT
from messages import says
from notebook_cells import cells

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[1-9]*.ipynb"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with nothing but its own library."""
    directory = tmp_path_factory.mktemp("bare")
    command = [sys.executable, "-m", "venv", "--without-pip", directory / "venv"]
    subprocess.run(command, check=True)
    return directory / "venv" / "bin" / "python"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_the_first_cell_says_how_to_come_where_ftkit_is(
    notebook: Path, bare: Path, tmp_path: Path
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    first, *_ = cells(notebook)

    def run(python: str | Path) -> "subprocess.CompletedProcess[str]":
        # In isolated mode neither the working directory nor variables add what is installed.
        command = [python, "-I", "-c", first]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment
        )

    found = run(bare)
    assert found.returncode == 1
    assert says(found.stderr.splitlines()[-1], "ModuleNotFoundError")
    assert says(found.stderr, "ftkit is not installed")
    assert says(found.stderr, "local runtime") and says(found.stderr, "scripts/serve_notebook")
    assert says(found.stderr, "./scripts/quickstart --notebook")
    assert run(sys.executable).returncode == 0
