"""`ftkit finetune`: from its command line to a run."""

from pathlib import Path

from ftkit.errors import UserError
from ftkit.launch.environment import external_ranks
from ftkit.launch.supervisor import launch
from ftkit.recipe.options import FinetuneOptions
from ftkit.recipe.own_metric import own_metrics
from ftkit.recipe.parsing import read_recipe, sorted_words, to_yaml
from ftkit.recipe.recipe import FINETUNE
from ftkit.runs.job import StopAfter
from ftkit.runs.resume import follow_moved
from ftkit.utils.yaml_files import STANDARD_INPUT


def run_finetuning(options: FinetuneOptions) -> int:
    """Fine-tune as a recipe says, or print it; the exit code.

    Raises:
        UserError: see `read_recipe` and `launch`.
    """
    recipes, overrides = sorted_words(options.words, options.config, options.keys)
    if str(STANDARD_INPUT) in recipes and external_ranks() is not None:
        raise UserError(
            "--config is -, standard input, which torchrun and srun do not give to every rank. "
            "Write the recipe to a file: try --config RECIPE.yaml."
        )
    recipe = read_recipe(recipes, overrides, method=FINETUNE[options.line[1]])
    if options.print_config:
        print(to_yaml(recipe), end="")
        return 0
    metrics = own_metrics(options.metric)
    if metrics and not recipe.eval.max_new_tokens:
        raise UserError(
            f"{metrics[0]} scores answers, but eval.max_new_tokens is "
            f"{'empty' if recipe.eval.max_new_tokens is None else 0}: how long may they be? "
            "Try --eval.max_new_tokens 100."
        )
    if recipes and "out_dir" not in dict(overrides):
        recipe = follow_moved(recipe, Path(recipes[-1]))
    return launch(
        recipe,
        command=options.line,
        overwrite=options.overwrite,
        stop_after=StopAfter.parse(options.stop_after) if options.stop_after is not None else None,
        force=options.force,
        metrics=metrics,
        trusted=options.trust_task_code,
    )
