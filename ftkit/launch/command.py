"""`ftkit finetune` and `ftkit sweep`: from their command lines to runs."""

from pathlib import Path

from ftkit.config.command_options import FinetuneOptions, SweepOptions
from ftkit.config.parsing import read_recipe, sorted_words, to_yaml
from ftkit.config.recipe import FINETUNE
from ftkit.config.sweep import SweepRun, runs_of_file, runs_of_keys
from ftkit.errors import UserError
from ftkit.launch.supervisor import launch
from ftkit.launch.sweep import sweep
from ftkit.runs.job import StopAfter
from ftkit.runs.resume import follow_moved


def finetune(options: FinetuneOptions) -> int:
    """Fine-tune as a recipe says, or print it; the exit code.

    Raises:
        UserError: see `read_recipe` and `launch`.
    """
    recipes, overrides = sorted_words(options.words, options.config, options.keys)
    recipe = read_recipe(recipes, overrides, method=FINETUNE[options.line[1]])
    if options.print_config:
        print(to_yaml(recipe), end="")
        return 0
    if recipes and "out_dir" not in dict(overrides):
        recipe = follow_moved(recipe, Path(recipes[-1]))
    return launch(
        recipe,
        command=options.line,
        overwrite=options.overwrite,
        stop_after=StopAfter.parse(options.stop_after) if options.stop_after is not None else None,
        force=options.force,
    )


def sweep_runs(options: SweepOptions) -> int:
    """Do the runs of a sweep that are left to do; the exit code.

    Raises:
        UserError: see `sweep` and `ftkit.config.sweep`.
    """
    if "resume" in dict(options.keys):
        raise UserError(
            "--resume is not for sweeps, which go on by themselves. Leave it out, or start all "
            "over with --overwrite."
        )
    return sweep(
        _runs(options),
        only=options.only,
        overwrite=options.overwrite,
        dry_run=options.dry_run,
        plot=options.plot,
    )


def _runs(options: SweepOptions) -> list[SweepRun]:
    what = options.sweep_file
    if what in FINETUNE:
        return runs_of_keys(what, options.config, options.sweep, options.keys, options.out_dir)
    if options.config or options.sweep:
        raise UserError(
            f"--config and --sweep go with a command, not with {what}. "
            "Try ftkit sweep finetune --config RECIPE.yaml --sweep seed=1,2."
        )
    return runs_of_file(Path(what), options.keys, options.out_dir)
