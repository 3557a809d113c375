"""The frozen model that a run holds in memory beside the trained one: a teacher, or a reference."""

from contextlib import ExitStack

from ftkit.checkpoint.metadata import BaseIdentity, Metadata
from ftkit.data.samples.sample_set import Samples
from ftkit.errors import UserError
from ftkit.extensions.other_models.reference import Frozen, FrozenReference, Teacher
from ftkit.extensions.other_models.second_model import check_context, check_logits, check_tokens
from ftkit.models.bodies.attention import AttentionPath, common_path, planned_path
from ftkit.models.language_model import LanguageModel
from ftkit.models.pretrained.base_model import (
    BaseModel,
    fingerprint,
    implementation_of,
    open_base,
)
from ftkit.recipe.objectives import ModelBeside
from ftkit.runs.job import Job
from ftkit.strategies.distributed import rank
from ftkit.strategies.frozen import frozen, outline_frozen
from ftkit.strategies.strategy import Strategy
from ftkit.training.setup import RunCompanion, Setup
from ftkit.training.start import StartingPoint
from ftkit.utils.console.display import Display


class ModelInMemory(RunCompanion):
    """A teacher or a reference of a run that computes beside the trained model in every step."""

    def __init__(
        self,
        job: Job,
        beside: ModelBeside,
        start: StartingPoint,
        base: BaseModel,
        max_seq_length: int,
    ) -> None:
        """Open it, without its weights.

        Args:
            job: of the run.
            beside: what it is.
            start: where the run begins or continues.
            base: the trained model.
            max_seq_length: tokens of the longest sequence.

        Raises:
            UserError: its tokens are not those of the trained model, or its context is too short.
        """
        assert job.beside is not None
        self._plan, self._beside, self._start = job.plan, beside, start.metadata
        self._longest = max_seq_length
        self._base = open_beside(
            job.beside, beside, base, start.metadata, max_seq_length=max_seq_length
        )
        self._frozen: Frozen | None = None

    def path(self, own: AttentionPath) -> AttentionPath:
        traits, whose = self._base.architecture.attention, self._base.name
        return common_path(own, planned_path(traits, self._plan, whose=whose))

    def identify(self) -> None:
        self.identity = beside_identity(self._beside, self._base, self._start)

    def outline(self) -> None:
        self.outlined = outline_frozen(self._base, self._plan)

    def load(self, setup: Setup, display: Display) -> None:
        assert self.outlined is not None
        self._frozen = load_beside(
            self._beside,
            self._base,
            self.outlined,
            setup.strategy,
            setup.contexts,
            max_seq_length=self._longest,
            seed=setup.recipe.seed,
            display=display,
        )

    def of(self, samples: Samples) -> Frozen:
        assert self._frozen is not None
        return self._frozen


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
