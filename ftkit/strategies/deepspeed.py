"""The strategy deepspeed: ZeRO shards optimizer state, gradients and parameters by its stage.

Rajbhandari et al. 2019, https://arxiv.org/abs/1910.02054; offloading: Ren et al. 2021,
https://arxiv.org/abs/2101.06840.

Private parts that are used here, as they are in DeepSpeed 0.19 and Lightning 2.6:
`deepspeed.ops.__compatible_ops__`; of a parameter `ds_tensor`, `ds_numel`, `ds_shape`,
`ds_persist` (stage 3) and `_hp_mapping` (stages 1 and 2); of ZeRO's optimizers their flat
partitions, `_get_fp32_opt_state_partition`, `_hp_optimizer_states_linked`,
`_lazy_init_hp_params_optimizer_state`, `cur_scale` and the words in names of attributes
(`_HELD`); of Fabric's strategy `model`, and `setup_environment` of its parent.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from lightning.fabric.accelerators.cpu import CPUAccelerator
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from torch import Tensor

from ftkit.models.language_model import LanguageModel, trainable
from ftkit.models.load_weights import Rows
from ftkit.recipe.plan import Plan
from ftkit.recipe.strategies import DeepSpeedOptions
from ftkit.strategies.deepspeed_build import compile_cpu_optimizer
from ftkit.strategies.optim.average import AVERAGE
from ftkit.strategies.optim.optimizers import resolve_optimizer
from ftkit.strategies.optim.state_kinds import is_scalar_state, state_kinds
from ftkit.strategies.precision import BuiltDeepSpeedPrecision, parameter_dtype
from ftkit.strategies.simulated_step import OnDevice, Simulation
from ftkit.strategies.state import PARAMETER, Holder, StatePart
from ftkit.strategies.step_memory import Category
from ftkit.strategies.strategy import ShowPhase, Strategy, tensors_in
from ftkit.strategies.torch_state import whole_part
from ftkit.strategies.zero_memory import REDUCE_BUCKET_ELEMENTS, with_zero
from ftkit.utils.imports import hidden

_CPU_VERSIONS = {
    "torch.optim.Adam": "deepspeed.ops.adam.DeepSpeedCPUAdam",
    "torch.optim.AdamW": "deepspeed.ops.adam.DeepSpeedCPUAdam",
}
"""Optimizers for state in host memory that do the same as torch's, with vector instructions."""
_HELD: tuple[tuple[str, Category], ...] = (
    ("grad", "gradients"),
    ("ipg", "gradients"),
    ("fp32", "optimizer_state"),
    ("16", "parameters"),
    ("lp_param", "parameters"),
)
"""What an attribute of DeepSpeed's optimizer is, by a word in its name; the first one counts."""


class _OnAnyDevice(DeepSpeedStrategy):
    """Fabric's strategy, which refuses CPUs; DeepSpeed itself runs on them."""

    def setup_environment(self) -> None:
        with hidden("mlflow"):  # its autotuner takes seconds to import it, where it is installed
            import deepspeed
        if isinstance(self.accelerator, CPUAccelerator):
            assert self.parallel_devices is not None
            # Compiled in every process at the start, for a collective that training does not use.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            # DeepSpeed wants devices with an index.
            self.parallel_devices = [
                torch.device("cpu", index) for index in range(len(self.parallel_devices))
            ]
            DDPStrategy.setup_environment(self)
        else:
            super().setup_environment()


