"""Where training begins: the base model or a checkpoint, and whether both are those of before."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.checkpoint.metadata import (
    BaseIdentity,
    CheckpointError,
    DamagedPart,
    DataIdentity,
    Metadata,
    SeedNames,
)
from ftkit.data.dataset import DataSets
from ftkit.errors import UserError
from ftkit.models.architectures.architecture import Implementation
from ftkit.models.pretrained.added_tokens import with_added_tokens
from ftkit.models.pretrained.base_model import (
    BaseModel,
    fingerprint,
    implementation_of,
    open_base,
    open_without_weights,
)
from ftkit.models.pretrained.model_files import OUTLINE
from ftkit.models.pretrained.places import find_here
from ftkit.recipe.recipe import Recipe
from ftkit.strategies.distributed import rank

if TYPE_CHECKING:
    from ftkit.checkpoint.stored_state import StoredState


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """Where training begins: the base model, or a checkpoint."""

    metadata: Metadata | None = None
    """Metadata of the checkpoint; None: training begins with the base model."""
    stored: "StoredState | None" = None
    """Training state of the checkpoint."""
    directory: Path | None = None
    """Directory of the checkpoint."""
    in_place: bool = False
    """Whether the checkpoint belongs to this run, and not to one from which it branches off."""

    @property
    def step(self) -> int:
        """Optimizer steps already done."""
        return self.metadata.step if self.metadata else 0

    @property
    def samples(self) -> int:
        """Samples already consumed: the position in the data."""
        return self.metadata.samples if self.metadata else 0

    @property
    def warmup_steps(self) -> int | None:
        """Steps of the warm-up of the run so far; None: it begins."""
        return int(self.metadata.schedule["warmup_steps"]) if self.metadata else None

    @property
    def seed_names(self) -> SeedNames:
        """Names by which dropout is seeded: the run keeps those that it began with."""
        return self.metadata.seed_names if self.metadata else "model"

    @property
    def is_validated(self) -> bool:
        """Whether the validation loss of this state is known."""
        return self.metadata is not None and self.metadata.validation_loss is not None


def open_start(checkpoint: Path, metadata: Metadata, own: Path) -> StartingPoint:
    """Open the checkpoint that a run continues from.

    Args:
        checkpoint: its directory.
        metadata: read from it.
        own: directory of the checkpoints of the run itself.

    Raises:
        DamagedPart: a file of the checkpoint is damaged.
        UserError: it cannot be read.
    """
    from ftkit.checkpoint.stored_state import StoredState

    try:
        stored = StoredState.in_checkpoint(checkpoint, metadata)
    except DamagedPart:  # the supervisor may try an earlier checkpoint
        raise
    except CheckpointError as error:
        raise UserError(
            f"{error} Take an earlier checkpoint with --resume STEP; ftkit checkpoints list "
            "shows those there are."
        ) from error
    return StartingPoint(
        metadata=metadata,
        stored=stored,
        directory=checkpoint,
        in_place=checkpoint.resolve().parent == own.resolve(),
    )


def open_base_model(
    directory: str, start: StartingPoint, implementation: Implementation | None
) -> BaseModel:
    """Open the base model of a run, or what the checkpoint that it continues from has of it.

    Args:
        directory: of the model.
        start: where training begins.
        implementation: named by the recipe.

    Raises:
        UserError: it is unusable, or the checkpoint was made with another implementation.
    """
    if start.metadata is None:
        return open_base(directory, implementation)
    # Tensors of a checkpoint have the names of the implementation that wrote it.
    known = implementation_of(start.metadata.base.fingerprint)
    if implementation not in (None, known):
        raise UserError(
            f"model_implementation is {implementation}, but the checkpoint of step {start.step} "
            f"was made with {known}, whose names its tensors have. Try --model_implementation "
            f"{known}."
        )
    if (Path(directory) / OUTLINE).is_file():  # written by the checkpoint, which has the weights
        return open_without_weights(Path(directory))
    return open_base(directory, known)


def identities(
    recipe: Recipe, base: BaseModel, data: DataSets, start: Metadata | None
) -> tuple[BaseIdentity, DataIdentity]:
    """Identities of base model and data; only rank 0 computes them, other ranks get empty ones.

    Args:
        recipe: of the run; names the base model.
        base: its files, or what a checkpoint has of it.
        data: tokenized.
        start: metadata of the checkpoint that the run continues from.

    Raises:
        UserError: they differ from those of the checkpoint.
    """
    checkpoint_dir = recipe.checkpoint_dir
    if rank() > 0:
        return BaseIdentity(name="", fingerprint=""), DataIdentity(fingerprint="", train_samples=0)
    if not base.has_weights:
        assert start is not None
        known = implementation_of(start.base.fingerprint)
        of_base = _local_identity(recipe, known) or start.base
    else:
        of_base = BaseIdentity(name=checkpoint_dir, fingerprint=fingerprint(base))
    if start is not None and of_base.fingerprint != start.base.fingerprint:
        raise UserError(
            f"checkpoint_dir {checkpoint_dir} is not the model that the checkpoint of step "
            f"{start.step} was made from ({start.base.name}): its weights differ. Give that model, "
            "or start a new run with another --out_dir."
        )
    epoch = data.samples_per_epoch
    of_data = DataIdentity(fingerprint=data.fingerprint, train_samples=epoch)
    if start is not None and of_data != start.data:
        raise UserError(
            f"data: these are not the training samples that the checkpoint of step {start.step} "
            f"has learned from ({_count(epoch)} now, {_count(start.data.train_samples)} then; "
            "their text, masks or order differ). Continue with the same data and prompt style, "
            "or start a new run with another --out_dir. If nothing was changed, an earlier ftkit "
            "began the run, which tokenised white space at the end of prompts, or BOS and EOS in "
            "texts, otherwise: continue with that version."
        )
    return of_base, of_data


def _count(samples: int) -> str:
    return f"{samples:,}" if samples else "no known number"


def _local_identity(recipe: Recipe, implementation: Implementation) -> BaseIdentity | None:
    """Identity of a base model that is not needed any more, if all of it is on this machine."""
    with suppress(UserError):
        base = local_base(recipe, implementation)
        if base is not None:
            return BaseIdentity(name=recipe.checkpoint_dir, fingerprint=fingerprint(base))
    return None


def local_base(recipe: Recipe, implementation: Implementation) -> BaseModel | None:
    """The base model of a recipe, if all of it is on this machine."""
    with suppress(UserError):
        found = find_here(recipe.checkpoint_dir)
        if found is not None:
            return with_added_tokens(open_base(str(found), implementation), recipe.added_tokens)
    return None
