"""The starting point of training: the base model, or a checkpoint that the run continues from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ftkit.checkpoint.metadata import CheckpointError, DamagedPart, Metadata
from ftkit.checkpoint.shards import StoredState
from ftkit.errors import UserError
from ftkit.models.architectures.architecture import Implementation
from ftkit.models.pretrained.fingerprint import implementation_of
from ftkit.recipe.recipe import Recipe
from ftkit.runs.job import Job


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """Where training begins."""

    metadata: Metadata | None = None
    """What the checkpoint says; None: training begins with the base model."""
    stored: StoredState | None = None
    """The state of training in it."""
    in_place: bool = False
    """Whether it is a checkpoint of the run itself."""

    @classmethod
    def of(cls, job: Job, metadata: Metadata | None) -> Self:
        """Open the checkpoint that a job names.

        Raises:
            UserError: it is damaged.
        """
        if job.start is None or metadata is None:
            return cls()
        directory = Path(job.start)
        try:
            stored = StoredState.in_checkpoint(directory, metadata)
        except DamagedPart:  # the supervisor may go on from another
            raise
        except CheckpointError as error:
            raise UserError(
                f"{error} Take an earlier checkpoint with --resume STEP; ftkit checkpoints list "
                "shows those there are."
            ) from error
        own = job.directory.store.directory.resolve()
        return cls(metadata=metadata, stored=stored, in_place=directory.resolve().parent == own)

    def implementation(self, recipe: Recipe) -> Implementation | None:
        """Whose code computes the model, if that is known; a run that goes on keeps what it has.

        Args:
            recipe: may ask for one.

        Raises:
            UserError: it asks for another one than the checkpoint was made with.
        """
        asked, metadata = recipe.implementation, self.metadata
        if metadata is None:
            return asked
        known = implementation_of(metadata.base.fingerprint)
        if asked not in (None, known):
            raise UserError(
                f"model_implementation is {asked}, but the checkpoint of step {metadata.step} was "
                f"made with {known}, whose names its tensors have. Try --model_implementation "
                f"{known}."
            )
        return known

    @property
    def step(self) -> int:
        """Optimizer steps done before."""
        return self.metadata.step if self.metadata else 0

    @property
    def samples(self) -> int:
        """Samples they consumed: the position in the data."""
        return self.metadata.samples if self.metadata else 0

    @property
    def is_validated(self) -> bool:
        """Whether the validation loss of this state is known."""
        return self.metadata is not None and self.metadata.validation_loss is not None
