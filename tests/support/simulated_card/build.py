"""Compiles the cards, once for a version of the sources and of torch."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock

HERE = Path(__file__).parent
SOURCES = ("device.cpp", "kernels.cpp")
HEADERS = ("card.h", "tape.h")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w")


def _obstacle() -> str:
    """Why there can be no cards here; empty: there can."""
    if shutil.which("g++") is None:
        return "no g++: the simulated card cannot be built"
    if torch.version.cuda is not None:
        return "torch is a CUDA build: the simulated card would be a second backend of that name"
    return ""


needs_card = pytest.mark.skipif(bool(_obstacle()), reason=_obstacle())


def library(*, private: bool = False) -> Path:
    """The compiled cards; several processes may ask at once, and one compiles them.

    Args:
        private: whether they are of a kind that torch has no build for, instead of CUDA's.

    Raises:
        RuntimeError: g++ does not compile them.
    """
    installed = Path(torch.__file__).parent
    digest = hashlib.sha256((installed / "version.py").read_bytes() + str(installed).encode())
    for name in (*SOURCES, *HEADERS):
        digest.update((HERE / name).read_bytes())
    flags = (*FLAGS, "-DCARD_IS_PRIVATE") if private else FLAGS
    digest.update(" ".join(flags).encode())
    cache = Path(tempfile.gettempdir()) / f"simulated-card-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    found = cache / f"card-{digest.hexdigest()[:16]}.so"
    with FileLock(cache / "lock"):
        if not found.exists():
            with tempfile.TemporaryDirectory(dir=cache) as directory:
                made = Path(directory) / "card.so"
                _compile(installed, Path(directory), made, flags)
                made.rename(found)
    return found


def _compile(installed: Path, directory: Path, made: Path, flags: tuple[str, ...]) -> None:
    includes = [f"-I{installed / 'include'}", f"-I{installed / 'include/torch/csrc/api/include'}"]
    objects = [directory / f"{name}.o" for name in SOURCES]
    compilers = [
        subprocess.Popen(
            ["g++", *flags, *includes, "-c", HERE / name, "-o", target],
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, target in zip(SOURCES, objects, strict=True)
    ]
    errors = [compiler.communicate()[1] for compiler in compilers]
    if any(compiler.returncode for compiler in compilers):
        raise RuntimeError(f"the simulated card does not compile: {''.join(errors)[-4000:]}")
    link = [
        "g++",
        "-shared",
        *objects,
        "-o",
        made,
        f"-L{installed / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
    ]
    subprocess.run([*link, f"-Wl,-rpath,{installed / 'lib'}"], check=True, stderr=sys.stderr)  # type: ignore[list-item]
