"""Commands of the extension, with their options."""

from dataclasses import dataclass
from pathlib import Path

from ftkit.cli.command import Command
from ftkit.recipe.options import CommonOptions, PluginOptions, keys_beside, option, word
from ftkit.recipe.parsing import Override


@dataclass(frozen=True, kw_only=True)
class SweepOptions(PluginOptions, CommonOptions):
    """Options of ftkit sweep."""

    sweep_file: str = word(
        "SWEEP.yaml",
        ask="what to run? Name a file, such as ftkit sweep recipes/sweeps/single_gpu.yaml, "
        "or a command, such as ftkit sweep finetune --config RECIPE.yaml --sweep seed=1,2.",
    )
    """List of runs, each with name, command, config (its recipe, relative to this file) and keys of
    recipes; or a fine-tuning command, to vary keys of one recipe."""
    config: tuple[str, ...] = option((), placeholder="RECIPE.yaml")
    """Recipe of the fine-tuning command; can be repeated, later ones override earlier ones."""
    sweep: tuple[str, ...] = option((), placeholder="KEY=A,B,C")
    """Run the command once for each value; can be repeated, for all combinations."""
    out_dir: Path | None = None
    """Directory in which each run gets a directory of its name. Default: out_dir of SWEEP.yaml, or
    that of the recipe followed by -sweep."""
    only: tuple[str, ...] = option((), placeholder="PATTERN")
    """Run only those whose names match, such as 'a100-*'; can be repeated."""
    plot: Path | None = option(None, placeholder="FILE")
    """Draw the comparison into FILE.png or FILE.html."""
    overwrite: bool = False
    """Start all runs again, including completed ones."""
    dry_run: bool = False
    """Only print the command lines that would run."""
    keys: tuple[Override, ...] = keys_beside()
    """Keys of all runs."""


ROWS = (
    Command(
        name="sweep",
        summary="run variations of recipes one after another, and compare them",
        text="Run variations of recipes one after another, each in its own process and "
        "directory, and compare them at the end. The sweep continues when a run fails or runs "
        "out of memory. Ctrl+C saves and stops the current run and the sweep; the same command "
        "continues the sweep: completed runs are skipped, and the stopped run is resumed. Keys "
        "of recipes that are given as options apply to all runs. The exit code is 1 if a run "
        "failed, 3 if all ran out of memory.",
        options=SweepOptions,
        function="ftkit.extensions.sweep.sweep:sweep_runs",
        usage=(
            "SWEEP.yaml [--KEY VALUE ...]",
            "finetune|finetune_full --config RECIPE.yaml --sweep KEY=A,B ... [--KEY VALUE ...]",
        ),
        examples=(
            "recipes/sweeps/single_gpu.yaml --plot single_gpu.html",
            "recipes/sweeps/multi_gpu.yaml --only 'a100-*'",
            (
                "finetune_full --config recipes/tiny-llama-full.yaml \\\n"
                "    --sweep train.micro_batch_size=4,8 --sweep precision=bf16-true,32-true"
            ),
        ),
    ),
)
