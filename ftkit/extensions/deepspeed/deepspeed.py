"""The strategy deepspeed: ZeRO shards optimizer state, gradients and parameters by its stage.

Rajbhandari et al. 2019, https://arxiv.org/abs/1910.02054; offloading: Ren et al. 2021,
https://arxiv.org/abs/2101.06840.

Private parts that are used here, as they are in DeepSpeed 0.19 and Lightning 2.6:
`deepspeed.ops.__compatible_ops__`; `ds_opt_adam` and `opt_id` of its CPU Adam; of a parameter
`ds_tensor`, `ds_numel`, `ds_shape`, `ds_persist`, `all_gather` (stage 3) and `_hp_mapping` (stages
1 and 2); of ZeRO's optimizers their flat partitions, `_get_fp32_opt_state_partition`,
`_optimizer_step`, `sub_group_to_group_id`, `persistent_parameters`, `_hp_optimizer_states_linked`,
`_lazy_init_hp_params_optimizer_state`, `cur_scale` and parts of the names of attributes
(`_CATEGORIES`); of Fabric's strategy `model`, and `setup_environment` of its parent.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from filelock import FileLock
from lightning.fabric.accelerators.cpu import CPUAccelerator
from lightning.fabric.plugins.precision import DeepSpeedPrecision, Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from torch import Tensor

from ftkit.extensions.deepspeed.strategies import DeepSpeedOptions
from ftkit.extensions.deepspeed.zero_memory import REDUCE_BUCKET_ELEMENTS, with_zero
from ftkit.models.language_model import LanguageModel, trainable
from ftkit.models.load_weights import Rows
from ftkit.models.lora.peft_layers import tuner_layers
from ftkit.recipe.adapter_types import is_adapter
from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe import Component
from ftkit.strategies.optimizers import resolve_optimizer
from ftkit.strategies.state import (
    AVERAGE,
    LEFT_OUT,
    PARAMETER,
    OptimizerStateView,
    StatePart,
    is_scalar_state,
    scalars_of,
    state_kinds,
    whole_part,
    without_place,
)
from ftkit.strategies.step_memory import (
    Category,
    OnDevice,
    Simulation,
)
from ftkit.strategies.strategy import (
    LOSS_SCALE,
    LOSS_SCALE_AGE,
    ShowPhase,
    Strategy,
    parameter_dtype,
    tensors_in,
)
from ftkit.utils.imports import hidden

_CPU_VERSIONS = {
    "torch.optim.Adam": "deepspeed.ops.adam.DeepSpeedCPUAdam",
    "torch.optim.AdamW": "deepspeed.ops.adam.DeepSpeedCPUAdam",
}
"""Optimizers with vector instructions for state in host memory, equivalent to torch's."""
_CATEGORIES: tuple[tuple[str, Category], ...] = (
    ("grad", "gradients"),
    ("ipg", "gradients"),
    ("fp32", "optimizer_state"),
    ("16", "parameters"),
    ("lp_param", "parameters"),
)
"""Category of an attribute of DeepSpeed's optimizer by a part of its name; the first match wins."""


_APART = "is_apart"
"""Key of a group of parameters: whether they are those that some steps leave out."""


def _register_adapter(model: nn.Module) -> None:
    """Let each adapted layer gather the adapter's parameters, with which it computes by itself.

    DeepSpeed finds that out in the first pass that uses them. If a pass without the adapter came
    first, as that of a reference does, it refuses the next one, which is not as it was traced.
    """
    import deepspeed

    for _, layer in tuner_layers(model):
        parameters = [
            parameter
            for name, parameter in layer.named_parameters()
            # DoRA's magnitudes are used in a module of their own.
            if is_adapter(f".{name}") and "magnitude" not in name
        ]
        # DoRA takes the norms of the sum of both; LoHa and LoKr have its shape.
        if getattr(layer, "lora_magnitude_vector", None) or hasattr(layer, "module_dropout"):
            parameters.append(layer.get_base_layer().weight)
        for parameter in parameters:
            deepspeed.zero.register_external_parameter(layer, parameter)


