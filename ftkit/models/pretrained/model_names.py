"""Messages about models by name: the key that a name stands under, and similar names."""

from collections.abc import Iterator
from contextlib import contextmanager

from ftkit.errors import UserError
from ftkit.recipe.implementations import IMPLEMENTATIONS


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Have messages about a model name the key of the recipe that it stands under.

    Raises:
        UserError: as in the block.
    """
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("checkpoint_dir", key)) from error


def suggestion(name: str) -> str:
    """Suggest models with a similar name, as a sentence; "" if there are none."""
    names = nearest_names(name)
    return f" Did you mean {' or '.join(names)}?" if names else ""


def listed(names: list[str]) -> str:
    """Join names into a phrase, with at most three of them."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def nearest_names(name: str) -> list[str]:
    """Hub names of models that implementations know, spelled like the given one; up to 3."""
    import difflib

    by_spelling: dict[str, str] = {}
    for row in IMPLEMENTATIONS:
        by_spelling |= row.known_names()
    # More than are shown, because several spellings may mean the same model.
    close = difflib.get_close_matches(name.lower(), by_spelling, n=6, cutoff=0.7)
    # A copy of another organisation has the name alone.
    if (alone := name.split("/")[-1].lower()) in by_spelling:
        close.insert(0, alone)
    return list(dict.fromkeys(by_spelling[spelling] for spelling in close))[:3]


def nearest_types(name: str) -> list[str]:
    """Model types of transformers that are spelled like a name; up to 3."""
    import difflib

    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return difflib.get_close_matches(name.lower(), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, cutoff=0.7)
