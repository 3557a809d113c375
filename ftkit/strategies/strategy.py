"""The strategy of a run: its precision, where model, gradients and optimizer are, and how it steps.

The base class has all of them on every rank. `Single` and `Ddp` are here, `Fsdp` in `fsdp`,
others in extensions. Facts about strategies that need no torch are rows of a registry
(`ftkit.recipe.strategy_rows`).
"""

import importlib
import inspect
import math
import os
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from lightning.fabric import Fabric
from lightning.fabric.accelerators.accelerator import Accelerator as FabricAccelerator
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ftkit.models.language_model import LanguageModel, output_of, trainable
from ftkit.models.load_weights import Sharding, Whole
from ftkit.models.loss import HeadOutput
from ftkit.recipe.optimizers import is_paged, traits_of
from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe import LoraRecipe
from ftkit.strategies.distributed import context_group, make_device, rank, sum_over_ranks
from ftkit.strategies.optimizers import (
    OptimizerInBackward,
    clip_gradients,
    make_optimizer,
    resolve_optimizer,
)
from ftkit.strategies.state import AVERAGE, Averages, OptimizerStateView, TorchState
from ftkit.strategies.step_memory import Category, OnDevice, Simulation
from ftkit.utils.accelerators.kinds import HOST_KIND, USUAL_KIND

if TYPE_CHECKING:
    from ftkit.models.bodies.exchange import Exchange

