"""The frozen model that a run holds in memory beside the trained one: a teacher, or a reference."""

from contextlib import ExitStack

from ftkit.checkpoint.metadata import BaseIdentity, Metadata
from ftkit.errors import UserError
from ftkit.models.language_model import LanguageModel
from ftkit.models.pretrained.base_model import (
    BaseModel,
    fingerprint,
    implementation_of,
    open_base,
)
from ftkit.models.pretrained.second_model import check_context, check_logits, check_tokens
from ftkit.objectives.reference import Frozen, FrozenReference, Teacher
from ftkit.recipe.objectives import ModelBeside
from ftkit.strategies.distributed import rank
from ftkit.strategies.frozen import frozen
from ftkit.strategies.strategy import Strategy
from ftkit.utils.console.display import Display


def open_beside(
    directory: str,
    beside: ModelBeside,
    base: BaseModel,
    start: Metadata | None,
    *,
    max_seq_length: int,
) -> BaseModel:
    """Open the model, without its weights.

    Args:
        directory: where it is, or random:NAME.
        beside: what it is.
        base: the trained model.
        start: metadata of the checkpoint that the run continues from.
        max_seq_length: tokens of the longest sequence.

    Raises:
        UserError: its tokens are not those of the trained model, or its context is too short.
    """
    # Its fingerprint depends on the implementation, which a resumed run keeps.
    implementation = beside.implementation
    if start is not None and start.beside is not None:
        implementation = implementation_of(start.beside.fingerprint)
    found = open_base(directory, implementation)
    if beside.key == "teacher":
        check_logits(base, found, beside.key)
    check_tokens(base, found, beside.key)
    check_context(found, beside.key, max_seq_length)
    return found


def beside_identity(
    beside: ModelBeside, found: BaseModel, start: Metadata | None
) -> BaseIdentity | None:
    """Identity of the model, on rank 0.

    Args:
        beside: what it is.
        found: the model.
        start: metadata of the checkpoint that the run continues from.

    Raises:
        UserError: it differs from that of the checkpoint.
    """
    if rank() > 0:
        return None
    identity = BaseIdentity(name=beside.name, fingerprint=fingerprint(found))
    known = None if start is None else start.beside
    if start is not None and known is not None and identity.fingerprint != known.fingerprint:
        key = beside.key
        verb = "learned from" if key == "teacher" else "was compared with"
        raise UserError(
            f"{key} {beside.name} is not the model that the run {verb} up to step {start.step} "
            f"({known.name}): its weights differ. Try --{key} {known.name}, or start a new run "
            "with another --out_dir."
        )
    return identity


def load_beside(
    beside: ModelBeside,
    found: BaseModel,
    outlined: LanguageModel,
    strategy: Strategy,
    contexts: ExitStack,
    *,
    max_seq_length: int,
    seed: int,
    display: Display,
) -> Frozen:
    """Load the model, distributed as the plan says; every rank does.

    Args:
        beside: what it is.
        found: the model.
        outlined: the same on the meta device.
        strategy: of the run, set up.
        contexts: it computes until they end.
        max_seq_length: tokens of the longest sequence.
        seed: of the recipe.
        display: shows progress.
    """
    with display.phase(f"loading the {beside.key}") as phase:
        model = contexts.enter_context(
            frozen(
                outlined,
                found,
                strategy,
                strategy.sharding_beside,
                rope_length=max_seq_length,
                seed=seed,
                progress=phase.advance,
            )
        )
    kind = Teacher if beside.key == "teacher" else FrozenReference
    return kind(model, strategy.sharding_beside, strategy.precision.forward_context)
