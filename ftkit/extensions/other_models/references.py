"""The reference of a run: in every pass, or computed once, before there is another model."""

import dataclasses
import gc
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric.utilities import move_data_to_device
from safetensors import SafetensorError

from ftkit.checkpoint.metadata import REFERENCE
from ftkit.data.dataset import DataSets
from ftkit.data.media import with_media
from ftkit.data.samples.layout import FILLER, IntArray, RankLayout
from ftkit.data.samples.loader import inference_loader
from ftkit.data.samples.sample_set import Samples
from ftkit.data.samples.sampler import StepOrder
from ftkit.errors import UserError
from ftkit.evaluation.validation import Wanted
from ftkit.extensions.other_models.reference import (
    BelowAdapter,
    Computed,
    Reference,
)
from ftkit.extensions.other_models.reference_values import (
    ReferenceCache,
    ReferenceValues,
    read_values,
    write_values,
)
from ftkit.extensions.other_models.second_model import check_context, check_tokens
from ftkit.models.bodies.attention import planned_path
from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.lora.adapter_reading import Adapter, read_adapter
from ftkit.models.pretrained.base_model import BaseModel, fingerprint, open_base
from ftkit.objectives.companion import sequence_log_probabilities
from ftkit.recipe.hubs import or_download
from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe import LoraRecipe
from ftkit.recipe.recipe_sections import without_rounding
from ftkit.runs.job import Job
from ftkit.strategies.distributed import rank, sum_over_ranks
from ftkit.strategies.frozen import frozen, outline_frozen
from ftkit.strategies.strategy import Strategy, compute_dtype, parameter_dtype
from ftkit.training.journal import Journal
from ftkit.training.setup import RunCompanion, Setup
from ftkit.training.start import local_base
from ftkit.utils.accelerators.use import free_cached_memory, sum_dtype
from ftkit.utils.console.display import Display
from ftkit.utils.progress import OnProgress
from ftkit.version import __version__

# Each exchange sums an array over all ranks: many samples, so that they seldom wait for each other.
_SAMPLES_AT_ONCE = 512
"""Samples that each rank computes before the ranks exchange what they have found."""
_SAVED_EVERY_S = 60.0
"""Seconds of work that an interruption may cost."""


class BelowAdapterInRun(RunCompanion):
    """The trained model without its adapter, as the reference of a run."""

    _reference: BelowAdapter

    def prepare(self, setup: Setup, journal: Journal) -> None:
        self._reference = BelowAdapter(setup.model, setup.strategy.precision.forward_context)

    def of(self, samples: Samples) -> Reference:
        return self._reference


class ComputedBefore(RunCompanion):
    """A reference of a run whose log-probabilities are computed before the first step."""

    _values: ReferenceValues

    def __init__(self, job: Job, base: BaseModel, max_seq_length: int) -> None:
        """Open the reference, if it is here and not the base model itself.

        Args:
            job: of the run.
            base: the trained model.
            max_seq_length: tokens of the longest sequence.

        Raises:
            UserError: its tokens are not those of the trained model, or its context is too short.
        """
        self._other = None if job.reference is None else open_base(job.reference)
        if self._other is not None:
            check_tokens(base, self._other, "reference")
            check_context(self._other, "reference", max_seq_length)

    def prepare(self, setup: Setup, journal: Journal) -> None:
        recipe, start = setup.recipe, setup.start
        base, adapter = self._other, None
        if recipe.reference is None:
            base = setup.base
            if not base.has_weights:  # what a checkpoint has of it
                base = local_base(recipe, base.architecture.implementation)
            if isinstance(recipe, LoraRecipe) and recipe.adapter is not None:
                adapter = read_adapter(recipe.adapter, setup.base)
        model = None
        if base is not None:
            model = reference_model(
                base,
                setup.plan,
                setup.strategy,
                setup.layout,
                max_seq_length=setup.max_seq_length,
                is_own=recipe.reference is None,
                adapter=adapter,
            )
        journal.recorder.enter("reference")
        self._values = compute_references(
            samples_of_run(setup.data, setup.further_samples, setup.order, setup.validation_limit),
            model,
            setup.strategy,
            known=() if start.directory is None else (start.directory,),
            display=journal.display,
            warn=journal.warn,
        )
        journal.recorder.enter("set_up")

    def of(self, samples: Samples) -> Reference:
        return Computed(self._values.of(samples))

    def write(self, directory: Path) -> list[Path]:
        write_values(self._values, directory / REFERENCE)
        return [directory / REFERENCE]


