"""Runs of --sweep, one for every combination of values, and whether one was done already."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from ftkit.errors import UserError
from ftkit.recipe.lora_layers import kept_from
from ftkit.recipe.parsing import Override, read_recipe, to_dict
from ftkit.recipe.recipe import FINETUNE, Recipe
from ftkit.recipe.sweep import OF_THE_SWEEP, SweepRun, variations
from ftkit.utils.names import leaves
from ftkit.utils.yaml_files import STANDARD_INPUT


def runs_of_keys(
    command: str,
    files: Sequence[str],
    sweeps: Sequence[str],
    overrides: Sequence[Override],
    out_dir: Path | None,
) -> list[SweepRun]:
    """Make one run for every combination of the values of some keys.

    Args:
        command: finetune, finetune_lora or finetune_full.
        files: recipes, later ones win.
        sweeps: texts such as `train.micro_batch_size=1,2`.
        overrides: for all runs.
        out_dir: where the runs go; None: the out_dir of the recipe with `-sweep`.

    Raises:
        UserError: nothing is varied, or the recipe cannot be read.
    """
    if str(STANDARD_INPUT) in files:
        raise UserError(
            "--config is -, standard input, but each run of a sweep reads its recipe anew. "
            "Write it to a file: try --config RECIPE.yaml."
        )
    if not sweeps:
        raise UserError(
            "--sweep is missing: which key, and which values? "
            "Try --sweep train.micro_batch_size=1,2,4."
        )
    found = variations(sweeps)
    for key in (key for key, _ in found[0] if key in OF_THE_SWEEP or key in dict(overrides)):
        raise UserError(f"--sweep names {key}, which is set already. Leave it out of --sweep.")
    if out_dir is None:
        # With a variation, because the recipe alone may lack what is varied, such as the base
        # model.
        first = read_recipe(files, [*overrides, *found[0]], method=FINETUNE[command])
        out_dir = first.out_dir.with_name(f"{first.out_dir.name}-sweep")
    return [
        SweepRun(
            name=name,
            command=command,
            files=tuple(files),
            varied=varied,
            overrides=tuple(overrides),
            out_dir=out_dir / name,
        )
        for name, varied in zip(_names(found), found, strict=True)
    ]


def differences(run: SweepRun, asked: Recipe, recorded: Path) -> list[str]:
    """Keys in which a recorded recipe differs from the current one, with both values."""
    there = read_recipe([recorded], method=FINETUNE[run.command])
    # A recorded recipe has the number that auto came to.
    key = asked.train.auto_key
    if key is not None and there.train.auto_key is None:
        train = dataclasses.replace(asked.train, **{key: getattr(there.train, key)})
        asked = dataclasses.replace(asked, train=train)
    # Where none is named, a run that was continued has the precision that it began with.
    precision = there.precision if asked.precision is None else asked.precision
    asked = dataclasses.replace(asked, precision=precision, **kept_from(there, asked))
    now, before = (dict(leaves(to_dict(recipe))) for recipe in (asked, there))
    return [
        f"{key} is {before.get(key)} there and {now.get(key)} here"
        # Keys of both: components may have other arguments, and mappings other keys.
        for key in dict.fromkeys((*now, *before))
        if now.get(key) != before.get(key) and key not in OF_THE_SWEEP
    ]


def _names(found: Sequence[Sequence[Override]]) -> list[str]:
    """Names of directories, such as micro_batch_size=8,precision=bf16-true."""
    keys = [key for key, _ in found[0]]
    tails = [key.rpartition(".")[2] for key in keys]
    # The last part of a key is enough, unless two keys share it.
    heads = [tail if tails.count(tail) == 1 else key for key, tail in zip(keys, tails, strict=True)]
    names: list[str] = []
    for varied in found:
        parts = (f"{head}={value}" for head, (_, value) in zip(heads, varied, strict=True))
        # 120 characters: names of directories have at most 255 bytes.
        name = re.sub(r"[^\w.,+=-]+", "_", ",".join(parts))[:120]
        # Cut or cleaned, two names may be equal: they are numbered.
        same = sum(other.partition("~")[0] == name for other in names)
        names.append(f"{name}~{same + 1}" if same else name)
    return names
