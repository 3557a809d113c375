"""The strategy fsdp: each rank has some rows of every parameter, and gathers them block by block.

FSDP2, torch's `fully_shard`. Zhao et al. 2023, https://arxiv.org/abs/2304.11277.

Private parts that are used here, as they are in torch 2.11 to 2.13: of a parameter of FSDP
`_unsharded_param` and `unsharded_accumulated_grad`; of Muon `_zeropower_via_newtonschulz` and
`_adjust_lr`, because its public step would need parameter, gradient and momentum whole.
"""

import atexit
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from ftkit.models.load_weights import Sharding
from ftkit.recipe.optimizers import traits_of
from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe_sections import rounding_of
from ftkit.recipe.strategy_rows import FsdpOptions
from ftkit.strategies.distributed import make_device
from ftkit.strategies.fully_shard import (
    FullyShard,
    fsdp_parameters,
    mesh_of_nodes,
    one_of_many,
    rows_here,
)
from ftkit.strategies.optimizers import MuonWithAdamW, derived
from ftkit.strategies.state import OptimizerStateView, StatePart, TorchState
from ftkit.strategies.step_memory import Category, OnDevice, Simulation
from ftkit.strategies.strategy import Strategy
from ftkit.utils.accelerators.kinds import HOST_KIND, device_kind


class Fsdp(Strategy):
    """torch's `fully_shard`."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        # FSDP casts what it gathers, but weights that the model rounds are gathered in float32:
        # rounded twice, they would be others than under ddp.
        self.mixes_by_autocast = rounding_of(plan.recipe) is not None
        assert isinstance(plan.options, FsdpOptions)
        self._options = plan.options

    def connect(self, model: nn.Module) -> None:
        super().connect(model)
        strategy: Any = self._fabric.strategy
        # Of all ranks; with hybrid sharding, the model is sharded within a machine and copied
        # between them.
        mesh = strategy.device_mesh["data_parallel"]
        if self.plan.shards < self.plan.world_size:
            mesh = mesh_of_nodes(self.plan.accelerator, self.plan.num_nodes)
        self.sharding = FullyShard(self.plan, mesh)

    def _fabric_strategy(self, model: nn.Module) -> FabricStrategy:
        backend: str | None = self.plan.communication
        if self._options.cpu_offload and self.plan.accelerator != HOST_KIND:
            # Ranks also communicate tensors in host memory: gradients for their norm, and
            # parameters that are gathered for a result. NCCL alone takes no CPU tensors
            # (https://github.com/pytorch/pytorch/issues/148532).
            on_host = f"{HOST_KIND}:{device_kind(HOST_KIND).communication}"
            backend = f"{on_host},{self.plan.accelerator}:{backend}"
            atexit.register(_leave_process_group)  # Fabric does so only for "nccl"
        return ModelParallelStrategy(
            parallelize_fn=lambda model, _: model,  # FullyShard.allocate has sharded it
            data_parallel_size=self.plan.world_size,
            tensor_parallel_size=1,
            process_group_backend=backend,
        )

    def _may_fuse(self, class_path: str) -> bool:
        return traits_of(class_path).fuses_rows and super()._may_fuse(class_path)

    def _over_shards(
        self, optimizer_class: type[torch.optim.Optimizer]
    ) -> type[torch.optim.Optimizer]:
        place = traits_of(self.plan.recipe.optimizer["class_path"]).over_rows
        return derived(place, optimizer_class)

    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        self.keeps_whole_gradients(self._model, is_last=is_last)
        return super().micro_step(is_last=is_last)

    def keeps_whole_gradients(self, model: Any, *, is_last: bool) -> bool:
        if self._options.sync_every_micro_step:
            return False
        # Without a reduction, the gradients stay unsharded until the last micro-step.
        model.set_requires_gradient_sync(is_last)
        return not is_last

    def whole_gradients(self, model: nn.Module) -> Iterable[Tensor]:
        for parameter in fsdp_parameters(model):
            if parameter.unsharded_accumulated_grad is not None:
                yield parameter.unsharded_accumulated_grad
            whole = getattr(parameter, "_unsharded_param", None)  # None: not gathered yet
            if whole is not None and whole.grad is not None:
                yield whole.grad

    def gradient_norm(self) -> float:
        norm = self._norm
        assert isinstance(norm, DTensor)
        # A collective: each rank only knows the norm of its rows.
        return norm.full_tensor().item()

    def state_view(self) -> OptimizerStateView:
        left_out = self._model.body.trained_beside
        return RowState(self._model, self.optimizer, self.averages, left_out=left_out)

    def optimizer_memory(self) -> Iterator[tuple[Tensor, Category]]:
        for gradient in self.whole_gradients(self._model):
            yield gradient, "gradients"
        yield from super().optimizer_memory()

    def gathered(self, model: nn.Module) -> Iterable[Tensor]:
        for parameter in fsdp_parameters(model):
            if hasattr(parameter, "_unsharded_param"):
                yield parameter._unsharded_param

    def simulated(self) -> AbstractContextManager[Sharding]:
        return one_of_many(self.plan, self.plan.shards)

    def simulates_first_step(self) -> bool:
        return True  # FSDP allocates memory in its first pass

    def on_device(self, simulation: Simulation) -> OnDevice:
        if not self._options.cpu_offload or self.plan.accelerator == HOST_KIND:
            return super().on_device(simulation)
        kinds: tuple[Category, ...] = ("parameters", "gradients", "optimizer_state")
        found = simulation.without(kinds)
        sizes = simulation.sizes
        # Parameters and gradients are page-locked, unlike the state of an optimizer.
        host = found.host | {
            "parameters": max(found.host["parameters"], sizes.pinned_bytes),
            "gradients": max(found.host["gradients"], sizes.pinned_trained_bytes),
        }
        return OnDevice(found.peaks, host)


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class RowState(TorchState):
    """State of an optimizer over parameters of which this rank has some rows."""

    def local_values(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def local(self, tensor: Tensor, kind: str) -> StatePart:
        if not isinstance(tensor, DTensor):
            return super().local(tensor, kind)
        values = tensor.to_local().detach().view(-1)
        start = 0
        if values.numel():  # there may be fewer rows than ranks
            # Whole rows in row-major order are one range of numbers.
            start = rows_here(tensor).start * (tensor.numel() // tensor.shape[0])
        mesh = tensor.device_mesh
        # With hybrid sharding, several copies of the model have these rows: each writes a share.
        copy = (mesh.get_local_rank(0), mesh.size(0)) if mesh.ndim > 1 else (0, 1)
        return StatePart(kind=kind, shape=tensor.shape, start=start, values=values, copy=copy)


# Muon


class _GatheringMuon(torch.optim.Muon):
    """Muon over parameters of which this rank has some rows; it keeps its momentum in rows too.

    The direction of an update depends on the whole matrix. Each rank gathers one matrix after the
    other and computes all of its direction, as each does under ddp. If one rank did so for all, an
    update would need two messages instead of one, and buffers for several matrices, to keep the
    other ranks busy meanwhile.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; every rank calls this."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        # The arithmetic of torch's Muon, in its order.
        gradient, momentum = parameter.grad.to_local(), state["momentum_buffer"].to_local()
        momentum.lerp_(gradient, 1 - group["momentum"])
        step = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        how = group["ns_coefficients"], group["ns_steps"], group["eps"]
        whole = _zeropower_via_newtonschulz(_whole(step, parameter), *how)
        # Without a message: every rank has all of it. Offsets as of `rows_here` need real tensors.
        own = distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
        rows = parameter.to_local()
        rows.mul_(1 - group["lr"] * group["weight_decay"])
        rows.add_(own.to_local().to(rows.device), alpha=-rate)