@dataclass(frozen=True, kw_only=True)
class ReferenceModel:
    """The model that log-probabilities are computed with."""

    key: Mapping[str, object]
    """What its numbers depend on; empty on ranks other than 0."""
    load: Callable[[OnProgress], AbstractContextManager[LanguageModel]]
    """Loads the model, which is there inside the context."""
    layout: RankLayout
    """Layout of its micro-batches on this rank."""


def reference_model(
    base: BaseModel,
    plan: Plan,
    strategy: Strategy,
    layout: RankLayout,
    *,
    max_seq_length: int,
    is_own: bool,
    adapter: Adapter | None = None,
) -> ReferenceModel:
    """Describe the reference of a run, without loading it.

    Args:
        base: the model whose weights are read.
        plan: of the run.
        strategy: of the run, connected.
        layout: of training on this rank.
        max_seq_length: tokens of the longest sequence.
        is_own: whether training begins with this model, adapted and quantised by the recipe;
            otherwise it is computed as it is, but quantised as the trained one.
        adapter: values of an adapter with which training begins.
    """
    recipe, architecture = plan.recipe, base.architecture
    path = planned_path(architecture.attention, plan, whose=base.name)

    def load(progress: OnProgress) -> AbstractContextManager[LanguageModel]:
        model = outline_frozen(base, plan)
        if is_own:
            kernel = model.kernel
            # A reference is not rounded, whether it is computed before training or beside it.
            plain = without_rounding(recipe)
            model = outline(base, plain, parameter_dtype(plan), compute_dtype(plan))
            model.kernel = kernel
        return frozen(
            model,
            base,
            strategy,
            strategy.sharding,
            rope_length=min(architecture.context_length, max_seq_length),
            seed=recipe.seed,
            adapter=None if adapter is None else adapter.tensors,
            progress=progress,
        )

    key: dict[str, object] = {}
    if rank() == 0:  # the only one that reads and writes the cache
        # Whatever changes a digit. Strategy, devices and micro-batches do not, beyond rounding.
        key = {
            "model": fingerprint(base),
            "adapter": None if adapter is None else _digest(adapter),
            "tied": recipe.train.tie_embeddings,
            "precision": plan.precision,
            "parameters": str(parameter_dtype(plan)),
            "quantize": recipe.quantize if isinstance(recipe, LoraRecipe) else None,
            "version": __version__,
        }
    return ReferenceModel(
        key=key,
        load=load,
        layout=dataclasses.replace(layout, padding_free=path != "padded"),
    )


