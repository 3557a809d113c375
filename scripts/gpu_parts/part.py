"""A part of the GPU suite: what it shows, its time limit, and what it found."""

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
    """One thing that was looked at."""

    name: str
    passed: bool | None
    """None: it is a figure, which is neither right nor wrong."""
    said: str = ""
    """The figure, or what was wrong."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Where a part runs."""

    directory: Path
    """For what it makes; empty at first."""
    results: Path
    """For figures that are kept."""
    dry: bool
    """On CPU, at tiny size: only to see that everything runs."""
    wheels: Path | None = None
    """A folder with what other programs need."""

    @property
    def accelerator(self) -> str:
        """Where training runs."""
        return "cpu" if self.dry else "cuda"


@dataclass
class Found:
    """What a part found; `note` adds to it as it comes, so that a time limit loses little."""

    note: Callable[["Found"], None]
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, passed: bool | None, said: object = "") -> None:
        """Add something that was looked at."""
        self.checks.append(Check(name=name, passed=passed, said=str(said)))
        self.note(self)

    def figure(self, name: str, value: Any) -> None:
        """Add a figure."""
        self.figures[name] = value
        self.note(self)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part."""

    name: str
    shows: str
    """In a few words."""
    run: Callable[[Scene, Found], None]
    gpus: int = 1
    """As many are needed."""
    needs_wheels: bool = False
    limit_s: int = 600


def call(words: list[object], scene: Scene, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command at the top of the repository; its output is kept."""
    return subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        errors="replace",
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )


def ftkit(scene: Scene, command: str, **keys: Any) -> subprocess.CompletedProcess[str]:
    """Run ftkit; two underscores in keys stand for a dot."""
    words: list[object] = [sys.executable, "-m", "ftkit", command]
    for key, value in keys.items():
        text = str(value).lower() if isinstance(value, bool) else value
        words += [f"--{key.replace('__', '.')}", text]
    return call(words, scene)


def exit_summary(done: subprocess.CompletedProcess[str], lines: int = 3) -> str:
    """The end of what a command said."""
    said = (done.stdout + done.stderr).strip().splitlines()
    return f"exit code {done.returncode}: " + " | ".join(said[-lines:])