def _forget_powers(optimizer: Any) -> None:
    """Let DeepSpeed's CPU Adam raise its betas to the number of the next step.

    From step to step it multiplies powers that it keeps, but a resumed run begins with
    exponentiation, whose last bits differ.
    """
    if hasattr(optimizer, "ds_opt_adam"):
        # Made anew with betas of 0: for others it computes the powers. It gets rate, eps and decay
        # with each step.
        numbers = [0.0] * 5
        optimizer.ds_opt_adam.create_adam(optimizer.opt_id, *numbers, optimizer.adam_w_mode, False)


def _group_apart(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Give parameters that some steps leave out groups of their own, which slices follow."""
    apart, groups = {*parameters}, list[dict[str, Any]]()
    for group in optimizer.param_groups:
        for is_apart in (False, True):
            if own := [one for one in group["params"] if (one in apart) == is_apart]:
                groups.append(group | {"params": own, _APART: is_apart})
    optimizer.param_groups[:] = groups


def _is_apart(zero: Any, number: int) -> bool:
    """Return whether a partition of ZeRO's optimizer is one of parameters that steps leave out."""
    groups = getattr(zero, "sub_group_to_group_id", None) or {}
    return bool(zero.optimizer.param_groups[groups.get(number, number)][_APART])


class _OnAnyDevice(DeepSpeedStrategy):
    """Fabric's strategy without its refusal of CPUs, on which DeepSpeed itself runs."""

    def setup_environment(self) -> None:
        with hidden("mlflow"):  # its autotuner would import it, which takes seconds
            import deepspeed
        if isinstance(self.accelerator, CPUAccelerator):
            assert self.parallel_devices is not None
            # Otherwise compiled in every process, for a collective that training does not use.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            # DeepSpeed wants devices with an index.
            self.parallel_devices = [
                torch.device("cpu", index) for index in range(len(self.parallel_devices))
            ]
            # The grandparent's: Fabric's own method refuses every accelerator but CUDA.
            DDPStrategy.setup_environment(self)
        else:
            super().setup_environment()


class _BuiltPrecision(DeepSpeedPrecision):
    """Fabric's precision of DeepSpeed without conversions, as in TrueHalfPrecision."""

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def convert_input(self, data: Any) -> Any:
        return data


class DeepSpeed(Strategy):
    """DeepSpeed's engine around the model and its optimizer."""

    mixes_by_autocast = False
    updates_parameters = False

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        assert isinstance(plan.options, DeepSpeedOptions)
        self._options = plan.options
        self.keeps_gradients_whole = plan.options.stage == 1

    def connect(self, model: nn.Module) -> None:
        # Before the ranks connect: Fabric's strategy is created with these settings.
        self._config = deepspeed_config(self.plan, model)
        super().connect(model)
        if self._options.stage == 3:
            self.sharding = Partitions(self._config)

    def _fabric_strategy(self, model: nn.Module) -> FabricStrategy:
        return _OnAnyDevice(config=self._config, process_group_backend=self.plan.communication)

    def _make_precision(self) -> Precision:
        return _BuiltPrecision(self.plan.precision)

    def prepare(self, phase: ShowPhase) -> None:
        if self.optimizer_of()[0].__name__ == "DeepSpeedCPUAdam":
            with phase("preparing DeepSpeed's CPU optimizer (compiled once, about a minute)"):
                compile_cpu_optimizer()

    def optimizer_of(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        optimizer = self.plan.recipe.optimizer
        named = used = optimizer["class_path"]
        if self._options.offload_optimizer:
            used = _CPU_VERSIONS.get(named, named)
        # ZeRO updates flat slices, for which a fused step gains nothing.
        optimizer_class, arguments = resolve_optimizer(
            Component(class_path=used, init_args=optimizer["init_args"]), may_fuse=False
        )
        if used == _CPU_VERSIONS["torch.optim.AdamW"]:
            arguments.setdefault("adamw_mode", named != "torch.optim.Adam")
            # The defaults of torch's AdamW and Adam: offloading must not change what is learned.
            arguments.setdefault("weight_decay", 0.01 if arguments["adamw_mode"] else 0.0)
        return optimizer_class, arguments

    def set_up(self, model: LanguageModel) -> None:
        self.optimizer = self.make_optimizer(model)
        beside = [p for p in model.body.trained_beside if p.requires_grad]
        _group_apart(self.optimizer, beside)
        if self._options.stage == 3:
            model.body.hold_beside()
        # Not moved: parameters are on the device already, or offloaded.
        self._forward, _ = self._fabric.setup(model, self.optimizer, move_to_device=False)
        strategy: Any = self._fabric.strategy
        self._engine = strategy.model
        self._zero: Any = self._engine.optimizer
        # DeepSpeed makes torch's Adagrad anew, with state from the start and one group: its rates
        # and decay would be those of the defaults for the whole run.
        self.optimizer.state, self._zero.optimizer = self._zero.optimizer.state, self.optimizer
        self._model, self._trained = model, trainable(model)
        if self.averages is not None:  # stored with the moments, of the same flat slices
            self.averages = self._zero.optimizer.state
        self._leave_out_groups()
        if self._options.stage == 3:
            _register_adapter(model)
            if beside:
                self._keep_gathered(beside)
        # DeepSpeed has cast the rotary tables together with the parameters.
        model.body.build_rope_cache(self.device, model.body.max_length)
        self._note_rates()

    def _leave_out_groups(self) -> None:
        """Let an update leave out the groups of parameters without images, if there were none."""
        self._leaves_out, update = False, self._zero._optimizer_step

        def step(number: int) -> None:
            if not _is_apart(self._zero, number):
                update(number)
            elif not self._leaves_out:
                with self._without_average_alone(number):
                    update(number)

        self._zero._optimizer_step = step

    @contextmanager
    def _without_average_alone(self, number: int) -> Iterator[None]:
        """Context in which a partition has no state if it has an average alone.

        All steps before have left it out, and optimizers only begin their state where there is
        none.
        """
        state = self._zero.optimizer.state[self._state().partitions()[number]]
        average = state.pop(AVERAGE) if [*state] == [AVERAGE] else None
        yield
        if average is not None:
            state[AVERAGE] = average

    def _keep_gathered(self, parameters: list[Any]) -> None:
        """Gather parameters now and after each update, as DeepSpeed does it with small ones.

        Those that compute media: where modules gather them, ranks with other numbers of images
        would wait for each other.
        """
        others = [one for one in parameters if not one.ds_persist]
        for parameter in others:
            parameter.ds_persist = True
        self._zero.persistent_parameters += others
        parameters[0].all_gather(parameters)

    @contextmanager
    def computing_with(self, model: LanguageModel) -> Iterator[None]:
        if self._options.stage < 3:  # parameters are whole
            yield
            return
        import deepspeed

        # Without an optimizer the engine does no more than gather the parameters of each module.
        zero = {key: v for key, v in self._config["zero_optimization"].items() if v is not None}
        zero.pop("offload_optimizer", None)
        engine, *_ = deepspeed.initialize(
            model=model,
            config=self._config | {"zero_optimization": zero},
            dist_init_required=False,
        )
        model.body.build_rope_cache(self.device, model.body.max_length)  # as in `set_up`
        try:
            yield
        finally:
            engine.destroy()
            # A cache of functions in DeepSpeed's coordinator keeps the modules, but not the memory.
            for parameter in model.parameters():
                of_rank: Any = parameter
                of_rank.ds_tensor.data = parameter.data = torch.empty(0, dtype=parameter.dtype)

    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        # Otherwise DeepSpeed counts micro-steps itself, but steps may have different numbers of
        # them.
        self._engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        # The loss is already divided by the label tokens of the step, not by micro-steps.
        self._fabric.backward(loss, model=self._forward, scale_wrt_gas=False)

    def clip_gradients(self, limit: float | None) -> None:
        """Do nothing: the engine measures and clips within its update."""

    def gradient_norm(self) -> float:
        return float(self._engine.get_global_grad_norm())

    @property
    def scales_loss(self) -> bool:
        return self.plan.precision.startswith("16")

    def leave_out(self, parameters: Iterable[nn.Parameter]) -> None:
        self._leaves_out = True  # their gradients are already in flat slices

    def update(self) -> float:
        _forget_powers(self._zero.optimizer)
        # It also clips before, and frees the gradients after; in every precision it leaves the
        # update out if the norm is not finite.
        self._engine.step()
        self._leaves_out = False
        norm = self.gradient_norm()
        if math.isfinite(norm) or self.scales_loss:
            self.average(self._state().partitions())
        return norm

    @torch.no_grad()
    def take_averages(self) -> Callable[[], None]:
        """Replace the weights by their averages; ZeRO's master weights stay unchanged."""
        kept = []
        with self._parted():
            for parameter, average in self._averages():
                own = parameter.ds_tensor if self._options.stage == 3 else parameter.detach()
                kept.append((own, own.clone()))
                # The slice leaves out the padding of a ZeRO-3 partition.
                own.view(-1)[: len(average)].copy_(average)
        return partial(self._restore, kept)

    @torch.no_grad()
    def _restore(self, kept: Iterable[tuple[Tensor, Tensor]]) -> None:
        with self._parted():
            super()._restore(kept)

    def _averages(self) -> Iterator[tuple[Any, Tensor]]:
        """Trained parameters with this rank's part of their averages, flat."""
        state = self._state()
        for parameter in self._trained:
            parts = [part for part in state.parts(parameter) if part.kind == AVERAGE]
            if self._options.stage == 3:
                yield from ((parameter, part.values) for part in parts)
            elif AVERAGE in state.kinds():  # weights are whole, averages are sharded
                whole = torch.zeros(parameter.numel(), device=parameter.device)
                for part in parts:
                    whole[part.start : part.start + len(part.values)] = part.values
                # Every number is in the range of exactly one rank, so the sum is the whole average.
                torch.distributed.all_reduce(whole)
                yield parameter, whole

    @contextmanager
    def _parted(self) -> Iterator[None]:
        """Context in which each rank has only its own part of every parameter, under ZeRO-3."""
        if self._options.stage == 3:
            # Small parameters stay gathered (`ds_persist`): these hooks of DeepSpeed free and
            # gather them.
            self._zero.checkpoint_event_prologue()
        yield
        if self._options.stage == 3:
            self._zero.checkpoint_event_epilogue()

    def _state(self) -> "ZeroState":
        left_out = self._model.body.trained_beside
        return ZeroState(self._zero, averages=self.averages is not None, left_out=left_out)

    def state_view(self) -> OptimizerStateView:
        return self._state()

    def loss_scale(self) -> dict[str, float]:
        if not self.scales_loss:
            return {}
        return {LOSS_SCALE: float(self._zero.cur_scale), LOSS_SCALE_AGE: 0.0}

    def restore_loss_scale(self, scalars: dict[str, float]) -> None:
        # Removed in any precision: what is left in `scalars` becomes state of the optimizer.
        scale, _ = scalars.pop(LOSS_SCALE, None), scalars.pop(LOSS_SCALE_AGE, None)
        if scale is not None and self.scales_loss:
            self._zero.cur_scale = scale

    def parameter_memory(self, parameter: Tensor) -> Iterator[Tensor]:
        part = getattr(parameter, "ds_tensor", None)  # under ZeRO-3
        if part is not None:
            yield part
        if part is None or getattr(parameter, "ds_persist", False):  # these stay gathered
            yield parameter

    def optimizer_memory(self) -> Iterator[tuple[Tensor, Category]]:
        for name, value in vars(self._zero).items():
            category = next((found for word, found in _CATEGORIES if word in name), None)
            if category is None:
                continue
            for tensor in tensors_in(value, "deepspeed.runtime.zero"):  # its buckets
                if not hasattr(tensor, "ds_tensor"):  # a parameter, perhaps gathered now
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
    """DeepSpeed's settings for a plan.

    Args:
        plan: of the run.
        module: that is trained.
    """
    options = plan.options
    assert isinstance(options, DeepSpeedOptions)
    # DeepSpeed allocates the whole bucket, even if there are fewer gradients.
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    bucket = min(trained, REDUCE_BUCKET_ELEMENTS)
    # DeepSpeed's default of 500 million numbers takes 2 GB in float32 on every rank.
    zero: dict[str, Any] = {"stage": options.stage, "reduce_bucket_size": bucket}
    if options.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": plan.kind.pins_host_memory}
    if options.offload_parameters and options.stage == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": plan.kind.pins_host_memory}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        # Only says whether there are several: each micro-step says whether it is the last.
        "gradient_accumulation_steps": 2 if plan.accumulates else 1,
        "gradient_clipping": plan.recipe.train.max_norm or 0.0,
        "zero_optimization": zero,
        # Otherwise DeepSpeed refuses optimizers that it does not list and, with offloading, all but
        # its own.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # This timer would synchronize host and device twice in every micro-step.
        "timers": {"throughput": {"enabled": False}},
    }
    if plan.precision.startswith("bf16"):
        config["bf16"] = {"enabled": True}
    elif plan.precision.startswith("16"):
        config["fp16"] = {"enabled": True}
    return config


class Partitions:
    """Sharding under ZeRO-3: each rank has an equal part of every flattened parameter."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def allocate(self, model: Any, device: torch.device) -> None:
        """Allocate one buffer, through which whole parameters pass one after the other."""
        # Separate allocations, in turns with those of the partitions, would fragment the memory:
        # loading then needs half as much again.
        sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
        self._whole = torch.empty(max(sizes), dtype=torch.uint8, device=device)
        self._left = len(sizes)

    def put(self, model: Any, name: str, value: Rows) -> None:
        import deepspeed

        owner, _, leaf = name.rpartition(".")
        outlined = model.get_parameter(name)
        size = outlined.numel() * outlined.element_size()
        # In the one buffer, because each whole parameter only exists until it is partitioned.
        memory = self._whole[:size].view(outlined.dtype).view(outlined.shape)
        parameter = nn.Parameter(memory, requires_grad=outlined.requires_grad)
        if torch.distributed.get_rank() == 0:  # the others receive it
            parameter.data.copy_(value[:])
        # Broadcasts the parameter from rank 0, and keeps this rank's partition of it.
        deepspeed.zero.Init(
            module=nn.ParameterList([parameter]),
            config_dict_or_path=self._config,
            # None for packed weights: on CUDA DeepSpeed refuses integers here.
            dtype=outlined.dtype if outlined.is_floating_point() else None,
        )
        # Behind the last number the partition of the last rank holds whatever was in memory, which
        # must not look like a number that is not finite.
        partition = parameter.ds_tensor  # type: ignore[attr-defined]
        own = outlined.numel() - torch.distributed.get_rank() * partition.numel()
        partition.data[max(own, 0) :].zero_()
        setattr(model.get_submodule(owner), leaf, parameter)
        # A tied parameter was replaced in one of its places.
        model.tie()
        self._left -= 1
        # The last parameter has been taken: free the buffer.
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
    """State of an optimizer that DeepSpeed has sharded: float32 numbers in flat partitions."""

    def __init__(self, zero: Any, *, averages: bool, left_out: Iterable[nn.Parameter] = ()) -> None:
        """View ZeRO's optimizer of any stage, with averages or without.

        Args:
            zero: the optimizer.
            averages: whether its state has them.
            left_out: parameters that some steps leave out.
        """
        self._zero, self._has_averages = zero, averages
        self._apart = {*left_out}
        self._inner = self._zero.optimizer
        self._rank = torch.distributed.get_rank()

    def parts(self, parameter: Any) -> Iterator[StatePart]:
        own_kinds = self.kinds(is_apart=parameter in self._apart)
        kinds = [None, *own_kinds]
        if hasattr(parameter, "ds_tensor"):  # stage 3
            size = parameter.ds_tensor.ds_numel
            # Ranks beyond the end of a small parameter have only padding.
            start = min(self._rank * size, parameter.ds_numel)
            size = min(size, parameter.ds_numel - start)  # the last partition is padded
            if not parameter.requires_grad:  # not in DeepSpeed's optimizer
                values = parameter.ds_tensor.detach()[:size]
                yield StatePart(
                    kind=PARAMETER, shape=parameter.ds_shape, start=start, values=values
                )
                return
            for kind in kinds:
                # DeepSpeed's public functions would copy offloaded state to the GPU.
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
        if own_kinds - (fragment.optim_fragment or {}).keys():
            # DeepSpeed links the state of all groups after the first group's first step, when that
            # of later groups is still missing: link it again.
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
        found: dict[str, float] = {}
        for is_apart, prefix in ((False, ""), (True, LEFT_OUT)):
            # Any partition will do: all of such parameters count the same steps.
            for flat in self._partitions_of(is_apart)[:1]:
                state = self._inner.state.get(flat, {})
                numbers = {key: v for key, v in state.items() if is_scalar_state(v)}
                found |= {f"{prefix}{key}": float(value) for key, value in numbers.items()}
        return found

    def allocate(
        self, kinds: Mapping[str, Mapping[str, torch.Size]], scalars: dict[str, float]
    ) -> None:
        wanted = {kind for shapes in kinds.values() for kind in shapes}
        if not self._has_averages:
            wanted.discard(AVERAGE)
        # DeepSpeed's own optimizers count steps in a Python int, torch's in a tensor.
        whole_steps = type(self._inner).__module__.startswith("deepspeed.")
        for is_apart in (False, True):
            own = scalars_of(scalars, left_out=is_apart)
            # Where every step has left them out, they have an average alone.
            is_updated = not scalars or bool(own)
            for flat in self._partitions_of(is_apart):
                found = (kind for kind in wanted if is_updated or kind == AVERAGE)
                state = self._inner.state[flat]
                state.update({kind: torch.zeros_like(flat.data) for kind in found})
                for key, value in own.items():
                    state[key] = int(value) if whole_steps else torch.tensor(value)
        if not hasattr(self._zero, "fp32_partitioned_groups_flat"):
            self._zero._lazy_init_hp_params_optimizer_state()

    def kinds(self, *, is_apart: bool = False) -> Set[str]:
        """Kinds of existing state, in order.

        Args:
            is_apart: of the parameters that some steps leave out.
        """
        # The first partition stands for all: an optimizer keeps the same kinds for each.
        flat = self._partitions_of(is_apart)[0]
        state = self._inner.state.get(flat, {})
        # Moments have the shape of the partition; counts of steps are scalars.
        moments = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.ndim}
        for kind, moment in moments.items():
            if moment.shape != flat.shape:
                raise without_place(self._inner, kind)
        return moments.keys()

    def _partitions_of(self, is_apart: bool) -> list[Tensor]:
        """Partitions of the parameters that some steps leave out, or of the others."""
        found = enumerate(self.partitions())
        return [flat for number, flat in found if _is_apart(self._zero, number) == is_apart]

    def partitions(self) -> list[Tensor]:
        """This rank's numbers of every parameter group, flat."""
        for name in (
            "fp32_partitioned_groups_flat",  # stage 3
            "single_partition_of_fp32_groups",  # stages 1 and 2
            "fp32_groups_flat_partition",  # stage 1 in bfloat16
        ):
            if hasattr(self._zero, name):
                return list(getattr(self._zero, name))
        raise AssertionError(f"{type(self._zero).__name__} has no partitions")


# DeepSpeed's CPU optimizer, compiled once for each machine

STALE_S = 600.0
"""No compilation takes longer: an older lock file of torch was left by a killed process."""


def compile_cpu_optimizer() -> None:
    """Make DeepSpeed compile its CPU optimizer if needed; ranks wait for each other."""
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from torch.utils.cpp_extension import _get_build_directory

    builder = CPUAdamBuilder()
    with sole_builder(Path(_get_build_directory(builder.name, verbose=False))):
        # Quick if it was compiled before: torch then only loads it.
        builder.load(verbose=False)


@contextmanager
def sole_builder(directory: Path) -> Iterator[None]:
    """Let one process at a time compile into a directory, also after one of them was killed."""
    # torch's own lock is a file that a killed process leaves behind, and torch then waits forever.
    # FileLock ends with its process. The mark shows that the process before did not finish, so
    # that its lock file can be removed.
    baton, mark = directory / "lock", directory / "ftkit.building"
    with FileLock(directory / "ftkit.lock"):
        if baton.exists() and (mark.exists() or time.time() - baton.stat().st_mtime > STALE_S):
            baton.unlink(missing_ok=True)
        mark.touch()
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)