def _digest(adapter: Adapter) -> str:
    """Checksum of an adapter's values and settings."""
    digest = hashlib.sha256(json.dumps(adapter.changes, sort_keys=True, default=str).encode())
    for name, tensor in sorted(adapter.tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def samples_of_run(
    data: DataSets, further: Samples | None, order: StepOrder, validation_limit: int
) -> list[Wanted]:
    """List what a run trains on and validates on.

    Args:
        data: of the run.
        further: samples of other sets to validate on.
        order: of the steps to come.
        validation_limit: validation samples of the data.
    """
    # A run of a few steps takes a part of its data; all of them would be a pass for nothing.
    is_taken = np.zeros(len(data.train), dtype=np.bool_)
    left = len(is_taken)
    for step in range(order.start_step, order.total_steps):
        taken = np.unique(order.samples(step))
        left -= int((~is_taken[taken]).sum())
        is_taken[taken] = True
        if not left:
            break
    wanted = [Wanted(samples=data.train, numbers=np.flatnonzero(is_taken))]
    held_out = np.arange(min(validation_limit, len(data.val)))
    wanted.append(Wanted(samples=data.val, numbers=held_out))
    if further is not None:
        wanted.append(Wanted(samples=further, numbers=np.arange(len(further))))
    return wanted


def stored_values(wanted: Sequence[Wanted], checkpoints: Iterable[Path]) -> ReferenceValues:
    """Read the log-probabilities of some samples that checkpoints hold.

    Args:
        wanted: the data sets.
        checkpoints: their directories; those without any are passed over.

    Raises:
        OSError, SafetensorError: a file cannot be read.
    """
    values = ReferenceValues(one for each in wanted for one in each.samples.sets)
    for directory in checkpoints:
        values.add(read_values(directory / REFERENCE))
    return values


def missing_from(values: ReferenceValues, wanted: Sequence[Wanted]) -> list[Wanted]:
    """Return the samples of each data set whose log-probabilities are not known."""
    return [
        dataclasses.replace(each, numbers=values.missing(each.samples, each.numbers))
        for each in wanted
    ]


def compute_references(
    wanted: Sequence[Wanted],
    model: ReferenceModel | None,
    strategy: Strategy,
    *,
    known: Iterable[Path],
    display: Display,
    warn: Callable[[str], None],
) -> ReferenceValues:
    """Compute the log-probabilities that are needed and not known.

    Every rank calls this, once they are connected and before another model is loaded.

    Args:
        wanted: the data sets.
        model: the reference; None: it is not on this machine.
        strategy: of the ranks.
        known: directories of checkpoints, which have those of earlier sessions.
        display: shows progress.
        warn: shows a warning.

    Raises:
        UserError: some are not known, and there is no model to compute them with.
    """
    values = stored_values(wanted, known if rank() == 0 else ())
    cache = ReferenceCache(model.key) if model is not None and rank() == 0 else None
    if cache is not None:
        cache.load_into(values)
    values.share()
    missing = missing_from(values, wanted)
    if not any(len(each.numbers) for each in missing):
        return values
    if model is None:
        count = sum(len(each.numbers) for each in missing)
        raise UserError(
            f"reference: the log-probabilities of {count:,} samples under the reference model are "
            "in no checkpoint and not in the cache of this machine, and neither is the model. "
            f"Copy its directory to where its recipe has it{or_download('ORG/NAME')}."
        )
    saving = _Saving(cache, values, warn)
    try:
        _compute(missing, values, model, strategy, display, saving)
    finally:
        saving.save()  # also of what is interrupted
    # The model is gone; its memory is for the next one.
    gc.collect()
    free_cached_memory()
    return values


class _Saving:
    """Keeps values in the cache on rank 0, now and then."""

    def __init__(
        self, cache: ReferenceCache | None, values: ReferenceValues, warn: Callable[[str], None]
    ) -> None:
        self._cache, self._values, self._warn = cache, values, warn
        self._saved_at_s = time.monotonic()

    def save_if_due(self) -> None:
        if time.monotonic() - self._saved_at_s > _SAVED_EVERY_S:
            self.save()
            self._saved_at_s = time.monotonic()

    def save(self) -> None:
        if self._cache is None:
            return
        try:
            self._cache.keep(self._values)
        except (OSError, SafetensorError) as error:
            self._warn(
                f"The log-probabilities of the reference cannot be cached ({error}): another run "
                "will compute them again."
            )
            self._cache = None


def _compute(
    missing: Sequence[Wanted],
    values: ReferenceValues,
    model: ReferenceModel,
    strategy: Strategy,
    display: Display,
    saving: _Saving,
) -> None:
    total, done = sum(len(each.numbers) for each in missing), 0
    with ExitStack() as stack:
        with display.phase("loading the reference model") as phase:
            network = stack.enter_context(model.load(phase.advance))
        with display.phase("computing the reference") as phase:
            for each in missing:
                at_once = _SAMPLES_AT_ONCE * model.layout.world_size
                for start in range(0, len(each.numbers), at_once):
                    chunk = each.numbers[start : start + at_once]
                    found = _of_samples(each.samples, chunk, network, model.layout, strategy)
                    values.put(each.samples, chunk, found)
                    saving.save_if_due()
                    done += len(chunk)
                    phase.advance(done, total)
        strategy.sharding.reshard(network)


def _of_samples(
    samples: Samples,
    numbers: IntArray,
    model: LanguageModel,
    layout: RankLayout,
    strategy: Strategy,
) -> npt.NDArray[np.float64]:
    """Log-probabilities of some samples, computed by all ranks: [numbers, per_sample]."""
    # Ranks put their values into an array of zeros, whose sum over all ranks has every value.
    device, each = strategy.device, samples.per_sample
    places = {int(number): place for place, number in enumerate(numbers)}
    # One more, for fillers: so all tensors of a micro-batch have the size of all others.
    nowhere = len(numbers) * each
    found = torch.zeros(nowhere + 1, dtype=sum_dtype(device), device=device)
    for batch in with_media(inference_loader(samples, numbers, layout)):
        batch = move_data_to_device(batch, device)
        with strategy.precision.forward_context():
            values = sequence_log_probabilities(model, batch)
        own = [
            nowhere if number == FILLER else places[number // each] * each + number % each
            for number in batch["numbers"]
        ]
        found[torch.tensor(own, dtype=torch.long, device=device)] = values
    return sum_over_ranks(found).double().cpu().numpy()[:-1].reshape(-1, each)
