"""The data source of a recipe, and those that it is validated on."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ftkit.data.own_data import KEYS_OF_SETS, OwnData
from ftkit.data.source_rows import DATA_SOURCES, OWN_NAME
from ftkit.data.spec import OWN_DATA, DataSource
from ftkit.errors import UserError
from ftkit.recipe.objectives import Preference, objective_row
from ftkit.recipe.plugin import require_own, short_names
from ftkit.recipe.recipe import Component, Recipe
from ftkit.utils.names import column_name, nearest
from ftkit.utils.registry import imported

STREAMING = ("LitData", "MicroLlama", "OpenWebText", "TextFiles", "TinyLlama", "TinyStories")
"""Data modules of LitGPT for pretraining."""
_UNFIT = re.compile(r"[^A-Za-z0-9_-]+")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Allowed names of sets, which become columns of loggers and keys on command lines."""


def data_source(data: Component, *, preference: Preference | None = None) -> DataSource:
    """Make the data source of a recipe, with checked options.

    The keys of LitGPT's modules are checked when they are read.

    Args:
        data: of the recipe.
        preference: how records say which answers are better; None: they do not.

    Raises:
        UserError: unknown class or key, or a value out of range.
    """
    if preference is not None:
        return data_source(data).of_preference(preference)
    class_path = data["class_path"]
    if (own := DATA_SOURCES.held.get(class_path)) is not None:
        return own.source.of(data)
    require_own("data", class_path)
    package, _, name = class_path.rpartition(".")
    if package in ("", "litgpt.data"):
        if (row := DATA_SOURCES.get(name)) is not None:
            return row.source.of(data)
        if name in STREAMING:
            raise UserError(
                f"data is {class_path}, which streams unlabelled text for pretraining; "
                f"fine-tuning needs records of instruction and output.\nTry {OWN_DATA}."
            )
    if package == "ftkit.data" and name == OWN_NAME:
        return OwnData.of(data)
    known = [*DATA_SOURCES.names, *short_names(DATA_SOURCES.held)]
    near = nearest(name, known) or OWN_DATA.removeprefix("--data ")
    raise UserError(
        f"data is {class_path}, but it has to be one of {', '.join(known)}, or a class of "
        f"--plugin FILE.py.\nTry --data {near}."
    )


def validation_sets(
    data: Component, sets: Mapping[str, Any] | None, *, preference: Preference | None = None
) -> dict[str, DataSource]:
    """Make the sources of eval.sets by name; all of their records are held out.

    Args:
        data: of the recipe; the sets are rendered as they are.
        sets: of the recipe; an empty one is not there.
        preference: how records say which answers are better; None: they do not.

    Raises:
        UserError: a name that cannot be one, an unknown key, or a value out of range.
    """
    given = {name: entry for name, entry in (sets or {}).items() if entry is not None}
    if not given:
        return {}
    source = data_source(data)
    parts = source.parts()
    taken = {column_name(part.name): part.name for part in parts if len(parts) > 1}
    rendering = source.rendering()
    for name in given:
        if name in KEYS_OF_SETS:
            raise UserError(
                f"eval.sets.{name} is {given[name]!r}, but {name} is a key of a set, and each set "
                f"has a name before its keys.\nTry --eval.sets.NAME.{name} {given[name]}."
            )
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            fit = _UNFIT.sub("_", name).strip("_") if isinstance(name, str) else f"set_{name}"
            raise UserError(
                f"eval.sets has a set {name!r}, but names are texts of letters, digits, _ and -.\n"
                f"Name it {fit or 'code'}."
            )
        if name in taken:
            raise UserError(
                f"eval.sets.{name} has the name of a source, {taken[name]} of data.sources: the "
                f"losses of both would have one column.\nName it {name}_set."
            )
    made = {name: OwnData.validation_set(name, entry, rendering) for name, entry in given.items()}
    if preference is None:
        return dict(made)
    return {name: one.of_preference(preference) for name, one in made.items()}


_OF_EPOCHS = (
    ("train", "global_batch_tokens", "--train.global_batch_tokens null"),
    ("train", "step_ends_with_epoch", "--train.step_ends_with_epoch false"),
    ("train", "lr_warmup_fraction", "--train.lr_warmup_fraction null"),
    ("train", "save_interval_epochs", "--train.save_interval_epochs null"),
    ("eval", "interval_epochs", "--eval.interval_epochs null"),
)
"""Keys that need the length of an epoch, with a change that works without it."""


def check_run_length(recipe: Recipe) -> None:
    """Refuse a run of which its data do not say when it ends.

    Raises:
        UserError: nothing ends it, or a key counts epochs whose length nobody knows; or tokens are
            counted where epochs are.
    """
    train, source = recipe.train, data_source(recipe.data)
    name = recipe.data["class_path"]
    if not source.stream_place:
        if train.max_tokens is not None:
            raise UserError(
                f"train.max_tokens is {train.max_tokens}, but fine-tuning on data {name} counts "
                "epochs or steps. Try --train.max_tokens null --train.max_steps 100."
            )
        return
    if train.max_steps is None and train.max_tokens is None:
        raise UserError(
            f"data is {name}, of which nobody knows how many samples an epoch has, and "
            "train.max_steps and train.max_tokens are both empty: how long to train? "
            "Try --train.max_steps 1000."
        )
    for section, key, works in _OF_EPOCHS:
        if value := getattr(getattr(recipe, section), key):
            shown = str(value).lower() if isinstance(value, bool) else value
            raise UserError(
                f"{section}.{key} is {shown}, but data is {name}, of which nobody knows how many "
                f"samples an epoch has. Try {works}."
            )
    source.check_run(train)


def pinned(data: Component, saved: Component | None) -> Component:
    """The data of a run, which mean the same for every rank and when it is resumed.

    Args:
        data: of the recipe.
        saved: of the checkpoint that the run continues from; None: of none.

    Raises:
        UserError: they are not there.
    """
    options = data_source(data).pinned({} if saved is None else saved["init_args"])
    return Component(class_path=data["class_path"], init_args=data["init_args"] | options)


def settled(recipe: Recipe) -> Recipe:
    """The recipe with what its data decide of its objective, such as the names of classes.

    Raises:
        UserError: they are not there, or decide nothing.
    """
    row = objective_row(recipe.objective["class_path"])
    if not row.settle_place:
        return recipe
    options = imported(row.settle_place)(recipe)
    return replace(recipe, objective=recipe.objective | {"init_args": options})


def check_data(
    data: Component,
    sets: Mapping[str, Any] | None = None,
    *,
    preference: Preference | None = None,
) -> None:
    """Refuse data whose names, values or files are wrong, before anything is read.

    Args:
        data: of a recipe.
        sets: further ones to validate on, eval.sets.
        preference: how its records say which answers are better; None: they do not.

    Raises:
        UserError: unknown class or key, value out of range, a missing file, or data without
            preferences.
    """
    made = data_source(data, preference=preference)
    for source in (made, *validation_sets(data, sets).values()):
        source.files()
