"""Commands of the extension, with their options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ftkit.cli.command import Command
from ftkit.recipe.options import CommonOptions, option, word


@dataclass(frozen=True, kw_only=True)
class CompareOptions(CommonOptions):
    """Options of ftkit compare."""

    runs: tuple[str, ...] = word("RUN")
    """Runs (out_dir, or URL: s3://, gs:// or az://), or directories that contain runs at any
    depth."""
    sort: str | None = option(None, placeholder="KEY")
    """Sort by a result such as tokens_per_s, best first, or by a setting such as
    train.micro_batch_size; the JSON and CSV output has all keys. Default: successful runs first, by
    validation loss, then by tokens_per_s."""
    format: Literal["table", "json", "csv", "markdown"] = "table"
    """json, csv, markdown: print only that to standard output."""
    plot: Path | None = option(None, placeholder="FILE")
    """Also draw loss by step and by time, peak memory and throughput into FILE.png, or together
    with the table into FILE.html, a self-contained page."""


ROWS = (
    Command(
        name="compare",
        summary="compare runs: settings that differ and results, as a table and as a plot",
        text="Compare runs, finished or not: the settings that differ, outcome, loss, speed, "
        "time and peak memory. A star marks the best value among successful runs.",
        options=CompareOptions,
        function="ftkit.extensions.comparison.compare:compare_runs",
        examples=(
            "out/finetune/lora out/finetune/lora-2",
            "out --sort allocated_bytes --format csv",
            "out/* --plot comparison.html",
        ),
    ),
)
