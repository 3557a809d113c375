"""Commands of the extension, with their options."""

from dataclasses import dataclass
from pathlib import Path

from ftkit.cli.command import Command
from ftkit.recipe.options import option, word


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Options of ftkit watch."""

    out_dir: Path = word("OUT_DIR", takes_url=True)
    """out_dir of the run: a directory, s3://, gs:// or az://."""
    serve: int | None = option(
        None, placeholder="PORT", example=8321, least=0, most=65535, alone="0"
    )
    """Show the run, or all runs of a directory, as a web page on this port of this machine; without
    a port, or with 0, on a free one."""
    once: bool = False
    """Show the current state of the run once, and exit."""
    interval: str = option("2s", placeholder="DURATION")
    """Time between two updates."""


ROWS = (
    Command(
        name="watch",
        summary="follow a run from another terminal: progress, loss curve, memory, checkpoint",
        text="Follow a running or finished run from another terminal: progress, loss curve, "
        "speed, memory, newest checkpoint, time left, and how it ended. Only reads its files. "
        "Exits when the run ends; Ctrl+C exits earlier and does not affect the run. --serve "
        "shows the run, or all runs of a directory, in a browser instead.",
        options=WatchOptions,
        function="ftkit.extensions.watch.live_page:watch_runs",
        examples=(
            "out/finetune/lora",
            "out/finetune/lora --once",
            "out --serve",
        ),
    ),
)
