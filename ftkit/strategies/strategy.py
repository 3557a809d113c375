"""The strategy of a run: where model, gradients and optimizer are, and what a step does there.

The base class has all of them on every rank, as one device does; what a strategy does in its own
way is in its own module (`ddp`, `fsdp`, `deepspeed`). What is known of it without torch is in
`ftkit.recipe.strategies`.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn as nn
from lightning.fabric import Fabric
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from torch import Tensor

from ftkit.models.language_model import LanguageModel, trainable
from ftkit.models.load_weights import Sharding, Whole
from ftkit.recipe.plan import Plan
from ftkit.strategies.distributed import make_device
from ftkit.strategies.optim.average import AVERAGE, StateOf, local_rows, update_average
from ftkit.strategies.optim.clipping import clip_gradients
from ftkit.strategies.optim.in_backward import OptimizerInBackward
from ftkit.strategies.optim.optimizers import make_optimizer, resolve_optimizer
from ftkit.strategies.precision import TrueHalfPrecision
from ftkit.strategies.simulated_step import OnDevice, Simulation
from ftkit.strategies.state import Holder
from ftkit.strategies.step_memory import Category
from ftkit.strategies.torch_state import TorchState
from ftkit.utils.accelerators.fabric import fabric_accelerator

ShowPhase = Callable[[str], AbstractContextManager[Any]]


class Strategy(ABC):
    """Model, gradients and optimizer on the ranks of a plan.

    In this order: `connect`; the model is filled through `sharding`; `set_up`; then steps, each of
    them `forward` and `backward` in `micro_step` as often as it takes, `clip_gradients`, `update`.
    """

    mixes_by_autocast = True
    """Whether mixed precision is autocast over float32 parameters."""
    updates_parameters = True
    """Whether torch's optimizer updates the parameters of the model themselves."""
    keeps_gradient_buckets = False
    """Whether there is memory for all gradients from the first step on."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sharding: Sharding = Whole()
        """Where the parameters are, once the ranks are connected."""
        self.optimizer: torch.optim.Optimizer
        """Over what is trained, as it was made, once it is set up."""
        self.averages: StateOf | None = None
        """Of what is trained, if the recipe asks for them."""
        if plan.recipe.train.ema_decay is not None:
            self.averages = defaultdict(dict)
        self._norm: Tensor | None = None
        self._in_backward: OptimizerInBackward | None = None

    # Processes

    def connect(self, model: nn.Module) -> None:
        """Connect the ranks, and take this one's device.

        Args:
            model: what is to be trained, outlined, without memory.
        """
        plugins: list[Precision | ClusterEnvironment] = [self.precision]
        if self.plan.communication is not None:
            plugins.append(TorchElasticEnvironment())  # reads torchrun's variables, as we set them
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
        """Fabric's own object for it; the model has no memory yet."""

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return make_device(self.plan)

    @cached_property
    def precision(self) -> Precision:
        """Fabric's plugin for the plan's."""
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
        """The recipe's optimizer as this strategy takes it: class and arguments.

        Raises:
            UserError: the class does not exist or does not take the arguments.
        """
        class_path = self.plan.recipe.optimizer["class_path"]
        return resolve_optimizer(self.plan.recipe, may_fuse=self._may_fuse(class_path))

    def _may_fuse(self, class_path: str) -> bool:
        """Whether torch's fused implementation may be taken, where the optimizer has one."""
        return self.plan.precision != "16-mixed"  # clips unscaled gradients before the step

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over what the model trains.

        Raises:
            UserError: the class refuses its arguments.
        """
        return make_optimizer(self.plan.recipe, model, *self.optimizer_of())

    def prepare(self, phase: ShowPhase) -> None:  # noqa: B027  # most have nothing to do
        """Have what must be compiled for this machine compiled.

        Args:
            phase: shows a title meanwhile.
        """

    def set_up(self, model: LanguageModel) -> None:
        """Take a model that has its numbers; make its optimizer."""
        self._model = model
        self._trained = trainable(model)
        self._forward = self._fabric.setup_module(model, move_to_device=False)
        self.optimizer = self.make_optimizer(model)
        if self.plan.recipe.train.optimizer_in_backward:
            self._in_backward = OptimizerInBackward(self.optimizer)
        self._stepper: Any = self._fabric.setup_optimizers(self.optimizer)
        self._note_rates()

    def _note_rates(self) -> None:
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    # A step

    def set_learning_rate(self, share: float) -> None:
        """Update from here on with this share of each group's full learning rate."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share

    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        """The forward and backward pass of a micro-batch are made in this context.

        Args:
            is_last: whether an update follows: gradients of all ranks must be in it.
        """
        assert is_last or self._in_backward is None
        return nullcontext()

    def keeps_whole_gradients(self, model: nn.Module, *, is_last: bool) -> bool:
        """Whether sharded gradients stay whole after the next backward pass of a model.

        Args:
            model: is told so.
            is_last: whether an update follows.
        """
        return False

    def whole_gradients(self, model: nn.Module) -> Iterable[Tensor]:
        """Those that have stayed so."""
        return ()

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """The summed loss of a micro-batch, in nats: a scalar."""
        loss: Tensor = self._forward(
            batch["input_ids"],
            batch["label_indices"],
            batch["labels"],
            sequence_lengths=batch["sequence_lengths"],
        )
        return loss

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those there are; in the end, their mean over the ranks."""
        self._fabric.backward(loss)

    def clip_gradients(self, limit: float | None) -> None:
        """Measure the norm of all gradients of the step, and scale them so that it is at most that.

        Args:
            limit: None: it is only measured.
        """
        if self._in_backward is not None:
            self._norm = self._in_backward.take_norm()
            return
        scaler = getattr(self.precision, "scaler", None)
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        self._norm = clip_gradients(self._trained, limit)

    def gradient_norm(self) -> float:
        """Global norm before clipping, of the newest step; every rank calls this."""
        assert self._norm is not None
        return self._norm.item()

    def update(self) -> None:
        """Update what is trained, then free the gradients: no activations come beside them."""
        if self._in_backward is None:  # which would have done so
            self._stepper.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.average(self._trained)

    # The average of the weights

    @property
    def average_bytes(self) -> int:
        """What the average of a number takes, in memory and in a checkpoint."""
        return 0 if self.averages is None else torch.float32.itemsize

    def average(self, weights: Iterable[Tensor]) -> None:
        """Take weights after an update into their averages, if the recipe asks for these."""
        decay = self.plan.recipe.train.ema_decay
        if decay is not None and self.averages is not None:
            update_average(weights, self.averages, decay)

    @torch.no_grad()
    def take_averages(self) -> Callable[[], None]:
        """Give what is trained the numbers of its average; every rank calls this.

        Before the first update there is none, and nothing happens.

        Returns:
            What gives it its own numbers back, the same to the bit.
        """
        assert self.averages is not None
        self.sharding.reshard(self._model)
        kept = []
        for parameter in self._trained:
            if AVERAGE in self.averages[parameter]:
                own = local_rows(parameter)
                kept.append((own, own.clone()))
                own.copy_(local_rows(self.averages[parameter][AVERAGE]))
        return partial(self._give_back, kept)

    @torch.no_grad()
    def _give_back(self, kept: Iterable[tuple[Tensor, Tensor]]) -> None:
        self.sharding.reshard(self._model)
        for own, numbers in kept:
            own.copy_(numbers)

    # Checkpoints

    def holder(self) -> Holder:
        """What finds the state of training on this rank."""
        return TorchState(self._model, self.optimizer, self.averages)

    def loss_scale(self) -> tuple[float, float] | None:
        """Of float16 training: the factor, and steps since it last changed; None: there is none."""
        scaler = getattr(self.precision, "scaler", None)
        if scaler is None:
            return None
        state = scaler.state_dict()
        return state["scale"], float(state["_growth_tracker"])

    def set_loss_scale(self, scale: float, age: float) -> None:
        """Put back what `loss_scale` told, where there is any."""
        scaler = getattr(self.precision, "scaler", None)
        if scaler is not None:
            state = scaler.state_dict() | {"scale": scale, "_growth_tracker": int(age)}
            scaler.load_state_dict(state)

    # Memory

    def parameter_memory(self, parameter: Tensor) -> Iterator[Tensor]:
        """What this rank has in memory of a parameter, between steps."""
        yield parameter

    def optimizer_memory(self) -> Iterator[tuple[Tensor, Category]]:
        """What the optimizer keeps, by category."""
        for tensor in tensors_in((self.optimizer.state, self.averages)):
            yield tensor, "optimizer_state"

    def gathered(self, model: nn.Module) -> Iterable[Tensor]:
        """Parameters whose memory a forward pass gathers from other ranks."""
        return ()

    def simulated(self) -> AbstractContextManager[Sharding]:
        """This process as one rank of as many as the plan has, without a word between them."""
        return nullcontext(Whole())

    def simulates_first_step(self) -> bool:
        """Whether a step has to be simulated before the one that is looked at."""
        return False

    def on_device(self, simulation: Simulation) -> OnDevice:
        """What of a simulated step is on the device, and what is in host memory instead."""
        kinds: list[Category] = []
        if self.plan.recipe.optimizer["class_path"].rpartition(".")[2].startswith("Paged"):
            kinds = ["optimizer_state"]  # the driver moves it to the host when it is short
        return simulation.without(kinds if self.plan.kind.pages_optimizer_state else [])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested containers, in bitsandbytes' states and in DeepSpeed's buckets."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)
    elif type(value).__module__.startswith(("bitsandbytes.", "deepspeed.runtime.zero")):
        yield from tensors_in(getattr(value, "__dict__", {}))
