"""A part of the GPU suite: its purpose, time limit and findings."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check, or one figure to note."""

    name: str
    passed: bool | None
    """None: it is a figure, which is neither right nor wrong."""
    said: str = ""
    """The figure, or what was wrong."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Surroundings of a part: its directories and options."""

    directory: Path
    """Directory for its files; empty at first."""
    results: Path
    """Directory for figures that are kept."""
    models: Path
    """Directory for models with files, which several parts use."""
    dry: bool
    """True if it runs on CPU at tiny size, only to check that everything runs."""
    limit_s: float
    """Seconds that it has."""

    @property
    def accelerator(self) -> str:
        """Kind of device on which training runs."""
        return "cpu" if self.dry else "cuda"


@dataclass
class Found:
    """Findings of a part; `note` saves them after each, so that a time limit loses little."""

    note: Callable[["Found"], None]
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, passed: bool | None, said: object = "") -> None:
        """Add a check."""
        self.checks.append(Check(name=name, passed=passed, said=str(said)))
        self.note(self)

    def figure(self, name: str, value: Any) -> None:
        """Add a figure."""
        self.figures[name] = value
        self.note(self)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part: so small that it is done whole or not at all."""

    name: str
    shows: str
    """Purpose, in a few words."""
    run: Callable[[Scene, Found], None]
    usual_s: int
    """Seconds to expect, a little more than on an H200; it is not begun if fewer are left."""
    gpus: int = 1
    """Number of GPUs that it needs."""
    needs: tuple[str, ...] = ()
    """Packages that it needs beside those of ftkit."""
    beside_others: bool = False
    """True if it may run beside others: it measures no time and little memory."""


def call(words: list[object], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the root of the repository, and capture its output."""
    return subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        errors="replace",
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": python_path()} | environment,
    )


def python_path(*more: object) -> str:
    """PYTHONPATH that finds ftkit in this repository, and packages where they are found now."""
    found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(filter(None, [str(ROOT), *map(str, more), *found]))


def ftkit(command: str, **keys: Any) -> subprocess.CompletedProcess[str]:
    """Run ftkit; two underscores in keys stand for a dot."""
    words: list[object] = [sys.executable, "-m", "ftkit", command]
    for key, value in keys.items():
        text = str(value).lower() if isinstance(value, bool) else value
        words += [f"--{key.replace('__', '.')}", text]
    return call(words)


def exit_summary(done: subprocess.CompletedProcess[str], lines: int = 3) -> str:
    """Exit code and last lines of output of a command."""
    said = (done.stdout + done.stderr).strip().splitlines()
    return f"exit code {done.returncode}: " + " | ".join(said[-lines:])
