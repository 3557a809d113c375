"""Checks of a second model, which computes on the token ids of the one that is trained."""

import filecmp
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftkit.errors import UserError
from ftkit.models.pretrained.model_files import (
    TOKENIZER_FILES,
    has_tokenizer,
    is_classifier,
    read_json,
)
from ftkit.models.pretrained.model_names import naming
from ftkit.models.pretrained.places import fetch_settings, settings_directory
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.implementations import HF, layout_in
from ftkit.utils.confinement import confined

if TYPE_CHECKING:
    from ftkit.models.pretrained.base_model import BaseModel

_SETTINGS = "tokenizer_config.json"


def check_files(name: str, other: str, key: str, *, token: str | None = None) -> None:
    """Refuse a model by its settings and tokenizer, before weights are downloaded.

    What is not on this machine, and no hub offers without the weights, is checked when the model is
    opened.

    Args:
        name: of the trained model, as `find_or_download` takes it.
        other: of the second one.
        key: of the recipe, which names the second one.
        token: of a Hugging Face account. Default: $HF_TOKEN.

    Raises:
        UserError: as `check_tokens`, and for a teacher as `check_logits`.
    """
    for one in (name, other):
        fetch_settings(one, token=token)
    own = settings_directory(name)
    with naming(key):
        others = settings_directory(other)
    if own is None or others is None:
        return
    # Usually both are of one family: two tokenizers need not be built.
    has_both = has_tokenizer(own) and has_tokenizer(others)
    if has_both and not _has_same_tokenizer(own, others):
        # In another process: transformers builds tokenizers, which imports torch.
        function = f"{__name__}:check_directories"
        confined(function, name, str(own), other, str(others), key, file=own)
    # LitGPT's settings may leave out how far a vocabulary is padded.
    if key == "teacher" and layout_in(own) == layout_in(others) == HF:
        settings = [read_json(one / "config.json") for one in (own, others)]
        if is_classifier(settings[1]):
            raise _without_tokens(other, key)
        of_own, of_other = (_size_of(one) for one in settings)
        if of_own is not None and of_other is not None:
            _check_sizes(name, of_own, other, of_other, key)


def check_directories(name: str, own: str, other: str, others: str, key: str) -> None:
    """Refuse a model by its tokenizer: `check_tokens` for directories without weights."""
    _check_vocabularies(name, Tokenizer(Path(own)), other, Tokenizer(Path(others)), key)


def _has_same_tokenizer(own: Path, others: Path) -> bool:
    """Return whether what decides ids is the same in two directories."""

    def rules(directory: Path) -> tuple[dict[str, Any], Any]:
        settings = read_json(directory / _SETTINGS)
        settings.pop("chat_template", None)
        return settings, read_json(directory / "config.json").get("model_type")

    def is_same(name: str) -> bool:
        files = own / name, others / name
        if not all(file.is_file() for file in files):
            return not any(file.exists() for file in files)
        return filecmp.cmp(*files, shallow=False)

    names = {name for name in TOKENIZER_FILES if not name.startswith("chat_template")}
    return rules(own) == rules(others) and all(map(is_same, names - {_SETTINGS}))


def check_tokens(base: "BaseModel", other: "BaseModel", key: str) -> None:
    """Refuse a model whose tokens are not those of the trained model.

    Args:
        base: the trained model.
        other: the second one.
        key: of the recipe, which names it.

    Raises:
        UserError: a token of the trained model has another id in it, or none.
    """
    _check_vocabularies(base.name, base.tokenizer, other.name, other.tokenizer, key)


def check_context(other: "BaseModel", key: str, max_seq_length: int) -> None:
    """Refuse a model that cannot take sequences as long as those of the run.

    Args:
        other: the second model.
        key: of the recipe, which names it.
        max_seq_length: tokens of the longest sequence.

    Raises:
        UserError: it was built for shorter ones.
    """
    longest = other.architecture.context_length
    if longest < max_seq_length:
        raise UserError(
            f"{key} is {other.name}, which takes at most {longest:,} tokens, but sequences may "
            f"have {max_seq_length:,}. Try --train.max_seq_length {longest}."
        )


def check_logits(base: "BaseModel", other: "BaseModel", key: str) -> None:
    """Refuse a model whose distributions are not over as many tokens as the trained model's.

    Args:
        base: the trained model.
        other: the second one.
        key: of the recipe, which names it.

    Raises:
        UserError: it has more or fewer logits, or predicts no tokens.
    """
    if other.architecture.scores:
        raise _without_tokens(other.name, key)
    _check_sizes(base.name, _logits(base), other.name, _logits(other), key)


def _check_vocabularies(name: str, own: Tokenizer, other: str, others: Tokenizer, key: str) -> None:
    ids = others.vocabulary
    differing = next((token for token, i in own.vocabulary.items() if ids.get(token) != i), None)
    if differing is None:
        return
    found = ids.get(differing)
    raise UserError(
        f"{key} is {other}, whose vocabulary differs from that of {name}: "
        f"{differing!r} is {'no token' if found is None else f'token {found}'} there, but token "
        f"{own.vocabulary[differing]} here. Give a model with the same tokenizer, usually one of "
        "the same family."
    )


def _check_sizes(name: str, own: int, other: str, others: int, key: str) -> None:
    if own != others:
        raise UserError(
            f"{key} is {other}, whose vocabulary has {others:,} entries, but that of "
            f"{name} has {own:,}, and distributions are compared entry by entry. Give a model "
            "with the same vocabulary."
        )


def _without_tokens(other: str, key: str) -> UserError:
    return UserError(
        f"{key} is {other}, a reward model, which predicts no tokens. Give the model that it was "
        "made of."
    )


def _logits(base: "BaseModel") -> int:
    from ftkit.models.architectures.architecture import HEAD  # needs torch

    return base.architecture.parameter_shapes(tied=False)[HEAD][0]


def _size_of(settings: Mapping[str, Any]) -> int | None:
    """Entries of the vocabulary in config.json; None: it does not say so where others do."""
    of_language = settings.get("text_config")  # of a multimodal model
    size = (of_language if isinstance(of_language, dict) else settings).get("vocab_size")
    return size if isinstance(size, int) else None
