"""docs/coming-from.md is made from the tables by which files of other programs are translated."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_document_is_what_the_tables_say() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "scripts/coming_from"], capture_output=True, text=True, check=True
    ).stdout
    assert (ROOT / "docs/coming-from.md").read_text() == made, "run scripts/coming_from --write"


def test_packing_is_found_by_its_name() -> None:
    assert "## Packing" in (ROOT / "docs/coming-from.md").read_text()
