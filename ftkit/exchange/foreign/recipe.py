"""The recipe of an import: what a foreign checkpoint tells, below what the user says."""

import dataclasses
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.exchange.foreign.state import ForeignRun, ForeignState
from ftkit.recipe.parsing import Override, read_recipe
from ftkit.recipe.peft_adapter import with_adapter
from ftkit.recipe.recipe import LoraRecipe, Method, Recipe
from ftkit.strategies.optim.optimizers import base_learning_rate
from ftkit.strategies.optim.schedule import Schedule, make_schedule
from ftkit.utils.names import leaves
from ftkit.utils.yaml_files import dump_yaml, load_yaml

_OF_ADAM = ("betas", "eps", "weight_decay")
"""Settings of an optimizer that are taken over where its state says them."""
_LEAST_SHARE = 1e-3
"""Of the full learning rate, from which that one is not computed back."""


class ImportRecipe:
    """Reads a recipe, with more and more of what the foreign checkpoint tells below it."""

    def __init__(
        self, run: ForeignRun, files: Sequence[str | Path], overrides: Sequence[Override], out: Path
    ) -> None:
        """Read nothing yet.

        Args:
            run: the foreign checkpoint.
            files: recipes of the user, later ones win.
            overrides: keys of the command line.
            out: where the run will lie.
        """
        self._files, self._overrides = files, [*overrides, ("out_dir", str(out))]
        self._told = dict(run.told())
        given = {key for file in files for key, _ in leaves(load_yaml(Path(file), "--config "))}
        self.given = frozenset(given | {key for key, _ in overrides})
        """Dotted keys that the user sets."""
        self._method: Method | None = run.method
        self.adapter = run.adapter
        """Directory of the adapter's settings, where one is trained and it is known."""
        self.source = run.directory
        self._run = run

    def tell(self, keys: Mapping[str, Any]) -> None:
        """Add what the checkpoint tells; the user's own keys still win."""
        self._told = _merged(self._told, keys)

    def read(self) -> Recipe:
        """The recipe as far as it is known.

        Raises:
            UserError: it is not valid, or says neither base model nor data.
        """
        with tempfile.TemporaryDirectory() as directory:
            told = Path(directory) / "told.yaml"
            with self._run.reading():
                told.write_text(dump_yaml(self._told), encoding="utf-8")
            if "checkpoint_dir" not in self.given | self._told.keys():
                raise UserError(
                    f"{self.source} does not say which base model it is of, or has not its "
                    "tokenizer. Try --checkpoint_dir MODEL, or --config RECIPE.yaml."
                )
            if not any(key.partition(".")[0] == "data" for key in self.given):
                raise UserError(
                    f"{self.source} does not say what it is trained on. Try --config RECIPE.yaml "
                    "with data, or --data JSON --data.path FILE."
                )
            recipe = read_recipe([told, *self._files], self._overrides, method=self._method)
        if not isinstance(recipe, LoraRecipe):
            return recipe
        self.adapter = recipe.adapter or self.adapter
        resolved = with_adapter(recipe)
        assert isinstance(resolved, LoraRecipe), "as it was"
        return dataclasses.replace(resolved, adapter=None)

    def gives(self, *names: str) -> bool:
        """Whether the user sets a key that ends with one of these words."""
        return any(key.rpartition(".")[2] in names for key in self.given)


def optimizer_told(state: ForeignState) -> dict[str, Any]:
    """The optimizer of a foreign run, as keys of a recipe."""
    settings = state.settings
    arguments = {
        key: list(value) if isinstance(value, tuple) else value
        for key in _OF_ADAM
        if isinstance(value := settings.get(key), int | float | tuple | list)
    }
    moments = state.moments or {}
    if "exp_avg" not in moments:
        if "momentum_buffer" in moments:
            momentum = {"momentum": settings.get("momentum", 0.9)}
            return {"optimizer": {"class_path": "torch.optim.SGD", "init_args": momentum}}
        return {}
    is_adam = settings.get("decoupled_weight_decay") is False
    name = "Adam" if is_adam else "AdamW"
    return {"optimizer": {"class_path": f"torch.optim.{name}", "init_args": arguments}}


def continued_rate(
    asked: ImportRecipe, state: ForeignState, samples_per_epoch: int, samples: int
) -> tuple[Recipe, float, str]:
    """The recipe whose next learning rate is that of the foreign run, unless the user sets it.

    The foreign one may follow another curve than ftkit's. Where it has not moved from its first
    value it stays there; else ftkit's curve passes through its next value.

    Args:
        asked: what is asked.
        state: of the foreign run.
        samples_per_epoch: of the training data.
        samples: consumed so far.

    Returns:
        The recipe, its next learning rate, and what to tell.
    """
    theirs = state.learning_rate
    if theirs is None:
        recipe = asked.read()
        words = "the learning rate is the recipe's: the checkpoint does not tell its own"
        return recipe, _next_rate(recipe, state, samples_per_epoch, samples), words
    if not asked.gives("lr"):
        is_constant = theirs == state.settings.get("initial_lr", theirs)
        asked.tell(_rate_keys(theirs, min_lr=theirs if is_constant else 0.0))
        schedule = _schedule(asked.read(), state, samples_per_epoch, samples)
        if state.step < schedule.warmup_steps:
            asked.tell(_rate_keys(theirs / schedule.share(state.step)))
        elif not is_constant:
            lowest = min(asked.read().train.min_lr, theirs)
            fallen_to = dataclasses.replace(schedule, final_share=0.0).share(state.step)
            if fallen_to > _LEAST_SHARE:
                asked.tell(_rate_keys(lowest + (theirs - lowest) / fallen_to))
    recipe = asked.read()
    ours = _next_rate(recipe, state, samples_per_epoch, samples)
    if math.isclose(ours, theirs, rel_tol=1e-6):
        return recipe, ours, ""
    return (
        recipe,
        ours,
        (f"the learning rate goes on at {ours:.3g}, as the recipe says, and not at {theirs:.3g}"),
    )


def _rate_keys(lr: float, min_lr: float | None = None) -> dict[str, Any]:
    keys: dict[str, Any] = {"optimizer": {"init_args": {"lr": lr}}}
    if min_lr is not None:
        keys["train"] = {"min_lr": min_lr, "lr_warmup_steps": 0}
    return keys


def _schedule(
    recipe: Recipe, state: ForeignState, samples_per_epoch: int, samples: int
) -> Schedule:
    lr = float(recipe.optimizer["init_args"].get("lr") or 0.0)
    return make_schedule(
        recipe, samples_per_epoch, lr, start_step=state.step, start_samples=samples
    )[0]


def _next_rate(recipe: Recipe, state: ForeignState, samples_per_epoch: int, samples: int) -> float:
    schedule = _schedule(recipe, state, samples_per_epoch, samples)
    return base_learning_rate(recipe) * schedule.share(state.step)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested keys of both; where both have one, that of the second."""
    found = dict(below)
    for key, value in above.items():
        known = found.get(key)
        both = isinstance(known, dict) and isinstance(value, dict)
        found[key] = _merged(known, value) if both and isinstance(known, dict) else value
    return found
