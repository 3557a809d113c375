"""Tokens that are added to the vocabulary of a base model."""

import dataclasses
from collections.abc import Sequence

from ftkit.errors import UserError
from ftkit.models.pretrained.base_model import BaseModel, parameter_shapes, vocabulary_parameters
from ftkit.models.pretrained.model_files import has_tokenizer
from ftkit.models.pretrained.tokenizer import Tokenizer


def with_added_tokens(base: BaseModel, texts: Sequence[str]) -> BaseModel:
    """Return a base model whose tokenizer, embedding and head have further tokens.

    Their rows are the mean of those of all other tokens. Tokens that the vocabulary has already, as
    that of a checkpoint of such a run, stay as they are.

    Args:
        base: with weights, or described by its settings.
        texts: of the tokens; none: the model stays as it is.

    Raises:
        UserError: the vocabulary cannot grow.
    """
    if not texts:
        return base
    if base.architecture.rest_shapes or "vocab_size" not in (base.settings or {"vocab_size": 0}):
        raise UserError(
            f"data.add_tokens is {list(texts)}, but {base.name} is one part of a larger model, "
            "whose vocabulary ftkit cannot change. Remove it with --data.add_tokens null."
        )
    tokenizer = _own_tokenizer(base)
    if tokenizer is None:  # of a model that is not here: all of them may be new
        size = parameter_shapes(base)[base.architecture.embedding][0] + len(texts)
        return dataclasses.replace(_with_rows(base, size), added_tokens=tuple(texts))
    if not (new := tokenizer.lacks(texts)):
        return base
    grown = tokenizer.with_tokens(new)
    rows = max(parameter_shapes(base)[base.architecture.embedding][0], grown.largest_id + 1)
    found = _with_rows(base, rows)
    return dataclasses.replace(found, tokenizer=grown, added_tokens=new, ungrown=base)


def _own_tokenizer(base: BaseModel) -> Tokenizer | None:
    """The tokenizer of a model; None: its files are not here."""
    directory = base.tokenizer_directory
    if base.tokenizer.directory == directory:
        return base.tokenizer
    return Tokenizer(directory) if has_tokenizer(directory) else None


def _with_rows(base: BaseModel, rows: int) -> BaseModel:
    """A model with a vocabulary of this size."""
    settings = {**base.settings, "vocab_size": rows} if base.settings else base.settings
    architecture = base.architecture.with_vocabulary(rows)
    found = dataclasses.replace(base, architecture=architecture, settings=settings)
    before, after = parameter_shapes(base), parameter_shapes(found)
    others = {name for name in after if after[name] != before.get(name)}
    if others := others.difference(vocabulary_parameters(found)):
        raise UserError(
            f"data.add_tokens is set, but {base.name} has {min(others)} for each token, which "
            "ftkit does not extend. Remove it with --data.add_tokens null."
        )
    return found