class DeepSpeed(Strategy):
    """DeepSpeed's engine, around the model and its optimizer."""

    mixes_by_autocast = False
    updates_parameters = False

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        assert isinstance(plan.options, DeepSpeedOptions)
        self._options = plan.options

    def connect(self, model: nn.Module) -> None:
        self._config = deepspeed_config(self.plan, model)
        super().connect(model)
        if self._options.stage == 3:
            self.sharding = Partitions(self._config)

    def _fabric_strategy(self, model: nn.Module) -> FabricStrategy:
        return _OnAnyDevice(config=self._config, process_group_backend=self.plan.communication)

    def _make_precision(self) -> Precision:
        return BuiltDeepSpeedPrecision(self.plan.precision)

    def prepare(self, phase: ShowPhase) -> None:
        if self._options.offload_optimizer:
            with phase("preparing DeepSpeed's CPU optimizer (compiled once, about a minute)"):
                compile_cpu_optimizer()

    def optimizer_of(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        recipe = self.plan.recipe
        asked = recipe.optimizer["class_path"]
        chosen = _CPU_VERSIONS.get(asked, asked) if self._options.offload_optimizer else asked
        # ZeRO updates slices of its own, for which a fused step gains nothing.
        found, arguments = resolve_optimizer(recipe, class_path=chosen, may_fuse=False)
        if chosen == _CPU_VERSIONS["torch.optim.AdamW"]:
            arguments.setdefault("adamw_mode", asked != "torch.optim.Adam")
            arguments.setdefault("weight_decay", 0.01 if arguments["adamw_mode"] else 0.0)
        return found, arguments

    def set_up(self, model: LanguageModel) -> None:
        self.optimizer = self.make_optimizer(model)
        self._forward, _ = self._fabric.setup(model, self.optimizer, move_to_device=False)
        strategy: Any = self._fabric.strategy
        self._engine = strategy.model
        self._zero: Any = self._engine.optimizer
        self._model, self._trained = model, trainable(model)
        if self.averages is not None:  # beside the moments
            self.averages = self._zero.optimizer.state
        # DeepSpeed has cast the tables with the parameters.
        model.body.build_rope_cache(self.device, model.body.max_length)
        self._note_rates()

    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        self._engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        # The loss of a step is divided once, by its label tokens, and not by micro-steps.
        self._fabric.backward(loss, model=self._forward, scale_wrt_gas=False)

    def clip_gradients(self, limit: float | None) -> None:
        """The engine does both with its update."""

    def gradient_norm(self) -> float:
        return float(self._engine.get_global_grad_norm())

    def update(self) -> None:
        self._engine.step()  # clips before, and frees the gradients
        self.average(self._state().partitions())

    @torch.no_grad()
    def take_averages(self) -> Callable[[], None]:
        """As in every strategy; ZeRO's own numbers, from which it makes its weights, stay."""
        kept = []
        with self._parted():
            for parameter, average in self._averages():
                own = parameter.ds_tensor if self._options.stage == 3 else parameter.detach()
                kept.append((own, own.clone()))
                own.view(-1)[: len(average)].copy_(average)
        return partial(self._give_back, kept)

    @torch.no_grad()
    def _give_back(self, kept: Iterable[tuple[Tensor, Tensor]]) -> None:
        with self._parted():
            super()._give_back(kept)

    def _averages(self) -> Iterator[tuple[Any, Tensor]]:
        """What is trained, with what a rank needs of its average, flat."""
        state = self._state()
        for parameter in self._trained:
            parts = [part for part in state.parts(parameter) if part.kind == AVERAGE]
            if self._options.stage == 3:
                yield from ((parameter, part.values) for part in parts)
            elif AVERAGE in state.kinds():  # every rank has whole weights, and a part of averages
                whole = torch.zeros(parameter.numel(), device=parameter.device)
                for part in parts:
                    whole[part.start : part.start + len(part.values)] = part.values
                torch.distributed.all_reduce(whole)
                yield parameter, whole

    @contextmanager
    def _parted(self) -> Iterator[None]:
        """Each rank has its own part of every parameter alone, and after it the usual ones."""
        if self._options.stage == 3:
            self._zero.checkpoint_event_prologue()
        yield
        if self._options.stage == 3:
            self._zero.checkpoint_event_epilogue()

    def _state(self) -> "ZeroState":
        return ZeroState(self._zero, averages=self.averages is not None)

    def holder(self) -> Holder:
        return self._state()

    def loss_scale(self) -> tuple[float, float] | None:
        if not self.plan.precision.startswith("16"):
            return None
        return float(self._zero.cur_scale), 0.0

    def set_loss_scale(self, scale: float, age: float) -> None:
        if self.plan.precision.startswith("16"):
            self._zero.cur_scale = scale

    def parameter_memory(self, parameter: Tensor) -> Iterator[Tensor]:
        part = getattr(parameter, "ds_tensor", None)  # under ZeRO-3
        if part is not None:
            yield part
        if part is None or getattr(parameter, "ds_persist", False):  # these stay gathered
            yield parameter

    def optimizer_memory(self) -> Iterator[tuple[Tensor, Category]]:
        for name, value in vars(self._zero).items():
            category = next((found for word, found in _HELD if word in name), None)
            if category is None:
                continue
            for tensor in tensors_in(value):
                if not hasattr(tensor, "ds_tensor"):  # may be gathered just now
                    yield tensor, category
                if tensor.is_leaf and tensor.grad is not None:
                    yield tensor.grad, "gradients"
        yield from super().optimizer_memory()

    def gathered(self, model: nn.Module) -> Iterable[Tensor]:
        return model.parameters() if self._options.stage == 3 else ()

    def on_device(self, simulation: Simulation) -> OnDevice:
        optimizer_class, arguments = self.optimizer_of()
        states = sum(state_kinds(optimizer_class, arguments, torch.device("cpu")).values())
        return with_zero(
            simulation,
            self._options,
            world_size=self.plan.world_size,
            working_bytes=parameter_dtype(self.plan).itemsize,
            states=states + (self.averages is not None),
        )


def deepspeed_config(plan: Plan, module: torch.nn.Module) -> dict[str, Any]:
    """DeepSpeed's own settings for the plan and what it trains."""
    options = plan.options
    assert isinstance(options, DeepSpeedOptions)
    # The buffer is taken in full, however few gradients there are.
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    bucket = min(trained, REDUCE_BUCKET_ELEMENTS)
    zero: dict[str, Any] = {"stage": options.stage, "reduce_bucket_size": bucket}
    if options.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": plan.kind.pins_host_memory}
    if options.offload_parameters and options.stage == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": plan.kind.pins_host_memory}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        # Tells whether there are several; which one is the last is said in each step.
        "gradient_accumulation_steps": 2 if plan.accumulates else 1,
        "gradient_clipping": plan.recipe.train.max_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # It would have the host wait for the device twice in every micro-step.
        "timers": {"throughput": {"enabled": False}},
    }
    if plan.precision.startswith("bf16"):
        config["bf16"] = {"enabled": True}
    elif plan.precision.startswith("16"):
        config["fp16"] = {"enabled": True}
    return config


