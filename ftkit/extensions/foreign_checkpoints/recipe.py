"""The recipe of an import, and the position in the data at which its run continues.

What a foreign checkpoint says stands below what the user says.
"""

import dataclasses
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.extensions.foreign_checkpoints.state import ForeignRun, ForeignState
from ftkit.recipe.parsing import Override, read_recipe
from ftkit.recipe.peft_adapter import with_adapter
from ftkit.recipe.recipe import LoraRecipe, Method, Recipe
from ftkit.strategies.optimizers import base_learning_rate
from ftkit.strategies.schedule import Schedule, make_schedule
from ftkit.utils.names import leaves
from ftkit.utils.yaml_files import dump_yaml, load_yaml

_OF_ADAM = ("betas", "eps", "weight_decay")
"""Settings of an optimizer that are taken over where its state says them."""
_LEAST_SHARE = 1e-3
"""Share of the full learning rate below which that one is not computed back."""


class ImportRecipe:
    """A recipe whose defaults come from a foreign checkpoint, step by step."""

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
        self._from_checkpoint = dict(run.recipe_keys())
        # Keys that the user sets win over the checkpoint, also in the learning rate that is
        # computed back.
        given = {key for file in files for key, _ in leaves(load_yaml(Path(file), "--config "))}
        self.given = frozenset(given | {key for key, _ in overrides})
        """Dotted keys that the user sets."""
        self._method: Method | None = run.method
        self.adapter = run.adapter
        """Directory of the adapter's settings, where one is trained and it is known."""
        self.source = run.directory
        self._run = run

    def add(self, keys: Mapping[str, Any]) -> None:
        """Add keys that come from the checkpoint; the user's own keys still win."""
        self._from_checkpoint = _merged(self._from_checkpoint, keys)

    def read(self) -> Recipe:
        """Resolve the recipe with all that is known so far.

        Raises:
            UserError: it is not valid, or says neither base model nor data.
        """
        # As a file, so that one rule merges its keys with those of the user.
        with tempfile.TemporaryDirectory() as directory:
            keys_file = Path(directory) / "checkpoint.yaml"
            with self._run.reading():
                keys_file.write_text(dump_yaml(self._from_checkpoint), encoding="utf-8")
            if "checkpoint_dir" not in self.given | self._from_checkpoint.keys():
                raise UserError(
                    f"{self.source} does not name its base model, or lacks its tokenizer. "
                    "Try --checkpoint_dir MODEL, or --config RECIPE.yaml."
                )
            is_named = any(key.partition(".")[0] == "data" for key in self.given)
            if not is_named and "data" not in self._from_checkpoint:
                raise UserError(
                    f"{self.source} does not name its training data. Try --config RECIPE.yaml "
                    "with data, or --data JSON --data.path FILE."
                )
            recipe = read_recipe([keys_file, *self._files], self._overrides, method=self._method)
        for key, pattern in (("only", recipe.train.only), ("freeze", recipe.train.freeze)):
            if pattern is not None:
                raise UserError(
                    f"train.{key} is {pattern!r}, but ftkit import takes over runs that train an "
                    f"adapter or the whole model. Try --train.{key} null, or begin a new run from "
                    "the model that the other program has saved."
                )
        if not isinstance(recipe, LoraRecipe):
            return recipe
        self.adapter = recipe.adapter or self.adapter
        resolved = with_adapter(recipe)
        assert isinstance(resolved, LoraRecipe), "as it was"
        # The weights come from the checkpoint: the adapter has given only its settings.
        return dataclasses.replace(resolved, adapter=None)

    def gives(self, *names: str) -> bool:
        """Return whether the user sets a key that ends with one of these words."""
        return any(key.rpartition(".")[2] in names for key in self.given)


def optimizer_keys(state: ForeignState) -> dict[str, Any]:
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
            # Taken for SGD; if it is not, the kinds of its state differ, which is refused.
            momentum = {"momentum": settings.get("momentum", 0.9)}
            return {"optimizer": {"class_path": "torch.optim.SGD", "init_args": momentum}}
        return {}
    # torch's Adam and AdamW keep the same state: this setting alone tells them apart.
    is_adam = settings.get("decoupled_weight_decay") is False
    name = "Adam" if is_adam else "AdamW"
    return {"optimizer": {"class_path": f"torch.optim.{name}", "init_args": arguments}}


