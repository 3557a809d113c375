"""The reference of a result, for its evaluation: found, computed or loaded as its run had it."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from ftkit.data.samples.layout import RankLayout
from ftkit.data.samples.sample_set import Samples
from ftkit.data.samples.shapes import FixedShapes
from ftkit.errors import UserError, is_out_of_memory
from ftkit.evaluation.loading import base_of
from ftkit.evaluation.result import Result
from ftkit.evaluation.session import Session, plan_session
from ftkit.evaluation.validation import Wanted
from ftkit.extensions.other_models.reference import (
    BelowAdapter,
    Computed,
    FrozenReference,
    Reference,
)
from ftkit.extensions.other_models.reference_values import ReferenceValues
from ftkit.extensions.other_models.references import (
    ReferenceModel,
    compute_references,
    missing_from,
    reference_model,
    stored_values,
)
from ftkit.extensions.other_models.second_model import check_context, check_tokens
from ftkit.models.bodies.attention import planned_path
from ftkit.models.language_model import LanguageModel
from ftkit.models.lora.adapter_reading import read_adapter
from ftkit.models.pretrained.base_model import (
    BaseModel,
    fingerprint,
    implementation_of,
    open_base,
)
from ftkit.recipe.objectives import is_below_adapter, needs_reference_beside
from ftkit.recipe.options import EvaluateOptions
from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe import LoraRecipe, Quantization
from ftkit.runs.directory import RunDirectory
from ftkit.strategies.frozen import frozen, outline_frozen
from ftkit.strategies.strategy import Strategy, make_strategy
from ftkit.utils.console.display import Display


class ReferenceOfResult:
    """The reference of a result."""

    def __init__(
        self,
        result: Result,
        options: EvaluateOptions,
        base: BaseModel,
        max_seq_length: int,
        wanted: Sequence[Wanted],
    ) -> None:
        """Find it, and compute what has to be computed before the result is loaded.

        Args:
            result: with a recipe.
            options: of the evaluation.
            base: of the result.
            max_seq_length: tokens of the longest sequence.
            wanted: the samples to evaluate on.

        Raises:
            UserError: a model is needed, and not here or another one.
        """
        assert result.recipe is not None
        self._in_every_pass: Reference | None = None
        self._longest = max_seq_length
        self._found: ReferenceValues | BaseModel | None = None
        if not is_below_adapter(result.recipe):
            self._found = _prepared(result, options, base, max_seq_length, wanted)

    @property
    def models(self) -> Sequence[LanguageModel]:
        return () if self._in_every_pass is None else self._in_every_pass.models

    @contextmanager
    def loaded(self, session: Session, display: Display) -> Iterator[None]:
        if self._found is None:
            self._in_every_pass = BelowAdapter(session.loaded.model, session.context)
        if not isinstance(self._found, BaseModel):
            yield
            return
        with _beside(self._found, session, self._longest, display) as reference:
            self._in_every_pass = reference
            yield

    def of(self, samples: Samples) -> Reference:
        if self._in_every_pass is not None:
            return self._in_every_pass
        assert isinstance(self._found, ReferenceValues)
        return Computed(self._found.of(samples))


def _prepared(
    result: Result,
    options: EvaluateOptions,
    base: BaseModel,
    max_seq_length: int,
    wanted: Sequence[Wanted],
) -> ReferenceValues | BaseModel:
    """Find the reference of a result that is not below its adapter.

    Args:
        result: with a recipe.
        options: of the evaluation.
        base: of the result.
        max_seq_length: tokens of the longest sequence.
        wanted: the samples to evaluate on.

    Returns:
        Log-probabilities of the samples, from the checkpoints of the run, else computed now; or a
        model that is not loaded yet, if it has to compute beside the result.

    Raises:
        UserError: the model is needed, and not here or another one.
    """
    assert result.recipe is not None
    if not needs_reference_beside(result.recipe):
        return _reference_values(result, options, base, max_seq_length, wanted)
    try:
        return _open_reference(result, options, base, max_seq_length)
    except UserError as error:
        raise UserError(f"{error}\nIt is needed as the reference of {result.name}.") from None


@contextmanager
def _beside(
    reference: BaseModel, session: Session, max_seq_length: int, display: Display
) -> Iterator[FrozenReference]:
    """Load a reference that computes beside a result; it is there inside the context.

    Args:
        reference: from `_prepared`.
        session: in which the result is loaded.
        max_seq_length: tokens of the longest sequence.
        display: shows progress.

    Raises:
        UserError: the reference does not fit into memory beside the result.
    """
    plan = _quantized(session.plan, session.quantize)
    strategy = make_strategy(plan)
    with ExitStack() as stack:
        try:
            with display.phase("loading the reference", brief=True) as phase:
                model = stack.enter_context(
                    frozen(
                        outline_frozen(reference, plan),
                        reference,
                        strategy,
                        strategy.sharding,
                        rope_length=max_seq_length,
                        seed=plan.recipe.seed,
                        progress=phase.advance,
                    )
                )
        except Exception as error:
            # Libraries raise different types for it.
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"The reference {reference.name} does not fit into the memory of {session.device} "
                f"beside the result, in {plan.precision}. Try --precision bf16-true or "
                "--accelerator cpu."
            ) from None
        yield FrozenReference(model, strategy.sharding, session.context)


def _reference_values(
    result: Result,
    options: EvaluateOptions,
    base: BaseModel,
    max_seq_length: int,
    wanted: Sequence[Wanted],
) -> ReferenceValues:
    """Log-probabilities under the reference: from the run's checkpoints, else computed.

    Raises:
        UserError: some have to be computed, and the reference is not here or is another model.
    """
    store = RunDirectory(result.directory.parent).store
    newest = store.newest()
    # A checkpoint, what lies in one, or the result of a run that has some.
    places = [result.directory, result.directory.parent]
    places += [] if newest is None else [store.path(newest)]
    values = stored_values(wanted, places)
    missing = sum(len(each.numbers) for each in missing_from(values, wanted))
    if not missing:
        return values
    plan = _quantized(*plan_session(result, options))
    strategy = make_strategy(plan)
    try:
        model = _reference_model(result, options, base, max_seq_length, plan, strategy, wanted)
    except UserError as error:
        raise UserError(
            f"{error}\n"
            f"It is needed as the reference of {result.name}, for {missing:,} samples whose "
            "log-probabilities its checkpoints do not have. Samples of the run need no reference: "
            "leave --data, --sets and --max_iters out."
        ) from None
    with Display(None, stream=sys.stderr) as display:
        # Before the result is loaded: two models are never in memory.
        return compute_references(
            wanted, model, strategy, known=places, display=display, warn=display.warning
        )


def _reference_model(
    result: Result,
    options: EvaluateOptions,
    base: BaseModel,
    max_seq_length: int,
    plan: Plan,
    strategy: Strategy,
    wanted: Sequence[Wanted],
) -> ReferenceModel:
    """Describe the reference of the result's run; it is not loaded."""
    recipe, adapter = plan.recipe, None
    reference = _open_reference(result, options, base, max_seq_length)
    if recipe.reference is None and isinstance(recipe, LoraRecipe) and recipe.adapter is not None:
        adapter = read_adapter(recipe.adapter, reference)
    path = planned_path(reference.architecture.attention, plan)
    return reference_model(
        reference,
        plan,
        strategy,
        RankLayout.of(
            plan,
            padding_free=path != "padded",
            attention_cost=0,
            longest=max_seq_length,
            shapes=FixedShapes.of(plan, [one.samples for one in wanted], pads_labels=True),
        ),
        max_seq_length=max_seq_length,
        is_own=recipe.reference is None,
        adapter=adapter,
    )


def _open_reference(
    result: Result, options: EvaluateOptions, base: BaseModel, max_seq_length: int
) -> BaseModel:
    """Open the reference of the result's run, without its weights.

    Raises:
        UserError: it is not here, or is another model.
    """
    assert result.recipe is not None
    if result.recipe.reference is None:
        if result.kind != "adapter":
            return base_of(result, options.reference, "--reference")
        # The adapter needs its base model besides, so one option is enough.
        return base_of(result, options.reference or options.base, "--base")
    name = options.reference or result.recipe.reference
    known = None if result.metadata is None else result.metadata.beside
    found = open_base(name, None if known is None else implementation_of(known.fingerprint))
    check_tokens(base, found, "reference")
    check_context(found, "reference", max_seq_length)
    if known is not None and fingerprint(found) != known.fingerprint:
        raise UserError(
            f"{name} is not the model that the run compared with ({known.name}): its weights "
            "differ. Try --reference PATH with that model."
        )
    return found


def _quantized(plan: Plan, quantize: Quantization | None) -> Plan:
    """Plan with the quantization of a session, as the options of a command say."""
    if not isinstance(plan.recipe, LoraRecipe):
        return plan
    return dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, quantize=quantize))
