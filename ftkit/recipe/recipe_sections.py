"""Keys that extensions bring to recipes, and the types of recipes with all keys; no torch.

A row brings a class of keys, of which recipes are then instances, too. Everything that asks a
recipe's fields (reading, help, what a resumed run may change) finds them there as the core's own.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ftkit.errors import UserError
from ftkit.recipe.recipe import LoraRecipe, Method, Recipe
from ftkit.utils.progress import print_shown
from ftkit.utils.registry import Registry

if TYPE_CHECKING:
    from ftkit.recipe.facts import Facts

CORE_RECIPES: dict[Method, type[Recipe]] = {"full": Recipe, "lora": LoraRecipe}
"""Recipes of the methods with the core's keys alone."""
_Keys = TypeVar("_Keys")


@dataclass(frozen=True, kw_only=True)
class Section:
    """Keys of recipes that belong together, and what they change."""

    name: str
    keys: type
    """A frozen dataclass of fields with defaults, each documented in the string below it and of the
    types of `ftkit.recipe.key_types`, as in `Recipe`. A field that is such a dataclass itself is a
    group of keys: qat.weights."""
    check: "Callable[[Facts], list[str]] | None" = None
    """Refuses, by a UserError, what cannot run, with what to use instead; returns notices. None:
    every value runs everywhere."""
    rounds: Callable[[Recipe, bool], str | None] | None = None
    """Returns from which rounded numbers linear layers compute, in words, of a recipe and whether
    it trains (else a result of it is used); None: from their own numbers. The words are part of
    reports, and strategies leave casts to the layers. The row is None if it rounds nothing."""
    layers: str = ""
    """Of a row that rounds: MODULE:FUNCTION, called with the body on the meta device, its base
    model, the recipe and whether it trains. It replaces layers of the body and keeps the names of
    parameters; what it adds to memory is predicted by computing a step with them."""

    encoder: str = ""
    """Of a row that trains parts of a model that compute media: MODULE:CLASS of the
    `ftkit.models.bodies.body.MediaEncoder`."""
    parts: Callable[[Recipe], Sequence[str]] | None = None
    """Returns which parts a recipe trains, by names that the encoder knows: true values of keys
    below the row's name. None: the row has nothing to do with media."""

    @property
    def names(self) -> list[str]:
        """Names of its fields."""
        return [field.name for field in dataclasses.fields(self.keys)]


SECTIONS: Registry[Section] = Registry("recipe_sections", (Section,), core=())


@functools.cache
def sections() -> tuple[Section, ...]:
    """Return the rows whose keys recipes have.

    A row that cannot be used, or has a name that is taken, is left out with a message: recipes are
    read without it.
    """
    found: list[Section] = []
    taken = {field.name for field in dataclasses.fields(LoraRecipe)}
    for name in SECTIONS.names:
        try:
            row = SECTIONS.get(name)
            assert row is not None
            if twice := taken & set(row.names):
                keys = ", ".join(sorted(twice))
                raise UserError(f"The section {name} is left out: recipes already have {keys}.")
        except UserError as error:
            print_shown(str(error), sys.stderr)
            continue
        taken |= set(row.names)
        found.append(row)
    return tuple(found)


@functools.cache
def recipe_type(method: Method) -> type[Recipe]:
    """Return the type of recipes of a method, with the keys of every section."""
    core = CORE_RECIPES[method]
    keys = tuple(row.keys for row in sections())
    return dataclasses.dataclass(frozen=True, kw_only=True)(
        type(core.__name__, (*keys, core), {"__doc__": core.__doc__})
    )


def keys_of(recipe: Recipe, keys: type[_Keys]) -> _Keys:
    """Return the keys of a section in a recipe; their defaults, if it was made without them."""
    return recipe if isinstance(recipe, keys) else keys()


def check_sections(facts: "Facts") -> list[str]:
    """Ask the rules of every section; returns their notices.

    Raises:
        UserError: a value cannot run.
    """
    return [notice for row in sections() if row.check is not None for notice in row.check(facts)]


def rounding_of(recipe: Recipe, *, trains: bool = True) -> str | None:
    """Return from which rounded numbers linear layers compute, in words; None: their own numbers.

    Args:
        recipe: of a run.
        trains: False: where its result is used.
    """
    row = rounding_section(recipe, trains=trains)
    return None if row is None or row.rounds is None else row.rounds(recipe, trains)


def rounding_section(recipe: Recipe, *, trains: bool) -> Section | None:
    """Return the section that rounds the layers of a run, or of its result; None: there is none."""
    for row in sections():
        if row.rounds is not None and row.rounds(recipe, trains) is not None:
            return row
    return None


def trained_parts(recipe: Recipe) -> tuple[Section, Sequence[str]] | None:
    """Return the section whose parts that compute media a recipe trains, and which parts.

    None: it trains none.
    """
    for row in sections():
        if row.parts is not None and (parts := row.parts(recipe)):
            return row, parts
    return None


def without_rounding(recipe: Recipe) -> Recipe:
    """Return a recipe whose layers compute from their own numbers."""
    own: dict[str, Any] = {}
    for row in sections():
        if row.rounds is not None and isinstance(recipe, row.keys):
            plain = row.keys()
            own |= {name: getattr(plain, name) for name in row.names}
    return dataclasses.replace(recipe, **own)
