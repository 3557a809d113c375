"""The notebooks of the project and the code in their cells."""

from pathlib import Path
from typing import Any

from command import ROOT

SINGLE_GPU = ROOT / "notebooks/1_single_gpu.ipynb"


def read_notebook(notebook: Path) -> Any:
    """A valid notebook."""
    # It compiles grammars for two seconds, which each process would do that collects tests.
    import nbformat

    read = nbformat.read(notebook, as_version=4)
    nbformat.validate(read)
    return read


def cells(notebook: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    read = read_notebook(notebook)
    return [cell.source for cell in read.cells if cell.cell_type == "code"]