class Partitions:
    """ZeRO-3: each rank has an equal part of every flattened parameter."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def allocate(self, model: Any, device: torch.device) -> None:
        """Take one buffer for whole parameters, which fit into it one after the other.

        Memory of their own, taken and freed in turns with the partitions, would leave holes:
        loading then needs half as much again.
        """
        sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
        self._whole = torch.empty(max(sizes), dtype=torch.uint8, device=device)
        self._left = len(sizes)

    def put(self, model: Any, name: str, value: Rows) -> None:
        import deepspeed

        owner, _, leaf = name.rpartition(".")
        outlined = model.get_parameter(name)
        size = outlined.numel() * outlined.element_size()
        memory = self._whole[:size].view(outlined.dtype).view(outlined.shape)
        parameter = nn.Parameter(memory, requires_grad=outlined.requires_grad)
        if torch.distributed.get_rank() == 0:  # the others receive it
            parameter.data.copy_(value[:])
        deepspeed.zero.Init(
            module=nn.ParameterList([parameter]),
            config_dict_or_path=self._config,
            # Packed weights stay as they are: on CUDA DeepSpeed refuses integers here.
            dtype=outlined.dtype if outlined.is_floating_point() else None,
        )
        setattr(model.get_submodule(owner), leaf, parameter)
        model.tie()
        self._left -= 1
        if not self._left:
            del self._whole

    def replace(self, parameter: nn.Parameter, value: Rows) -> None:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if torch.distributed.get_rank() == 0:  # the others receive it
                parameter.data.copy_(value[:])

    def reshard(self, model: nn.Module) -> None:
        pass

    def whole(self, parameter: Tensor) -> Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()


class ZeroState:
    """Of an optimizer that DeepSpeed has sharded: float32 numbers in flat partitions."""

    def __init__(self, zero: Any, *, averages: bool) -> None:
        """Of ZeRO's optimizer of any stage, with averages or without."""
        self._zero, self._has_averages = zero, averages
        self._inner = self._zero.optimizer
        self._rank = torch.distributed.get_rank()

    def parts(self, parameter: Any) -> Iterator[StatePart]:
        kinds = [None, *self.kinds()]
        if hasattr(parameter, "ds_tensor"):  # stage 3
            size = parameter.ds_tensor.ds_numel
            start = min(self._rank * size, parameter.ds_numel)
            size = min(size, parameter.ds_numel - start)  # the last partition is padded
            if not parameter.requires_grad:  # DeepSpeed's optimizer does not know it
                values = parameter.ds_tensor.detach()[:size]
                yield StatePart(
                    kind=PARAMETER, shape=parameter.ds_shape, start=start, values=values
                )
                return
            for kind in kinds:
                # DeepSpeed's public functions copy to the GPU what is in host memory.
                values, _ = self._zero._get_fp32_opt_state_partition(
                    parameter, release_swap_buffers=False, optim_state_key=kind
                )
                yield StatePart(
                    kind=kind or PARAMETER,
                    shape=parameter.ds_shape,
                    start=start,
                    values=values.detach()[:size],
                )
            return
        if not parameter.requires_grad:
            yield whole_part(parameter, PARAMETER)
            return
        fragment = parameter._hp_mapping
        if fragment is None:  # this rank has nothing of it
            return
        if self.kinds() - (fragment.optim_fragment or {}).keys():
            # DeepSpeed links all groups after the first step of the first group.
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()
        for kind in kinds:
            yield StatePart(
                kind=kind or PARAMETER,
                shape=parameter.shape,
                start=fragment.lp_fragment_address.start,
                values=fragment.get_hp_fragment(kind).detach(),
            )

    def scalars(self) -> dict[str, float]:
        state = self._inner.state.get(self.partitions()[0], {})
        return {key: float(value) for key, value in state.items() if is_scalar_state(value)}

    def allocate(
        self, kinds: Mapping[str, Mapping[str, torch.Size]], scalars: dict[str, float]
    ) -> None:
        wanted = {kind for shapes in kinds.values() for kind in shapes}
        if not self._has_averages:
            wanted.discard(AVERAGE)
        whole_steps = type(self._inner).__module__.startswith("deepspeed.")
        for flat in self.partitions():
            state = self._inner.state[flat]
            state.update({kind: torch.zeros_like(flat.data) for kind in wanted})
            for key, value in scalars.items():
                state[key] = int(value) if whole_steps else torch.tensor(value)
        if not hasattr(self._zero, "fp32_partitioned_groups_flat"):
            self._zero._lazy_init_hp_params_optimizer_state()

    def kinds(self) -> Set[str]:
        """Of state that there is, in order."""
        flat = self.partitions()[0]
        state = self._inner.state.get(flat, {})
        same = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == flat.shape}
        return same.keys()

    def partitions(self) -> list[Tensor]:
        """This rank's numbers of every group, flat."""
        for name in (
            "fp32_partitioned_groups_flat",  # stage 3
            "single_partition_of_fp32_groups",  # stages 1 and 2
            "fp32_groups_flat_partition",  # stage 1 in bfloat16
        ):
            if hasattr(self._zero, name):
                return list(getattr(self._zero, name))
        raise AssertionError(f"{type(self._zero).__name__} has no partitions")
