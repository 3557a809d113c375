"""Environments of other programs: a virtual environment for each, with pinned versions."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
AS_FTKIT = ["--constraint", str(CONSTRAINTS)]
REQUIREMENTS: dict[str, list[str]] = {
    "litgpt": ["litgpt", "requests", "bitsandbytes", *AS_FTKIT],
    "trl": [
        "trl==1.16.0",
        "transformers==5.23.0",
        "accelerate==1.15.0",
        "peft==0.21.2",
        "datasets==5.0.1",
        "bitsandbytes==0.50.2",
    ],
    "trl-images": [
        "trl==1.16.0",
        "transformers==5.24.0",
        "accelerate==1.15.0",
        "peft==0.21.2",
        "datasets==5.0.1",
        "pillow",
    ],
}
"""Packages to install besides torch, which has ftkit's version. LitGPT gets ftkit's libraries, TRL
the newest of 22 November 2026."""
REPORTED = ("torch", "litgpt", "lightning", "trl", "transformers", "peft", "accelerate")
STAMP = "installed.json"


def python_of(name: str, directory: Path) -> Path:
    """Return the Python of an environment, which is made if needed: that takes minutes.

    Args:
        name: of the program.
        directory: where environments lie.

    Raises:
        subprocess.CalledProcessError: it cannot be installed; pip has printed why.
    """
    environment = directory / name
    python = environment / "bin" / "python"
    wanted = json.dumps([REQUIREMENTS[name], pinned_torch(), sys.version])
    stamp = environment / STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"installing {name} in {environment} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
    _install_torch(python)
    _pip(python, [pinned_torch(), *REQUIREMENTS[name]])
    stamp.write_text(wanted)
    return python


def versions_of(python: Path) -> dict[str, str]:
    """Versions of the reported packages in an environment."""
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = {package["name"]: package["version"] for package in json.loads(listed.stdout)}
    return {name: found[name] for name in REPORTED if name in found}


def pinned_torch() -> str:
    """The requirement for torch."""
    found = re.search(r"^torch==\S+$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert found is not None
    return found[0]


def _install_torch(python: Path) -> None:
    """Install the build for CPUs if there is no GPU: the other one takes gigabytes."""
    if not Path("/dev/nvidiactl").exists():
        # Without retries: if this index cannot be reached, the usual one follows.
        of_cpu = ["--no-deps", "--retries", "0", "--timeout", "5", "--index-url", CPU_INDEX]
        if _pip(python, [*of_cpu, pinned_torch()], check=False):
            return
    _pip(python, [pinned_torch()])


def _pip(python: Path, words: Sequence[str], *, check: bool = True) -> bool:
    """Install packages; return whether it worked."""
    command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    quiet = None if check else subprocess.DEVNULL
    installed = subprocess.run([*command, *words], check=check, stderr=quiet)
    return installed.returncode == 0
