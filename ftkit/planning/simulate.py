"""The simulated optimizer step of a plan on fake tensors: which bytes are alive when.

The model, its layers, its loss, its sharding and its optimizer are those of a run; only their
numbers are missing. What a rank holds is counted by the code that counts it in a run
(`ftkit.planning.tracker`).

A model of many layers is not run whole. The step is cut into stretches (the forward pass of the
first block, of the last one, the loss, ...), and the bytes of each stretch grow by the same amount
with every layer: two small models of different depth tell those of any depth. Where every Nth block
is checkpointed, they grow so with every N layers.
"""

import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from ftkit.data.records.media import MEDIA
from ftkit.errors import UserError
from ftkit.models.bodies.attention import attention_kernel
from ftkit.models.bodies.experts import packed_in
from ftkit.models.dry_run import modules_passed_back
from ftkit.models.fake_tensors import fake_tensors
from ftkit.models.flops import further_passes, parameter_count
from ftkit.models.language_model import (
    LanguageModel,
    outline,
    output_of,
    trainable,
    trained_router_loss,
)
from ftkit.models.load_weights import Sharding
from ftkit.models.loss import HeadOutput
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.models.token_numbers import TokenDropout
from ftkit.models.unpacking import UnpackedPerUse
from ftkit.objectives.companion import Companion, sequence_log_probabilities
from ftkit.objectives.objective import Batch, make_objective
from ftkit.objectives.step_loss import StepLoss, zeros_for
from ftkit.planning.media import allocated, simulated_media
from ftkit.planning.tracker import LiveTensors, Stretch
from ftkit.recipe.companions import companion_row
from ftkit.recipe.kernels import has_liger
from ftkit.recipe.objectives import ScoreLabels, objective_rules
from ftkit.recipe.plan import Plan
from ftkit.recipe.plugin import plugin_in_use
from ftkit.recipe.recipe import LoraRecipe
from ftkit.strategies.frozen import bytes_of, outline_frozen
from ftkit.strategies.optimizers import OptimizerInBackward, clip_gradients, hidden_matrices
from ftkit.strategies.step_memory import (
    ANOTHER_MODEL,
    FIRST_GRADIENT,
    OBSERVED,
    PERSISTENT_ELEMENTS,
    MicroBatchSize,
    Peaks,
    Simulation,
    Sizes,
    Snapshot,
)
from ftkit.strategies.strategy import (
    Strategy,
    compute_dtype,
    make_strategy,
    parameter_dtype,
    tensors_in,
)
from ftkit.utils.accelerators.kinds import HOST_KIND
from ftkit.utils.imports import dtensor

if TYPE_CHECKING:
    from ftkit.models.bodies.exchange import Exchange

CPU = torch.device("cpu")
LEAST_DEPTH = 3
"""Layers of the smaller model: enough that both ends have blocks of their own."""