def _whole(rows: Tensor, parameter: DTensor) -> Tensor:
    """Gather a matrix in bfloat16, in which its direction is computed.

    Args:
        rows: those of this rank.
        parameter: whose shape and distribution the matrix has.
    """
    mesh = parameter.device_mesh
    # A copy, which may be changed; on the device also where rows are offloaded to the host.
    rows = rows.to(make_device(mesh.device_type), torch.bfloat16, copy=True)
    matrix = DTensor.from_local(
        rows,
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return matrix.full_tensor()


class GatheringMuonWithAdamW(MuonWithAdamW):
    """Muon, which gathers the matrices of hidden layers, and AdamW for everything else."""

    muon = _GatheringMuon


def gathering(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return the class for sharded parameters in place of `MuonWithAdamW`."""
    assert optimizer_class is MuonWithAdamW
    return GatheringMuonWithAdamW


# Other optimizers


class _OverPlainRows(torch.optim.Optimizer):
    """Mixin that updates this rank's rows of DTensors as plain tensors, for any operation."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        whole = [group["params"] for group in self.param_groups]
        # In place, because an optimizer may keep something in a group.
        for group, parameters in zip(self.param_groups, whole, strict=True):
            group["params"] = [self._rows(p) for p in parameters if _has_rows(p)]
        try:
            super().step()
        finally:
            for group, parameters in zip(self.param_groups, whole, strict=True):
                updated = [p for p in parameters if _has_rows(p)]
                for parameter, rows in zip(updated, group["params"], strict=True):
                    self.state[parameter] = self.state.pop(rows)
                group["params"] = parameters

    def _rows(self, parameter: Any) -> Tensor:
        """This rank's rows with their gradient and state; they share the parameter's memory."""
        rows: Tensor = parameter.to_local().detach()
        rows.grad = parameter.grad.to_local()
        state = self.state[parameter]
        # That of a checkpoint is sharded as the parameter is.
        for key, value in state.items():
            state[key] = value.to_local() if isinstance(value, DTensor) else value
        self.state[rows] = state
        return rows


def _has_rows(parameter: Any) -> bool:
    """Return whether there is a gradient of rows of this rank; it may have none of a parameter."""
    return parameter.grad is not None and bool(parameter.to_local().numel())


def over_plain_rows(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Derive an optimizer whose updates are those of each number by itself, for sharded ones."""
    # Under the same name, which messages show and `canonical_kind` goes by.
    return type(optimizer_class.__name__, (_OverPlainRows, optimizer_class), {})
