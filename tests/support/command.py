"""The `ftkit` command as tests start it: its words, its environment, what its ranks run first."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runs import Run

ROOT = Path(__file__).parents[2]

DEFAULT_SIGNALS = """
import signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.default_int_handler if number == 2 else signal.SIG_DFL)
"""
"""Under a shell that started the tests in the background, Ctrl+C would be ignored."""
NOHUP = f"{DEFAULT_SIGNALS}signal.signal(signal.SIGHUP, signal.SIG_IGN)"
Command = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., "AbstractContextManager[Run]"]


def command_line(*arguments: object, before: str = "") -> list[str]:
    """The `ftkit` command, installed or not.

    Args:
        arguments: of the command.
        before: statements to run first, in the same process.
    """
    return [sys.executable, "-c", _program(before), *map(str, arguments)]


def _program(before: str) -> str:
    return f"{before}\nfrom ftkit.cli.app import main\nmain()"


PLAIN = frozenset(map(_program, ("", DEFAULT_SIGNALS, NOHUP)))
"""Programs of the command without statements that could see or change modules of ours."""


def command_environment() -> dict[str, str]:
    """Finds ftkit, but no network, no account and no terminal; one thread per process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "WANDB_"))}
    return kept | {
        # On some machines, libraries are found by it alone.
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "OMP_NUM_THREADS": "1",
    }


def start_up_of_ranks(directory: Path, statements: str) -> Path:
    """Return an entry for PYTHONPATH that makes ranks run statements before all else."""
    condition = 'import os, sys\nif "ftkit.training.rank" in sys.orig_argv:\n'
    file = directory / "sitecustomize.py"
    file.write_text(condition + textwrap.indent(statements, "    "))
    return directory


NO_TORCH = """
import atexit, sys
@atexit.register
def check():
    heavy = sys.modules.keys() & {"torch", "lightning", "litgpt", "transformers", "peft"}
    print(f"imported: {sorted(heavy)}", file=sys.stderr)
"""