def continued_rate(
    recipe_source: ImportRecipe, state: ForeignState, samples_per_epoch: int, samples: int
) -> tuple[Recipe, float, str]:
    """The recipe whose next learning rate is that of the foreign run, unless the user sets it.

    The foreign one may follow another curve than ftkit's. Where it has not moved from its first
    value it stays there; else ftkit's curve passes through its next value.

    Args:
        recipe_source: what the user and the checkpoint say.
        state: of the foreign run.
        samples_per_epoch: of the training data.
        samples: consumed so far.

    Returns:
        The recipe, its next learning rate, and a report line about it.
    """
    theirs = state.learning_rate
    if theirs is None:
        recipe = recipe_source.read()
        words = "the learning rate is the recipe's: the checkpoint does not hold one"
        return recipe, _next_rate(recipe, state, samples_per_epoch, samples), words
    if not recipe_source.gives("lr"):
        # Schedulers of torch keep initial_lr beside lr; without it the rate counts as constant.
        is_constant = theirs == state.settings.get("initial_lr", theirs)
        recipe_source.add(_rate_keys(theirs, min_lr=theirs if is_constant else 0.0))
        schedule = _schedule(recipe_source.read(), state, samples_per_epoch, samples)
        # In the warm-up the rate is a share of the full one, whatever the lowest is.
        if state.step < schedule.warmup_steps:
            recipe_source.add(_rate_keys(theirs / schedule.share(state.step)))
        elif not is_constant:
            # Solved for the full rate: theirs = lowest + (full - lowest) * fallen_to.
            lowest = min(recipe_source.read().train.min_lr, theirs)
            fallen_to = dataclasses.replace(schedule, final_share=0.0).share(state.step)
            # Near the end of a schedule the share is almost 0, and dividing by it blows up rounding
            # errors.
            if fallen_to > _LEAST_SHARE:
                recipe_source.add(_rate_keys(lowest + (theirs - lowest) / fallen_to))
    recipe = recipe_source.read()
    ours = _next_rate(recipe, state, samples_per_epoch, samples)
    if math.isclose(ours, theirs, rel_tol=1e-6):
        return recipe, ours, ""
    return (
        recipe,
        ours,
        (f"the learning rate continues at {ours:.3g}, as in the recipe, not at {theirs:.3g}"),
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
        recipe.train, samples_per_epoch, lr, start_step=state.step, start_samples=samples
    )[0]


def _next_rate(recipe: Recipe, state: ForeignState, samples_per_epoch: int, samples: int) -> float:
    schedule = _schedule(recipe, state, samples_per_epoch, samples)
    return base_learning_rate(recipe.optimizer) * schedule.share(state.step)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested keys of both; where both have one, that of the second."""
    found = dict(below)
    for key, value in above.items():
        known = found.get(key)
        both = isinstance(known, dict) and isinstance(value, dict)
        found[key] = _merged(known, value) if both and isinstance(known, dict) else value
    return found


_OWN_ORDER = (
    "not taken over: the order of the samples. ftkit continues at that position of its own order: "
    "until the epoch ends, some samples repeat and others are skipped"
)
_UNUSUAL = 0.05
"""Relative difference of batch sizes that is worth a word."""
_WHOLE = 1e-3
"""Tolerance of counts that are computed from an epoch, which is a float."""


@dataclass(frozen=True)
class PositionInData:
    """Position in the data at which a run continues."""

    samples: int
    """Consumed so far."""
    lines: Sequence[str]
    """Report lines about it."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a recipe that follow from it."""


