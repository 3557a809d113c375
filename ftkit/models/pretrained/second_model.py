"""Checks of a second model, which computes on the token ids of the one that is trained."""

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import HEAD
from ftkit.models.pretrained.base_model import BaseModel


def check_tokens(base: BaseModel, other: BaseModel, key: str) -> None:
    """Refuse a model whose tokens are not those of the trained model.

    Args:
        base: the trained model.
        other: the second one.
        key: of the recipe, which names it.

    Raises:
        UserError: a token of the trained model has another id in it, or none.
    """
    own, others = base.tokenizer.vocabulary, other.tokenizer.vocabulary
    differing = next((token for token, i in own.items() if others.get(token) != i), None)
    if differing is None:
        return
    found = others.get(differing)
    raise UserError(
        f"{key} is {other.name}, whose vocabulary differs from that of {base.name}: "
        f"{differing!r} is {'no token' if found is None else f'token {found}'} there, but token "
        f"{own[differing]} here. Give a model with the same tokenizer, usually one of the same "
        "family."
    )


def check_context(other: BaseModel, key: str, max_seq_length: int) -> None:
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


def check_logits(base: BaseModel, other: BaseModel, key: str) -> None:
    """Refuse a model whose distributions are not over as many tokens as the trained model's.

    Args:
        base: the trained model.
        other: the second one.
        key: of the recipe, which names it.

    Raises:
        UserError: it has more or fewer logits, or predicts no tokens.
    """
    if other.architecture.scores:
        raise UserError(
            f"{key} is {other.name}, a reward model, which predicts no tokens. Give the model "
            "that it was made of."
        )
    own, others = (_logits(one) for one in (base, other))
    if own != others:
        raise UserError(
            f"{key} is {other.name}, whose vocabulary has {others:,} entries, but that of "
            f"{base.name} has {own:,}, and distributions are compared entry by entry. Give a model "
            "with the same vocabulary."
        )


def _logits(base: BaseModel) -> int:
    return base.architecture.parameter_shapes(tied=False)[HEAD][0]