LOSS_SCALE, LOSS_SCALE_AGE = "loss_scale", "loss_scale_age"
"""The factor of float16 training, and steps since it last changed."""
ShowPhase = Callable[[str], AbstractContextManager[Any]]
_SYNC_BUFFERS = next(  # torch 2.13 warns of the older name
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


# Precision


class TrueHalfPrecision(HalfPrecision):
    """Fabric's half precision without its conversions of the module and of all inputs.

    The parameters already have their dtype, and rotary tables must stay float32.
    """

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def convert_input(self, data: Any) -> Any:
        return data


def parameter_dtype(plan: Plan) -> torch.dtype:
    """Dtype of the parameters; master weights that a strategy keeps beside them are float32."""
    # Mixed precision is autocast over float32 parameters, but under DeepSpeed the parameters have
    # 16 bits, beside float32 masters.
    kind, _, how = plan.precision.partition("-")
    if kind == "32" or (how == "mixed" and not plan.rules.keeps_masters):
        return torch.float32
    return torch.bfloat16 if kind == "bf16" else torch.float16


def updated_dtype(plan: Plan) -> torch.dtype:
    """Dtype of the numbers that the optimizer updates: master weights or parameters."""
    return torch.float32 if plan.rules.keeps_masters else parameter_dtype(plan)


def compute_dtype(plan: Plan) -> torch.dtype:
    """Dtype of the large matrix products."""
    kind = plan.precision.partition("-")[0]
    return {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}[kind]


def set_arithmetic(plan: Plan) -> None:
    """Set how exactly this process computes; called before its first use of a device."""
    deterministic = plan.recipe.deterministic
    # "high" lets GPUs compute float32 products in TF32, with 10 bits of mantissa; TPUs would
    # compute them from numbers of bfloat16.
    is_exact = plan.kind.rounds_float32 and plan.precision == "32-true"
    torch.set_float32_matmul_precision("highest" if deterministic or is_exact else "high")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # else it imports a compiler
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:  # otherwise cuBLAS picks any of several workspaces, which changes sums
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def bf16_cost() -> float:
    """Measure how many times as long as in float32 a product takes in bfloat16 on this CPU."""

    # The processor time of one thread: beside other work, threads wait for cores most of the time
    # in both formats.
    def cost(dtype: torch.dtype) -> float:
        left = right = torch.ones(128, 128, dtype=dtype)
        durations = []
        for _ in range(4):  # the first one prepares the kernel
            begin = time.thread_time()
            torch.mm(left, right)
            durations.append(time.thread_time() - begin)
        return min(durations)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return cost(torch.bfloat16) / cost(torch.float32)
    finally:
        torch.set_num_threads(threads)


# Strategies


def make_strategy(plan: Plan) -> "Strategy":
    """Create the strategy of a plan, not connected yet."""
    # Imported only when used: DeepSpeed takes seconds.
    module, _, name = plan.rules.class_path.rpartition(".")
    made: Strategy = getattr(importlib.import_module(module), name)(plan)
    return made


class Strategy(ABC):
    """Model, gradients and optimizer on the ranks of a plan.

    Order of use: `connect`; the model is filled through `sharding`; `set_up`; then steps, each of
    `forward` and `backward` in `micro_step` for every micro-batch, `clip_gradients`, `update`.
    """

    mixes_by_autocast = True
    """Whether mixed precision is autocast over float32 parameters."""
    updates_parameters = True
    """Whether torch's optimizer updates the model's own parameters."""
    keeps_gradients_whole = False
    """Whether gradients stay whole until an update that is not torch's."""
    keeps_gradient_buckets = False
    """Whether memory for all gradients is allocated once, before the first step."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sharding: Sharding = Whole()
        """Placement of the parameters, once the ranks are connected."""
        self.optimizer: torch.optim.Optimizer
        """Optimizer over the trained parameters, once the strategy is set up."""
        self.averages: Averages | None = None
        """Running averages of the trained parameters, with train.ema_decay."""
        if plan.recipe.train.ema_decay is not None:
            self.averages = defaultdict(dict)
        self.fixed_gradients: dict[nn.Parameter, Tensor] = {}
        """Memory of the gradients that recorded steps write, kept between steps."""
        self._norm: Tensor | None = None
        self._in_backward: OptimizerInBackward | None = None

    # Processes

    def connect(self, model: nn.Module) -> None:
        """Connect the ranks, and take this rank's device.

        Args:
            model: to be trained; on the meta device.
        """
        # Torchrun's variables, as we set them. Fabric itself would take SLURM's, also in a shell of
        # salloc, where there are no tasks.
        environment: ClusterEnvironment = LightningEnvironment()
        if self.plan.communication is not None:
            environment = TorchElasticEnvironment()
        plugins: list[Precision | ClusterEnvironment] = [self.precision, environment]
        self._fabric = Fabric(
            accelerator=fabric_accelerator(self.plan.accelerator),
            devices=self.plan.devices,
            num_nodes=self.plan.num_nodes,
            strategy=self._fabric_strategy(model),
            plugins=plugins,  # type: ignore[arg-type]
        )
        self._fabric.launch()

    @abstractmethod
    def _fabric_strategy(self, model: nn.Module) -> FabricStrategy:
        """Fabric's own strategy object; the model is still on the meta device."""

    @cached_property
    def sharding_beside(self) -> Sharding:
        """Placement of the parameters of a frozen model beside the trained one.

        Every rank reads it, once the ranks are connected.
        """
        if self.plan.shards_beside == self.plan.shards:
            return self.sharding
        from ftkit.strategies.fully_shard import over_all_ranks

        return over_all_ranks(self.plan)

    @cached_property
    def exchange(self) -> "Exchange | None":
        """Exchange with the ranks that share rows with this one; None: its rows are whole.

        Every rank reads it, once the ranks are connected.
        """
        mesh = self.plan.mesh
        if mesh.context == 1:
            return None
        from ftkit.models.bodies.exchange import Exchange

        return Exchange(mesh.piece(rank()), context_group(mesh, self.plan.accelerator))

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return make_device(self.plan.accelerator)

    @cached_property
    def precision(self) -> Precision:
        """Fabric's plugin for the precision of the plan."""
        return self._make_precision()

    def _make_precision(self) -> Precision:
        precision = self.plan.precision
        if precision == "bf16-true" or precision == "16-true":
            return TrueHalfPrecision(precision)
        if self.mixes_by_autocast and (precision == "bf16-mixed" or precision == "16-mixed"):
            return MixedPrecision(precision, self.plan.accelerator)
        return Precision()

    # The optimizer

    def optimizer_of(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Class and arguments of the recipe's optimizer, as this strategy uses it.

        Raises:
            UserError: the class does not exist or does not take the arguments.
        """
        chosen = self.plan.recipe.optimizer
        return resolve_optimizer(chosen, may_fuse=self._may_fuse(chosen["class_path"]))

    def check_optimizer(self, device: torch.device) -> None:
        """Refuse an optimizer that does not exist, or that would learn something else here.

        Args:
            device: for a trial of an optimizer that ftkit does not know.

        Raises:
            UserError: names what works.
        """
        optimizer_class, arguments = self.optimizer_of()
        if traits_of(self.plan.recipe.optimizer["class_path"]).is_tried:
            from ftkit.strategies.optimizer_trial import try_optimizer

            try_optimizer(optimizer_class, arguments, self.plan, device)

    def _may_fuse(self, class_path: str) -> bool:
        """Whether torch's fused implementation may be used, if the optimizer has one."""
        # In 16-mixed, clipping unscales gradients before the step; fused steps do so themselves.
        return self.plan.precision != "16-mixed"

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Create the optimizer over the model's trained parameters.

        Raises:
            UserError: the class refuses its arguments.
        """
        recipe = self.plan.recipe
        optimizer_class, arguments = self.optimizer_of()
        return make_optimizer(
            recipe.optimizer,
            model,
            self._over_shards(optimizer_class),
            arguments,
            lora_plus_ratio=recipe.lora_plus_ratio if isinstance(recipe, LoraRecipe) else None,
            decays_norms_and_biases=recipe.train.decay_norms_and_biases,
        )

    def _over_shards(
        self, optimizer_class: type[torch.optim.Optimizer]
    ) -> type[torch.optim.Optimizer]:
        """The class, adapted to this rank's shards of the parameters."""
        return optimizer_class

    def prepare(self, phase: ShowPhase) -> None:  # noqa: B027  # most have nothing to do
        """Compile what must be compiled on this machine.

        Args:
            phase: shows a title meanwhile.
        """

    def set_up(self, model: LanguageModel) -> None:
        """Take a model with its weights, and create its optimizer."""
        self._model = model
        self._trained = trainable(model)
        # Not moved: the model was filled where it trains.
        self._forward = self._fabric.setup_module(model, move_to_device=False)
        self.optimizer = self.make_optimizer(model)
        if self.plan.recipe.train.optimizer_in_backward:
            self._in_backward = OptimizerInBackward(self.optimizer)
        self._stepper: Any = self._fabric.setup_optimizers(self.optimizer)
        self._note_rates()

    def computing_with(self, model: LanguageModel) -> AbstractContextManager[None]:
        """Context in which a filled model that is not trained computes."""
        return nullcontext()

    def _note_rates(self) -> None:
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    # A step

    def set_learning_rate(self, share: float) -> None:
        """Use this share of each group's full learning rate from now on."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share

    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Context for the forward and backward pass of a micro-batch.

        Args:
            is_last: whether an update follows, which needs the gradients of all ranks.
        """
        assert is_last or self._in_backward is None
        return nullcontext()

    def keeps_whole_gradients(self, model: nn.Module, *, is_last: bool) -> bool:
        """Whether this rank keeps gradients unsharded after the next backward pass of a model.

        Args:
            model: is set up for that.
            is_last: whether an update follows.
        """
        return False

    def whole_gradients(self, model: nn.Module) -> Iterable[Tensor]:
        """Gradients that this rank keeps unsharded."""
        return ()

    def forward(self, batch: dict[str, Any], output: HeadOutput) -> Tensor:
        """Output of the model's head for a micro-batch."""
        return output_of(self._forward, batch, output)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss; after the last micro-step they are a mean over the ranks."""
        self._fabric.backward(loss)

    def average_gradients(  # noqa: B027  # most average in the backward pass
        self,
        parameters: Sequence[nn.Parameter],
        send: Callable[[Tensor], object] = sum_over_ranks,
    ) -> None:
        """Average gradients over the ranks, where the last backward pass of a step has not.

        Args:
            parameters: the trained ones.
            send: adds up a tensor over the ranks, in place.
        """

    def clip_gradients(self, limit: float | None) -> None:
        """Measure the global norm of the step's gradients, and scale it down to the limit.

        Args:
            limit: None: the norm is only measured.
        """
        if self._in_backward is not None:
            self._norm = self._in_backward.take_norm()
            return
        self.average_gradients(self._trained)
        scaler = getattr(self.precision, "scaler", None)
        if scaler is not None:
            # Before the norm is measured: scaled gradients would be clipped by the loss scale.
            scaler.unscale_(self.optimizer)
        self._norm = clip_gradients(self._trained, limit)

    def gradient_norm(self) -> float:
        """Global norm of the newest step before clipping; every rank calls this."""
        assert self._norm is not None
        return self._norm.item()

    @property
    def scales_loss(self) -> bool:
        """Whether an infinite gradient leaves the update out and lowers the loss scale."""
        return getattr(self.precision, "scaler", None) is not None

    def leave_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave parameters and their optimizer state as they are in the next update.

        Args:
            parameters: whose gradients are zero on every rank.
        """
        for parameter in parameters:
            parameter.grad = None

    def update(self) -> float:
        """Update the trained parameters if the norm is finite, then free the gradients.

        With updates in the backward pass, they are done already.

        Returns:
            The norm, as `gradient_norm`.
        """
        norm = self.gradient_norm()
        is_usable = math.isfinite(norm) or self.scales_loss
        if self._in_backward is None:
            if is_usable:
                self._stepper.step()
            # Freed now, so that they never exist beside the activations of the next step.
            self.optimizer.zero_grad(set_to_none=True)
        if is_usable:
            self.average(self._trained)
        return norm

    # Averages of the weights

    @property
    def average_bytes(self) -> int:
        """Bytes for the average of each number, in memory and in a checkpoint."""
        return 0 if self.averages is None else torch.float32.itemsize

    def average(self, weights: Iterable[Tensor]) -> None:
        """Update the averages after an update of the weights, with train.ema_decay."""
        decay = self.plan.recipe.train.ema_decay
        if decay is not None and self.averages is not None:
            _update_averages(weights, self.averages, decay)

    @torch.no_grad()
    def take_averages(self) -> Callable[[], None]:
        """Replace the trained parameters by their averages; every rank calls this.

        Does nothing before the first update, when there are no averages.

        Returns:
            Function that restores the parameters, equal to the bit.
        """
        assert self.averages is not None
        self.sharding.reshard(self._model)
        kept = []
        for parameter in self._trained:
            if AVERAGE in self.averages[parameter]:
                own = _local_rows(parameter)
                kept.append((own, own.clone()))
                own.copy_(_local_rows(self.averages[parameter][AVERAGE]))
        return partial(self._restore, kept)

    @torch.no_grad()
    def _restore(self, kept: Iterable[tuple[Tensor, Tensor]]) -> None:
        self.sharding.reshard(self._model)
        for own, numbers in kept:
            own.copy_(numbers)

    # Checkpoints

    def state_view(self) -> OptimizerStateView:
        """View of this rank's training state, for checkpoints."""
        left_out = self._model.body.trained_beside
        return TorchState(self._model, self.optimizer, self.averages, left_out=left_out)

    def loss_scale(self) -> dict[str, float]:
        """Loss scale of float16 training, among the optimizer_scalars of a checkpoint."""
        scaler = getattr(self.precision, "scaler", None)
        if scaler is None:
            return {}
        state = scaler.state_dict()
        return {LOSS_SCALE: state["scale"], LOSS_SCALE_AGE: float(state["_growth_tracker"])}

    def restore_loss_scale(self, scalars: dict[str, float]) -> None:
        """Take the loss scale out of optimizer_scalars, and use it if this run scales its loss."""
        scale, age = scalars.pop(LOSS_SCALE, None), scalars.pop(LOSS_SCALE_AGE, 0.0)
        scaler = getattr(self.precision, "scaler", None)
        if scaler is not None and scale is not None:
            state = scaler.state_dict() | {"scale": scale, "_growth_tracker": int(age)}
            scaler.load_state_dict(state)

    # Memory

    def parameter_memory(self, parameter: Tensor) -> Iterator[Tensor]:
        """Tensors that hold this rank's part of a parameter between steps."""
        yield parameter

    def optimizer_memory(self) -> Iterator[tuple[Tensor, Category]]:
        """Tensors that the optimizer keeps, with their category."""
        for tensor in tensors_in((self.optimizer.state, self.averages)):
            yield tensor, "optimizer_state"
        for gradient in self.fixed_gradients.values():
            yield gradient, "gradients"

    def gathered(self, model: nn.Module) -> Iterable[Tensor]:
        """Parameters that a forward pass gathers from other ranks."""
        return ()

    def simulated(self) -> AbstractContextManager[Sharding]:
        """Context in which this process acts as one rank of the plan without communication."""
        return nullcontext(Whole())

    def simulated_beside(self, sharding: Sharding) -> AbstractContextManager[Sharding]:
        """The same for a frozen model beside the trained one.

        Args:
            sharding: of the trained one, from `simulated`.
        """
        if self.plan.shards_beside == self.plan.shards:
            return nullcontext(sharding)
        from ftkit.strategies.fully_shard import one_of_many

        return one_of_many(self.plan, self.plan.shards_beside)

    def simulates_first_step(self) -> bool:
        """Whether the simulation needs a step before the one that it measures."""
        return False

    def on_device(self, simulation: Simulation) -> OnDevice:
        """Split the memory of a simulated step between device and host."""
        kinds: list[Category] = []
        if is_paged(self.plan.recipe.optimizer):
            kinds = ["optimizer_state"]  # the driver moves it to the host when memory is short
        return simulation.without(kinds if self.plan.kind.pages_optimizer_state else [])


def tensors_in(value: Any, opened: str = "bitsandbytes.") -> Iterator[Tensor]:
    """Tensors in nested containers.

    Args:
        value: a container, or a tensor.
        opened: beginning of the modules of objects that are containers too.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, opened)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item, opened)
    elif type(value).__module__.startswith(opened):
        yield from tensors_in(getattr(value, "__dict__", {}), opened)


@torch.no_grad()
def _update_averages(weights: Iterable[Tensor], states: Averages, decay: float) -> None:
    """Set average = decay * average + (1 - decay) * weight, starting with the first weights.

    So it depends on the steps alone, not on where they were computed.
    Morales-Brotons et al. 2024, https://arxiv.org/abs/2411.18704.
    """
    for weight in weights:
        state = states[weight]
        # Started with the first weights, so no correction of a bias towards zero is needed.
        if AVERAGE not in state:
            state[AVERAGE] = weight.detach().to(torch.float32, copy=True)
        else:
            _local_rows(state[AVERAGE]).lerp_(_local_rows(weight).to(torch.float32), 1 - decay)


def _local_rows(tensor: Any) -> Tensor:
    rows: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return rows


class Single(Strategy):
    """The strategy single: one device."""

    def _fabric_strategy(self, model: nn.Module) -> FabricStrategy:
        return SingleDeviceStrategy(self.device)


class _DdpWithFixedBuckets(DistributedDataParallel):
    """torch's module with the same buckets in every step.

    A bucket is summed in chunks, and where a number lies decides in which order three ranks or more
    are added. torch makes its buckets anew after the first step, in the order in which gradients
    came. A resumed run would do so at another step, and differ in the last bits.
    """

    # Private in torch 2.11 to 2.13: its public way to keep buckets looks for unused parameters in
    # every step.
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Parameters in the order in which a backward pass reaches them: the last one first."""
        parameters, are_sparse = super()._build_params_for_reducer()
        return parameters[::-1], are_sparse[::-1]


class _DdpOnAnyDevice(DDPStrategy):
    """Fabric's strategy without its assumption that a device with an index is a CUDA device."""

    sums_in_backward = True
    """Whether torch's module is around the model."""

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        if not self.sums_in_backward:
            return module
        # As Fabric's, with a class of ours: buckets are made on a stream of their own.
        device_ids = self._determine_ddp_device_ids()
        with torch.cuda.stream(torch.cuda.Stream()) if device_ids is not None else nullcontext():
            return _DdpWithFixedBuckets(module, device_ids=device_ids, **self._ddp_kwargs)

    def _determine_ddp_device_ids(self) -> list[int] | None:
        return super()._determine_ddp_device_ids() if self.root_device.type == USUAL_KIND else None


class Ddp(Strategy):
    """The strategy ddp: every rank has the whole model, and gradients are averaged over ranks.

    torch's DistributedDataParallel. Li et al. 2020, https://arxiv.org/abs/2006.15704.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        # Pieces of one sequence are added in float32, as if it were whole; torch's module adds in
        # the dtype of the gradients. And a recorded pass sends nothing.
        self._averages_after = plan.mesh.context > 1 and parameter_dtype(plan) != torch.float32
        if plan.recipe.train.record_steps:
            from ftkit.recipe.recorded import why_unrecorded

            self._averages_after |= why_unrecorded(plan) is None
        self.keeps_gradient_buckets = not self._averages_after

    def _fabric_strategy(self, model: nn.Module) -> FabricStrategy:
        tables: dict[str, Any] = {_SYNC_BUFFERS: False}  # every rank computes the same ones
        made = _DdpOnAnyDevice(
            process_group_backend=self.plan.communication,
            gradient_as_bucket_view=True,  # saves a copy of the gradients
            **tables,
        )
        made.sums_in_backward = not self._averages_after
        return made

    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        if self._averages_after:
            return nullcontext()
        # Gradients are exchanged once in a step, with the last micro-batch.
        return self._fabric.no_backward_sync(self._forward, enabled=not is_last)

    def average_gradients(
        self,
        parameters: Sequence[nn.Parameter],
        send: Callable[[Tensor], object] = sum_over_ranks,
    ) -> None:
        if self._averages_after:
            from ftkit.strategies.gradient_means import average_gradients

            average_gradients(parameters, send, self.plan.world_size)


class CurrentAccelerator(FabricAccelerator):
    """The device that torch.accelerator names, behind Fabric's interface."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device)

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(CurrentAccelerator.name(), index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        return torch.accelerator.is_available()

    @staticmethod
    def name() -> str:
        found = torch.accelerator.current_accelerator()
        assert found is not None
        return found.type


def fabric_accelerator(kind: str) -> str | FabricAccelerator:
    """Accelerator to give to Fabric for a kind of device: its own name, or ours for any other.

    Its own tpu is torch_xla, which is not a device of torch.accelerator.
    """
    return kind if kind in (HOST_KIND, USUAL_KIND) else CurrentAccelerator()
