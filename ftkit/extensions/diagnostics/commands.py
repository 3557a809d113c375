"""The command of the extension, with its options."""

from dataclasses import dataclass
from pathlib import Path

from ftkit.cli.command import Command
from ftkit.errors import UserError
from ftkit.recipe.options import CommonOptions, option, word


@dataclass(frozen=True, kw_only=True)
class ReportOptions(CommonOptions):
    """Options of ftkit report."""

    out_dir: Path = word("OUT_DIR", ask="of which run?")
    """out_dir of the run."""
    diagnostics: bool = False
    """Show what a bug report needs instead: versions, hardware, recipe, warnings and log, without
    records, answers and secrets."""
    out: Path | None = option(None, placeholder="FILE.md")
    """Write the diagnostics to this file. Default: they are only shown."""

    def __post_init__(self) -> None:
        if self.out is not None and not self.diagnostics:
            raise UserError(
                "--out is for --diagnostics; the report itself is in the run's report.json. "
                f"Try ftkit report {self.out_dir} --diagnostics --out {self.out}."
            )


ROWS = (
    Command(
        name="report",
        summary="show the report of a run again, or what a bug report needs",
        text="Show the report of a run again. --diagnostics shows what a bug report needs: "
        "versions, hardware, recipe, warnings and log, without records, answers, passwords and "
        "tokens. With --out, what is shown is also written to a file.",
        options=ReportOptions,
        function="ftkit.extensions.diagnostics.diagnostics:show_report",
        examples=(
            "out/finetune/lora",
            "out/finetune/lora --diagnostics",
            "out/finetune/lora --diagnostics --out bug.md",
        ),
    ),
)
