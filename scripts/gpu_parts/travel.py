"""What travels to a machine with a GPU but without network, and what comes back from it."""

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarking import MIB
from benchmarking.peers.environments import CONSTRAINTS, REQUIREMENTS
from benchmarking.tables import table

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = (
    "torch==2.11.0",
    "triton==3.6.0",
    "transformers==5.17.0",
    "lightning==2.6.6",
    "pytorch-lightning==2.6.6",
    "torchmetrics==1.9.0",
    "accelerate==1.15.0",
    "huggingface-hub==1.33.0",
    "numpy==2.5.2",
    "safetensors==0.8.0",
    "sentencepiece==0.2.2",
    "tiktoken==0.14.0",
    "tokenizers==0.23.2",
    *("aiohttp", "einops", "filelock", "fsspec", "httpx", "hypothesis", "jinja2", "matplotlib"),
    *("nvidia-ml-py", "packaging", "pandas", "peft", "pillow", "psutil", "pyarrow"),
    *("pytest", "pytest-timeout", "pytest-xdist", "pyyaml", "regex", "requests", "rich"),
    *("scikit-learn", "scipy", "tensorboard", "tqdm", "typer", "xxhash", "zstandard"),
)
"""What the machine with the GPU has: the pins that decide what works there, and others."""
CARRIED = (
    "bitsandbytes",
    "datasets",
    "dill",
    "docstring-parser",
    "jsonargparse",
    "liger-kernel",
    "litgpt",
    "multiprocess",
    "shtab",
    "trl",
    "typeshed-client",
)
"""Packages that ftkit and the suite need and the machine does not have, with all that these need.

Not DeepSpeed: it is a source distribution, and one GPU does not need it."""
MOST_FILES = 8
"""Number of files that come back, at most."""
LARGEST_BYTES = 16 * MIB
"""Size of a file that comes back, at most."""
DEEPEST = 2
"""Number of folders above a file that comes back, at most."""


def requirements() -> list[str]:
    """The packages that travel, each with its pin: that of constraints.txt; TRL's own else."""
    pinned = "\n".join([*REQUIREMENTS["trl"], CONSTRAINTS.read_text()])  # the later one counts
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)$", pinned, re.MULTILINE))
    return [f"{name}=={versions[name]}" for name in CARRIED]


def tree_files() -> list[Path]:
    """Files of the working tree, relative to it: those that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


def sizes(files: Iterable[Path]) -> dict[str, int]:
    """Bytes of files, by their names."""
    return {str(file): file.stat().st_size for file in files}


def travels(kinds: Mapping[str, Mapping[str, int]], bound_bytes: int) -> tuple[str, str | None]:
    """Sum up what travels.

    Args:
        kinds: for each kind of thing, bytes by the names of its files.
        bound_bytes: the largest sum that is possible.

    Returns:
        a table, and what is wrong: the sum, the bound and the largest file of each kind.
    """
    totals = {kind: sum(files.values()) for kind, files in kinds.items()}
    whole = sum(totals.values())
    rows = [
        [kind, str(len(kinds[kind])), f"{total / MIB:.2f} MiB"] for kind, total in totals.items()
    ]
    count = sum(map(len, kinds.values()))
    rows.append(["all", str(count), f"{whole / MIB:.2f} of {bound_bytes / MIB:.0f} MiB"])
    text = table(("what travels", "files", "size"), rows)
    if whole <= bound_bytes:
        return text, None
    largest = [
        f"{name} ({files[name] / MIB:.2f} MiB)"
        for files in kinds.values()
        if (name := max(files, key=files.__getitem__, default=None)) is not None
    ]
    return text, (
        f"{whole / MIB:.2f} MiB would travel, {(whole - bound_bytes) / MIB:.2f} MiB more than "
        f"possible. Remove untracked files or carry fewer packages; the largest files are "
        f"{', '.join(largest)}."
    )


def wrong_with_returned(folder: Path) -> list[str]:
    """What keeps the files of a folder from coming back; nothing if all of them do."""
    files = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    wrong = [f"{len(files)} files, but {MOST_FILES} come back"] if len(files) > MOST_FILES else []
    for name, path in sorted(files.items()):
        if (size := path.stat().st_size) > LARGEST_BYTES:
            wrong.append(
                f"{name} has {size / MIB:.1f} MiB, but {LARGEST_BYTES / MIB:.0f} come back"
            )
        if len(name.parent.parts) > DEEPEST:
            wrong.append(f"{name} lies deeper than {DEEPEST} folders")
    return wrong
