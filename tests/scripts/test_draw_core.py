"""The picture of core and extensions shows those that there are."""

import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT


@pytest.mark.extensions
def test_the_picture_is_that_of_the_code(tmp_path: Path) -> None:
    file = tmp_path / "core.svg"
    subprocess.run([sys.executable, ROOT / "scripts/draw_core", file], check=True)
    assert file.read_text() == (ROOT / "docs/core.svg").read_text(), "run scripts/draw_core"
    assert all(f">{name}<" in file.read_text() for name in ("notebook", "strategies", "utils"))