def position_in_data(
    state: ForeignState, recipe_source: ImportRecipe, of_epoch: int
) -> PositionInData:
    """Samples consumed so far, and what differs between the checkpoint and the recipe.

    transformers' Trainer keeps the epoch, the steps and the batch of one forward pass, but neither
    the size of its data nor how many batches are accumulated for a step. An epoch means samples
    only where the recipe has the same data, which shows in whole numbers: of forward passes, and of
    those in a step.

    Args:
        state: of the foreign run.
        recipe_source: what the user and the checkpoint say.
        of_epoch: samples of an epoch of the recipe's data.
    """
    batch = recipe_source.read().train.global_batch_size
    is_given = recipe_source.gives("global_batch_size", "micro_batch_size")
    lines: list[str] = []
    of_step: int | None = None
    # A count of the program is exact; all else is computed from its epochs or steps.
    if state.samples is not None:
        samples, how = state.samples, "as the checkpoint says"
    elif state.epochs is None:
        samples, how = state.step * batch, f"{state.step:,} steps of train.global_batch_size"
    elif state.micro_batch is None:
        samples, how = round(state.epochs * of_epoch), f"after {state.epochs:.4g} epochs"
    elif (accumulated := _accumulated(state.step, state.epochs, state.micro_batch, of_epoch)) and (
        not is_given or abs(accumulated * state.micro_batch - batch) <= _UNUSUAL * batch
    ):
        of_step = accumulated * state.micro_batch
        samples, how = round(state.epochs * of_epoch), f"after {state.epochs:.4g} epochs"
    else:
        of_step = state.micro_batch
        samples = state.step * of_step
        how = f"{state.step:,} steps of {of_step:,}, its train_batch_size"
        in_step = batch if is_given else of_step
        lines.append(_difference(state.step, state.epochs, of_step, in_step, of_epoch))
    keys = {} if is_given or of_step is None else {"train": {"global_batch_size": of_step}}
    # A smaller difference may come from the shorter last batch of an epoch.
    if not keys and abs(samples - state.step * batch) > _UNUSUAL * max(1, state.step) * batch:
        lines.append(
            f"train.global_batch_size is {batch}, but the steps so far took "
            f"{samples / max(1, state.step):.4g} on average"
        )
    place = f"position in the data: sample {samples:,} ({how}; an epoch has {of_epoch:,})"
    return PositionInData(samples, [place, *lines, _OWN_ORDER], keys)


def _difference(step: int, epochs: float, micro_batch: int, in_step: int, of_epoch: int) -> str:
    """Say why the epoch of a checkpoint means no samples of the recipe's data.

    `micro_batch`, `in_step` and `of_epoch` count samples: of a forward pass on all processes, of a
    step, of an epoch of the recipe's data.
    """
    whole_epochs, further = _passes(epochs, micro_batch, of_epoch)
    if abs(further - round(further)) > _WHOLE:
        passes = whole_epochs * math.ceil(of_epoch / micro_batch) + further
        return (
            f"differs: {epochs:.4g} epochs of {of_epoch:,} samples are {passes:,.4g} batches of "
            f"{micro_batch:,}, not a whole number. Its data differed from the recipe's, or "
            "it left out the last batch of an epoch"
        )
    # Shown to the user, who may know which of the two it was.
    steps = step / epochs if epochs else 0.0
    return (
        f"differs: an epoch of the checkpoint has {steps:,.4g} steps, but {of_epoch:,} samples in "
        f"steps of {in_step:,} are {math.ceil(of_epoch / in_step):,}. Its data differed from the "
        "recipe's, or several batches were accumulated for a step, which it does not record"
    )


def _passes(epochs: float, micro_batch: int, of_epoch: int) -> tuple[int, float]:
    """Whole epochs, and forward passes after them, if the run's data had this size."""
    # The last forward pass of an epoch may be a smaller one.
    in_epoch = math.ceil(of_epoch / micro_batch)
    # An epoch of 1.9999999 is the end of the second.
    whole_epochs = math.floor(epochs + _WHOLE / in_epoch)
    return whole_epochs, (epochs - whole_epochs) * in_epoch


def _accumulated(step: int, epochs: float, micro_batch: int, of_epoch: int) -> int | None:
    """Forward passes in a step, if the run's data had this size; None: it had another.

    `micro_batch` and `of_epoch` count samples: of a forward pass on all processes, of an epoch.
    """
    whole_epochs, further = _passes(epochs, micro_batch, of_epoch)
    if not step or abs(further - round(further)) > _WHOLE:
        return None
    in_epoch = math.ceil(of_epoch / micro_batch)
    done = whole_epochs * in_epoch + round(further)
    # Rounded up: the last step of an epoch has fewer passes, so the mean is lower.
    accumulated = -(-done // step)
    # An epoch's last step may have fewer of them, or they are left out.
    counts = (
        whole_epochs * divide(in_epoch) + round(further) // accumulated
        for divide in (lambda n: -(-n // accumulated), lambda n: n // accumulated)
    )
    return accumulated if accumulated and step in counts else None
