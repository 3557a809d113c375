"""Processes that find a TPU where there is none, in what scripts/rehearse_tpu has made."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIRECTORY = ROOT / "out" / "tpu_rehearsal"
"""Default directory of the environment that scripts/rehearse_tpu makes."""
STAND_IN = ROOT / "tests" / "support" / "tpu_rehearsal"
IN_PLUGIN = "fastatomstruct_xla_cpu/libpjrt_cpu.so"
"""The CPU client of XLA in its wheel."""


def python_in(directory: Path) -> Path:
    """The interpreter with torch_tpu in a directory of scripts/rehearse_tpu."""
    return directory / "venv" / "bin" / "python"


def library_in(directory: Path) -> Path:
    """The CPU client of XLA in a directory of scripts/rehearse_tpu."""
    return directory / "plugin" / IN_PLUGIN


def variables(library: Path, chips: int = 1) -> dict[str, str]:
    """Variables of a process in which torch_tpu finds chips.

    Args:
        library: the CPU client of XLA.
        chips: how many; 0: none.
    """
    alone = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if not chips:
        return os.environ | alone
    return (
        os.environ
        | alone
        | {
            "PYTHONPATH": f"{STAND_IN}:{ROOT}",
            "TPU_REHEARSAL_CHIPS": str(chips),
            "TPU_LIBRARY_PATH": str(library),
        }
    )