def largest_micro_batch(
    sequences: int,
    tokens: int,
    *,
    padding_free: bool = False,
    most_tokens: int | None = None,
    pieces: int = 1,
    weighted: bool = False,
    scores: ScoreLabels | None = None,
    each: int = 1,
) -> MicroBatchSize:
    """Upper bound of micro-batches: samples of equal length whose tokens all carry loss.

    Args:
        sequences: at most, a multiple of `each`.
        tokens: of the longest sequence.
        padding_free: whether they lie in a row.
        most_tokens: of a row, but for a longer sample; None: as many as the samples have.
        pieces: ranks that share a row.
        weighted: whether their labels have weights.
        scores: what each sequence has, at one token or as a mean over all; None: all tokens but
            the first one carry loss.
        each: sequences of a sample, which stay together.
    """
    # Of tokens that are predicted, the last one is only a label.
    positions = tokens if scores else tokens - 1
    in_all = sequences * positions
    if most_tokens is not None:
        in_all = min(in_all, max(most_tokens, each * positions))
        sequences = -(-in_all // (each * positions)) * each
    here = -(-in_all // pieces)
    return MicroBatchSize(
        # What fills up a row is one more.
        sequences=sequences + (here * pieces > in_all),
        positions=positions,
        targets=sequences if scores and scores.pooling != "mean" else here,
        tokens=here if padding_free else None,
        pieces=pieces,
        weighted=weighted,
    )


def simulate(
    base: BaseModel,
    plan: Plan,
    batch: MicroBatchSize,
    *,
    accumulates: bool,
    beside: BaseModel | None = None,
) -> Simulation:
    """The highest moment of each stretch of an optimizer step after the first.

    A strategy whose own code cannot run on fake tensors is simulated with the whole model and
    without an update; the rest is arithmetic on top of this (`Strategy.on_device`).

    Args:
        base: whose architecture is trained; its weights are not read.
        plan: how.
        batch: what a micro-step of it computes on.
        accumulates: whether the micro-step adds to gradients of others before it.
        beside: the frozen model that is held beside the trained one, if there is one.
    """
    period = int(plan.recipe.memory.activation_checkpointing) or 1

    def run(layers: int) -> Simulation:
        return _run(base, plan, batch, layers, accumulates, beside)

    return _with_all_layers(run, base.architecture.layers, period, _layers_differ(base, plan))


def simulate_alone(base: BaseModel, plan: Plan, batch: MicroBatchSize) -> Simulation:
    """The highest moment of a pass that only computes log-probabilities, with no other model there.

    Args:
        base: the model; its weights are not read.
        plan: whose strategy and number formats it is computed in.
        batch: what a pass computes on.
    """

    def run(layers: int) -> Simulation:
        return _run_alone(base, plan, batch, layers)

    is_uneven = not base.architecture.has_equal_layers
    return _with_all_layers(run, base.architecture.layers, 1, is_uneven)


def _with_all_layers(
    run: Callable[[int], Simulation], depth: int, period: int, layers_differ: bool
) -> Simulation:
    """Simulate a model of any depth by two small ones, if its layers are alike."""
    smaller = _smaller_depth(depth, period)
    if depth <= smaller + period + 1 or layers_differ:
        return run(depth)
    less, more = (run(layers) for layers in (smaller, smaller + period))
    steps = (depth - smaller) // period

    def extended(first: Mapping[Any, int], second: Mapping[Any, int]) -> dict[Any, int]:
        return {key: round(first[key] + (second[key] - first[key]) * steps) for key in first}

    return Simulation(
        {
            name: Snapshot(extended(less.peaks[name].bytes, more.peaks[name].bytes))
            for name in less.peaks
            if name in more.peaks
        },
        Sizes(**extended(dataclasses.asdict(less.sizes), dataclasses.asdict(more.sizes))),
        less.hosted_bytes + (more.hosted_bytes - less.hosted_bytes) * steps,
        accumulates=less.accumulates,
        observing_passes=less.observing_passes,
        passes_before=less.passes_before,
    )


def _smaller_depth(depth: int, period: int) -> int:
    """Layers of the smaller model: both halves hold a period, and the ends are as in the whole."""
    least = max(LEAST_DEPTH, 2 * period)
    return least + (depth - least) % period


def _layers_differ(base: BaseModel, plan: Plan) -> bool:
    """Whether layers differ in kind, or can be chosen individually by their numbers."""
    recipe = plan.recipe
    if not base.architecture.has_equal_layers:
        return True
    if not isinstance(recipe, LoraRecipe):
        return recipe.train.trains_part
    targets = recipe.lora_targets or []
    names = [targets] if isinstance(targets, str) else targets
    return any("." in name for name in (*names, *(recipe.lora_modules_to_save or [])))


def _run(
    base: BaseModel,
    plan: Plan,
    batch: MicroBatchSize,
    layers: int,
    accumulates: bool,
    beside: BaseModel | None,
) -> Simulation:
    kernels = plan.recipe.kernels if has_liger() else "torch"
    # Fake tensors cannot look into compiled graphs; these keep less, so it is an upper bound.
    recipe = dataclasses.replace(plan.recipe, compile=False, kernels=kernels)
    # The code of a run, not a formula, which would have to change with every layer: predictions are
    # equal to the byte.
    model = outline(with_layers(base, layers), recipe, parameter_dtype(plan), compute_dtype(plan))
    model.kernel = attention_kernel(
        base.architecture.attention, plan.accelerator, has_flash=plan.has_flash
    )
    model.routing = model.body.watch_routing(
        trained_router_loss(base.architecture, recipe.router_aux_loss_coef)
    )
    model.body.exchange = _without_ranks(plan)
    host = _HostMemory()
    # On CPUs all of it is host memory.
    if model.offloading is not None and plan.accelerator != HOST_KIND:
        model.offloading.copies = host
    frozen = None if beside is None else outline_frozen(beside, plan)
    if frozen is not None:
        frozen.body.exchange = _without_ranks(plan)
    sizes = _sizes(
        model, frozen, plan.shards, is_teacher=objective_rules(recipe.objective).needs_teacher
    )
    strategy = make_strategy(plan)
    # Before tensors have no values: the host computes some from the sizes of media.
    media = simulated_media(base, batch, parameter_dtype(plan))
    with (
        strategy.simulated() as sharding,
        strategy.simulated_beside(sharding) as sharding_beside,
        # Tables that were computed on the CPU are real tensors.
        fake_tensors(),
        _without_launches(kernels),
    ):
        sharding.allocate(model, CPU)
        context = base.architecture.context_length
        asked = recipe.train.max_seq_length or context
        answers = recipe.eval.max_new_tokens or 0
        model.body.build_rope_cache(CPU, min(context, asked + answers))
        _pack(model, plan.accelerator)
        model.body.load_beside({})
        model.body.tokens.device_kind = plan.accelerator
        model.body.tokens.prepare(0, CPU)
        if frozen is not None:
            sharding_beside.allocate(frozen, CPU)
            frozen.body.build_rope_cache(CPU, asked)
            _pack(frozen, plan.accelerator)
        with _mistakes_of_plugin():
            step = _Step(model, strategy, sharding_beside, batch, accumulates, frozen, media)
            peaks = step.peaks()
        further = further_passes(recipe)
        refers = min(further.below_adapter, 1)
        return Simulation(
            peaks,
            sizes,
            host.most_bytes,
            accumulates=accumulates,
            observing_passes=further.of_model + further.below_adapter - refers,
            passes_before=refers,
        )


def _run_alone(base: BaseModel, plan: Plan, batch: MicroBatchSize, layers: int) -> Simulation:
    model = outline_frozen(with_layers(base, layers), plan)
    model.body.exchange = _without_ranks(plan)
    strategy = make_strategy(plan)
    sizes = _sizes(None, model, plan.shards, is_teacher=False)
    with strategy.simulated() as sharding, fake_tensors():
        sharding.allocate(model, CPU)
        context = base.architecture.context_length
        model.body.build_rope_cache(CPU, min(context, plan.recipe.train.max_seq_length or context))
        _pack(model, plan.accelerator)
        live = LiveTensors(CPU, granularity_bytes=plan.kind.allocator_block_bytes)
        live.assign((*model.parameters(), *model.buffers(), *scales(model)), "parameters")
        with live, _computing(strategy):
            live.mark(ANOTHER_MODEL)
            sequence_log_probabilities(model, _made(batch))
        peaks = {s.name: s.peak for s in live.stretches() if s.name}
    return Simulation(peaks, sizes)


def _without_ranks(plan: Plan) -> "Exchange | None":
    """Exchange with ranks that are not there, if the plan has some that share rows."""
    mesh = plan.mesh
    if mesh.context == 1:
        return None
    from ftkit.models.bodies.exchange import Exchange

    return Exchange(mesh.piece(0), group=None)


@contextmanager
def _mistakes_of_plugin() -> Iterator[None]:
    """Name the line of a plugin that cannot be simulated.

    Raises:
        UserError: the block failed in its code.
    """
    try:
        yield
    except Exception as error:
        plugin = plugin_in_use()
        line = None if plugin is None else plugin.line_of(error)
        if plugin is None or line is None:
            raise
        raise UserError(
            f"{plugin.option}, line {line}: {type(error).__name__}: {error}\nA plan simulates a "
            "step on tensors without numbers: use tensor operations, and do not read a number, as "
            "by .item() or an if on a tensor."
        ) from error


def _sizes(
    model: LanguageModel | None, other: LanguageModel | None, shards: int, *, is_teacher: bool
) -> Sizes:
    """Sizes of the model that is trained, if there is one, and of another that only computes."""
    parameters = [] if model is None else list(model.parameters())
    trained = [] if model is None else trainable(model)
    frozen = [] if other is None else list(other.parameters())
    # That of a teacher is gathered where the loss is computed.
    head = [] if other is None or not is_teacher else list(other.head.parameters())
    beside = set() if model is None else {*model.body.trained_beside}
    scores = None if model is None else model.architecture.scores
    is_used = scores is None or bool(scores.names)  # the output layer, by what is not a vector
    of_head = [] if model is None or not is_used else _large(model.head.parameters())
    of_block = [] if model is None else _large(model.body.blocks[0].parameters())
    of_embedding = []
    if model is not None and not (model.tied and is_used):
        of_embedding = _large(model.body.embedding.parameters())

    def pinned_bytes(parameter: nn.Parameter) -> int:
        rows = -(-parameter.shape[0] // shards)
        return _page_locked_bytes(rows * parameter.shape[1:].numel() * parameter.itemsize)

    return Sizes(
        parameters=0 if model is None else parameter_count(model),
        parameter_bytes=bytes_of(parameters),
        trained=sum(p.numel() for p in trained),
        matrices=sum(p.numel() for p in trained if p.ndim > 1),
        hidden=0 if model is None else sum(p.numel() for p in hidden_matrices(model)),
        elements=sum(p.numel() for p in parameters),
        small_elements=sum(
            p.numel() for p in parameters if p.numel() < PERSISTENT_ELEMENTS or p in beside
        ),
        forward_only_elements=0 if model is None else sum(_large(_forward_only(model))),
        largest_trained=max((p.numel() for p in trained), default=0),
        embedding_elements=sum(of_embedding),
        head_elements=sum(of_head),
        block_elements=sum(of_block),
        largest_in_block=max(of_block, default=0),
        pinned_bytes=sum(map(pinned_bytes, (*parameters, *frozen))),
        pinned_trained_bytes=sum(map(pinned_bytes, trained)),
        frozen_bytes=bytes_of(frozen),
        frozen_elements=sum(p.numel() for p in frozen),
        small_frozen_elements=sum(p.numel() for p in frozen if p.numel() < PERSISTENT_ELEMENTS),
        frozen_head_bytes=bytes_of(head),
    )


def _forward_only(model: LanguageModel) -> list[nn.Parameter]:
    """Parameters below everything that is trained, which no backward pass needs."""
    if not model.trains_part:
        return []
    passed_back = modules_passed_back(model)
    needed = {
        parameter
        for name, module in model.named_modules()
        for parameter in module.parameters(recurse=False)
        if name in passed_back or parameter.requires_grad
    }
    return [parameter for parameter in model.parameters() if parameter not in needed]


def _large(parameters: Iterable[nn.Parameter]) -> list[int]:
    """Elements of those parameters that ZeRO-3 does not keep gathered."""
    return [p.numel() for p in parameters if p.numel() >= PERSISTENT_ELEMENTS]


def _page_locked_bytes(size_bytes: int) -> int:
    """Each block is a power of two (CachingHostAllocator.h)."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


def with_layers(base: BaseModel, layers: int) -> BaseModel:
    """Copy of a base model with another number of layers."""
    return dataclasses.replace(base, architecture=base.architecture.with_layers(layers))


class _HostMemory:
    """Stand-in for host memory: what is copied there is counted, and leaves the device."""

    def __init__(self) -> None:
        self._bytes = self.most_bytes = 0

    def to_host(self, tensor: Tensor) -> tuple[Callable[[], Tensor], None]:
        copied = partial(torch.empty, tensor.shape, dtype=tensor.dtype)
        size_bytes = _page_locked_bytes(tensor.nbytes)
        self._add(size_bytes)
        weakref.finalize(copied, self._add, -size_bytes)
        return copied, None

    def to_device(self, copy: Callable[[], Tensor]) -> tuple[Tensor, None]:
        return copy(), None

    def wait(self, moment: None) -> None:
        pass

    def _add(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        self.most_bytes = max(self.most_bytes, self._bytes)


@contextmanager
def _without_launches(kernels: str) -> Iterator[None]:
    """Liger's functions take their memory as always, and what fills it does nothing."""
    if kernels != "liger":
        yield
        return
    from triton.runtime.jit import JITFunction

    function: Any = JITFunction
    usual, function.run = function.run, _nothing
    try:
        yield
    finally:
        function.run = usual


def _pack(model: LanguageModel, kind: str) -> None:
    """Give quantised layers their scales, and let them compute as on a kind of device."""
    if model.quantized is None:
        return
    from bitsandbytes.functional import create_dynamic_map, name2qmap

    from ftkit.models.quantization import EightBit, FourBit

    with unset_fake_temporarily():  # a table that bitsandbytes computes once in a process
        name2qmap.setdefault("dynamic", create_dynamic_map())
    for module in model.modules():
        if isinstance(module, FourBit | EightBit):
            weight = torch.empty(module.out_features, module.in_features)
            if isinstance(module, FourBit):  # an operation takes the same time whatever its size
                module.pack(weight, at_once=weight.numel())
            else:
                module.pack(weight)
        elif isinstance(module, UnpackedPerUse):  # it packs nothing
            module.allocate(CPU)
            module.device_kind = kind
        for matrices in packed_in(module).values():
            matrices.allocate(CPU)
            matrices.device_kind = kind


def _made(size: MicroBatchSize, media: Any = None, *, each: int = 1) -> Batch:
    """A micro-batch of a size, as `ftkit.data.samples.loader.collate` makes it.

    Args:
        size: of the micro-batch.
        media: of its sequences; None: they have none.
        each: sequences of a sample; one more is what fills up a row.
    """
    count = size.sequences // each * each
    shape = (size.sequences, size.positions) if size.tokens is None else (1, size.tokens)
    divisor = torch.full((), float(size.targets), dtype=torch.float64)
    made: Batch = {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "label_indices": torch.zeros(size.targets, dtype=torch.long),
        "labels": torch.zeros(size.targets, dtype=torch.long),
        "label_sequences": torch.zeros(size.targets, dtype=torch.long),
        "is_real": torch.ones(shape, dtype=torch.bool),
        "is_real_sequence": torch.ones(count, dtype=torch.bool),
        "lengths": (size.lengths or (size.positions,) * size.sequences)[:count],
        "numbers": tuple(range(count)),
        "sequence_lengths": size.lengths,
        "first": 0,
        "divisors": defaultdict(lambda: divisor),
    }
    if size.weighted:
        made["weights"] = torch.ones(size.targets, dtype=torch.float32)
    if media is not None:
        made[MEDIA] = allocated(media)
    return made


def _computing(strategy: Strategy) -> AbstractContextManager[Any]:
    """Context in which a model of a strategy computes, on fake tensors."""
    precision = strategy.plan.precision
    if not precision.endswith("-mixed") or not strategy.mixes_by_autocast:
        return nullcontext()
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    return torch.autocast("cpu", dtype)


class _Step:
    """An optimizer step of a model on this rank, in the order of ftkit's training."""

    def __init__(
        self,
        model: LanguageModel,
        strategy: Strategy,
        sharding_beside: Sharding,
        batch: MicroBatchSize,
        accumulates: bool,
        frozen: LanguageModel | None,
        media: Any,
    ) -> None:
        self._model, self._strategy, self._batch = model, strategy, batch
        self._media = media
        self._plan = plan = strategy.plan
        self._accumulates = accumulates
        self._computing = computing = partial(_computing, strategy)
        self._live = LiveTensors(CPU, granularity_bytes=plan.kind.allocator_block_bytes)
        self._trained = trainable(model)
        self._buckets: dict[Tensor, Tensor] = {}
        """Place of each parameter's gradient in the buckets of DDP after the last micro-step."""
        self._backward, self._has_gradient, self._watches_blocks = False, False, True
        objective = make_objective(plan.recipe.objective)
        companion: Companion | None = None
        if (row := companion_row(plan.recipe.objective)) is not None:
            each = objective_rules(plan.recipe.objective).sequences
            count = batch.sequences // each * each
            companion = row.code().simulated(
                objective, plan, model, frozen, sharding_beside, computing, count
            )
        self._models = (model, *(companion.models if companion else ()))
        for other in self._models[1:]:
            other.register_forward_pre_hook(lambda *_: self._mark(ANOTHER_MODEL))
        self._step_loss = StepLoss(objective, model, companion)
        self._shares = zeros_for(self._step_loss, CPU)
        self._updates_in_backward = plan.recipe.train.optimizer_in_backward

    def peaks(self) -> Peaks:
        """The highest moment of each stretch of the second step."""
        live, strategy = self._live, self._strategy
        optimizer = self._make_optimizer() if strategy.updates_parameters else None
        self._watch_blocks()
        for model in (*self._models, *self._model.body.beside):
            live.assign(model.parameters(), "parameters")
            live.assign(model.buffers(), "parameters")
            live.assign(scales(model), "parameters")
        with live:
            if strategy.keeps_gradient_buckets:
                self._make_buckets()
            if self._updates_in_backward:
                assert optimizer is not None
                in_backward = OptimizerInBackward(optimizer)  # noqa: F841  # works while it lives
            else:
                for parameter in self._trained:
                    parameter.register_post_accumulate_grad_hook(self._on_gradient)
            self._first_step(optimizer)
            found: Peaks = {}
            live.restart()
            if self._step_loss.objective.observes:
                # Before there are gradients of any micro-step.
                self._observe()
                _keep_highest(found, live.stretches())
            if self._accumulates and optimizer is not None:
                self._accumulate()
            live.restart()
            self._step(optimizer)
            _keep_highest(found, live.stretches())
        return found

    def _make_optimizer(self) -> torch.optim.Optimizer:
        with unset_fake_temporarily():  # bitsandbytes computes tables
            optimizer = self._strategy.make_optimizer(self._model)
        if hasattr(optimizer, "update_step"):  # of bitsandbytes, which takes a second to import
            # Kernels of bitsandbytes read pointers, which fake tensors do not have.
            optimizer.update_step = _nothing
        # In place of the method, because updates in the backward pass call it too.
        optimizer.step = _AnyNumber.during(optimizer.step)  # type: ignore[assignment,method-assign]
        return optimizer

    def _first_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """After it there are optimizer states, and under FSDP what its first pass prepares."""
        if optimizer is None:
            return
        if self._strategy.simulates_first_step():
            if self._step_loss.objective.observes:
                self._observe()
            self._step(optimizer)
            return
        self._make_gradients()
        self._update(optimizer)

    def _make_gradients(self) -> None:
        for parameter in self._trained:
            parameter.grad = torch.zeros_like(parameter)
        self._live.assign((p.grad for p in self._trained), "gradients")

    def _accumulate(self) -> None:
        """Gradients of micro-steps before the last one."""
        if self._strategy.keeps_whole_gradients(self._model, is_last=False):
            self._step(None)
            self._live.assign(self._strategy.whole_gradients(self._model), "gradients")
            self._strategy.keeps_whole_gradients(self._model, is_last=True)
        else:
            self._make_gradients()

    def _observe(self) -> None:
        """Compute what the objective needs of a whole step, as before its first micro-step."""
        self._mark(OBSERVED)
        self._watches_blocks = False
        made = self._new_batch()
        self._step_loss.begin()
        self._step_loss.observe(made | {"joined": made}, 0, self._computing)
        del made
        self._step_loss.finish_observing()
        self._watches_blocks = True

    def _new_batch(self) -> Batch:
        rules = objective_rules(self._plan.recipe.objective)
        made = _made(self._batch, self._media, each=rules.sequences)
        count = len(made["numbers"])
        if rules.target_size:
            made["targets"] = torch.ones(count, rules.target_size)
        # A step of few samples may have fewer than the largest micro-batch.
        of_step = max(self._plan.recipe.train.global_batch_size * rules.sequences, count)
        made |= {"places": tuple(range(count)), "sequences_of_step": of_step}
        given = (*made.values(), *tensors_in(made.get(MEDIA)))
        self._live.assign((value for value in given if isinstance(value, Tensor)), "activations")
        return made

    def _step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Run a micro-step; with an optimizer the last one, and the update."""
        live = self._live
        self._mark("before the blocks")
        live.begin_forward()
        made = self._new_batch()
        step_loss = self._step_loss
        self._mark(ANOTHER_MODEL)
        step_loss.refer(made)
        self._mark("before the blocks")
        with step_loss.watching(made), self._model.body.tokens.of(0, made):
            loss = step_loss.of_micro_batch(self._forward, made, self._shares)
            loss = loss * self._plan.world_size
            live.end_forward(self._strategy.gathered(self._model))
            self._mark("loss, backward")
            self._backward, self._has_gradient = True, False
            loss.backward()
            self._backward = False
        del loss, made
        if optimizer is not None:
            self._mark("optimizer")
            self._update(optimizer)

    def _forward(self, batch: Batch, output: HeadOutput) -> Tensor:
        with self._computing():
            return output_of(self._model, batch, output)

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._updates_in_backward:
            self._strategy.average_gradients(self._trained, _nothing)
            clip_gradients(self._trained, self._plan.recipe.train.max_norm)
        optimizer.step()
        self._live.assign(_states(optimizer), "optimizer_state")
        optimizer.zero_grad(set_to_none=True)
        self._strategy.average(self._trained)
        self._live.assign(tensors_in(self._strategy.averages), "optimizer_state")

    def _mark(self, name: str) -> None:
        self._live.assign((p.grad for p in self._trained), "gradients")
        self._live.mark(name)

    def _watch_blocks(self) -> None:
        """Begin a stretch where a block begins its forward or its backward pass."""
        blocks = self._model.body.blocks
        count = len(blocks)
        for index, block in enumerate(blocks):
            # Counted from both ends, so that models of different depth have the same names.
            name = str(index) if index < count // 2 else str(index - count)

            def forward(_: Any, __: Any, name: str = name) -> None:
                if self._watches_blocks and not self._backward:  # not when it is computed again
                    self._mark(f"block {name}, forward")

            def made(_: Any, __: Any, output: Any, name: str = name) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                if not self._backward and hidden.requires_grad:
                    hidden.register_hook(self._backward_of(name))

            block.register_forward_pre_hook(forward)
            block.register_forward_hook(made)
        self._model.head.register_forward_pre_hook(
            lambda *_: (
                self._mark("loss, forward") if self._watches_blocks and not self._backward else None
            )
        )

    def _backward_of(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self._mark(f"block {name}, backward")

    def _make_buckets(self) -> None:
        """DDP's memory for all gradients, which it keeps from the first step on."""
        # DDP has one kind of bucket for each dtype.
        for dtype in {p.dtype for p in self._trained}:
            parameters = [p for p in self._trained if p.dtype == dtype]
            bucket = torch.empty(sum(p.numel() for p in parameters), dtype=dtype)
            self._live.assign([bucket], "gradients")
            parts = bucket.split([p.numel() for p in parameters])
            self._buckets |= {p: part.view_as(p) for p, part in zip(parameters, parts, strict=True)}

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._strategy.updates_parameters:  # at once in a bucket
            if not self._has_gradient:
                self._has_gradient = True
                self._live.mark(FIRST_GRADIENT)
            # If they are whole until the update, those of micro-steps before are there already.
            if self._accumulates or not self._strategy.keeps_gradients_whole:
                parameter.grad = None
        elif self._buckets:
            parameter.grad = self._buckets[parameter]
        self._live.assign([parameter.grad], "gradients")


def _keep_highest(found: Peaks, stretches: Iterable[Stretch]) -> None:
    """Add the highest moment of each stretch, whose names may repeat."""
    for stretch in stretches:
        known = found.get(stretch.name)
        if known is None or stretch.peak.total_bytes > known.total_bytes:
            found[stretch.name] = stretch.peak


def _nothing(*_: Any, **__: Any) -> None:
    """Stand-in for messages, and for bitsandbytes' kernels, which take no memory of their own."""


class _AnyNumber(TorchDispatchMode):
    """Gives a number to an optimizer that reads one, such as the norm by which Adafactor scales.

    Neither 0 nor 1, because NAdam divides by 1 minus a product that it keeps.
    """

    @classmethod
    def during(cls, step: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the step of an optimizer."""

        def stepping() -> Any:
            with cls():
                return step()

        return stepping

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.5 if args[0].is_floating_point() else 1
        if dtensor() in types:
            return NotImplemented  # its operations on local tensors come here again
        return func(*args, **(kwargs or {}))


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def scales(model: nn.Module) -> Iterator[Tensor]:
    """Scales and numbers of channels that layers hold beside their parameters."""
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        while state is not None:
            yield from (t for t in (state.absmax, state.code, state.offset) if t is not None)
            state = state.state2
        scale = getattr(getattr(module, "state", None), "SCB", None)
        if isinstance(scale, Tensor):
            yield scale
        for matrices in packed_in(module).values():
            yield from tensors_in(vars(matrices))
        if isinstance(module, TokenDropout):
            yield module.channels
