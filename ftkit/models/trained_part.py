"""The part of a model that full fine-tuning trains: parameters chosen by their names."""

import difflib
from collections.abc import Iterable

import regex
import torch.nn as nn

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import HEAD, Architecture
from ftkit.models.lora.targets import names_of, our_name
from ftkit.models.pretrained.base_model import BaseModel, parameter_shapes
from ftkit.recipe.recipe import Train

_MATCH_S = 1.0
"""Time limit for one name; a match takes microseconds."""
_NUMBERED = regex.compile(r"\{(first|last) ([1-9]\d*)\}")
"""Numbers of layers in an expression, counted from either end."""
_LANGUAGE = "{language}"
"""In an expression: every parameter of the language model, none beside it."""
_EXAMPLES = {"only": "'layers[.]0[.]'", "freeze": "embed_tokens"}


def freeze_rest(model: nn.Module, base: BaseModel, train: Train) -> None:
    """Freeze the parameters of a model that a recipe does not choose by their names.

    Args:
        model: outlined, with all parameters trained that can be.
        base: that it is outlined from.
        train: `only` and `freeze`, at least one of them.

    Raises:
        UserError: as `trained_names`.
    """
    chosen = trained_names(base, train)
    for name, parameter in model.named_parameters():
        if our_name(name) not in chosen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise _all_frozen(base, train)  # such as tables, which are never trained


def trained_names(base: BaseModel, train: Train) -> set[str]:
    """Our names of the parameters that a recipe trains, from the settings of its model alone.

    Args:
        base: whose parameters they are.
        train: the recipe's choice, at least `only` or `freeze`.

    Raises:
        UserError: an expression matches nothing, nothing is left to train, or the tied weights of
            the model are to be untied at the same time.
    """
    names = {ours: _names_of(base, ours) for ours in parameter_shapes(base)}
    chosen = set(names)
    for key, pattern in (("only", train.only), ("freeze", train.freeze)):
        if pattern is not None:
            whole = _written_out(pattern, base.architecture)
            matching = {ours for ours, theirs in names.items() if _matches(key, whole, theirs)}
            if not matching:
                raise _unmatched(key, pattern, base, names.values())
            chosen = chosen & matching if key == "only" else chosen - matching
    if not chosen:
        raise _all_frozen(base, train)
    if train.tie_embeddings not in (None, base.tied):
        # A frozen weight is that of the base model, which must know it by the same name.
        raise UserError(
            f"train.tie_embeddings is {str(train.tie_embeddings).lower()}, unlike in {base.name}, "
            "but train.only and train.freeze train a part of the model as it is. Try "
            "--train.tie_embeddings null."
        )
    if base.source is not None:  # the output layer of a new reward model has no weights to keep
        chosen.add(HEAD)
    return chosen


def _written_out(pattern: str, architecture: Architecture) -> str:
    """Write out what an expression names: '{last 2}' of 8 layers becomes '(?:6|7)'."""
    layers = architecture.layers
    beside = "|".join(regex.escape(f"{name}.") for name in architecture.beside)
    pattern = pattern.replace(_LANGUAGE, f"^(?!{beside})" if beside else "^")

    def numbers(match: regex.Match[str]) -> str:
        count = min(int(match[2]), layers)
        found = range(count) if match[1] == "first" else range(layers - count, layers)
        return f"(?:{'|'.join(map(str, found))})"

    return _NUMBERED.sub(numbers, pattern)


def _all_frozen(base: BaseModel, train: Train) -> UserError:
    given = " and ".join(
        f"train.{key} {pattern!r}"
        for key, pattern in (("only", train.only), ("freeze", train.freeze))
        if pattern is not None
    )
    return UserError(
        f"With {given} every parameter of {base.name} is frozen: nothing is left to train. Try "
        "--train.freeze null, or an expression that matches other names."
    )


def _names_of(base: BaseModel, ours: str) -> list[str]:
    """Hugging Face's names of a parameter; two for a part of a fused layer and tied weights."""
    every = [ours]
    if base.tied and ours == base.architecture.embedding:
        every.append(HEAD)
    found = []
    for one in every:
        module, _, kind = one.rpartition(".")
        found += [f"{theirs}.{kind}" for theirs in names_of(base, module)] if module else [kind]
    return found


def _matches(key: str, pattern: str, names: list[str]) -> bool:
    try:
        # A recipe may come from elsewhere, and `re` has no time limit.
        return any(regex.search(pattern, name, timeout=_MATCH_S) for name in names)
    except TimeoutError:
        problem = "takes too long to match against the name of a parameter"
    except regex.error as error:
        problem = f"is not a regular expression ({error})"
    raise UserError(
        f"train.{key} is {pattern!r}, which {problem}. Try --train.{key} {_EXAMPLES[key]}."
    )


def _unmatched(key: str, pattern: str, base: BaseModel, names: Iterable[list[str]]) -> UserError:
    """The error of an expression that matches no name, with the nearest ones."""
    every = [name for several in names for name in several]
    words = list(dict.fromkeys(word for name in every for word in name.split(".")))
    asked = regex.findall(r"[A-Za-z]\w+", pattern)
    close = [
        found
        for one in asked
        if not any(one in word for word in words)
        for found in difflib.get_close_matches(one, words, n=2, cutoff=0.6)
    ]
    # Names that have what is known of it, such as the layers of a model that has fewer.
    near = [name for name in every if all(one in name for one in asked)] or every
    module = near[-1].rpartition(".")[0]
    advice = f"Did you mean {' or '.join(close)}?" if close else f"Try --train.{key} {module}."
    return UserError(
        f"train.{key} is {pattern!r}, which matches no parameter of {base.name}: its names go from "
        f"{near[0]} to {near[-1]}. {advice}"
    )
