"""The notebooks of the project and the code in their cells."""

from pathlib import Path

import nbformat
from command import ROOT

SINGLE_GPU = ROOT / "notebooks/1_single_gpu.ipynb"


def cells(notebook: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    read = nbformat.read(notebook, as_version=4)
    nbformat.validate(read)
    return [cell.source for cell in read.cells if cell.cell_type == "code"]
