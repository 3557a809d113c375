"""Sharding by rows: each rank has some of every parameter, and gathers them block by block.

FSDP2, torch's `fully_shard`, for the trained model of fsdp and for frozen models of any strategy.

Private parts that are used here, as they are in torch 2.11 to 2.13: of FSDP
`_fully_shard._fsdp_param.nn` (torch 2.11), `_get_fsdp_state()._fsdp_param_group`, its
`fsdp_params` with `sharded_param` and `init_dtype_attrs`; of DTensor `__create_chunk_list__` and
`ShardingPropagator._propagate_tensor_meta_non_cached`; `FakeStore` and `_disable_current_modes`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from ftkit.models.load_weights import Rows, Sharding
from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe_sections import rounding_of
from ftkit.recipe.strategy_rows import FsdpOptions


class FullyShard:
    """Sharding of a model by rows of every parameter, block by block.

    Under another strategy, of a frozen model alone, by the default options of fsdp.
    """

    def __init__(self, plan: Plan, mesh: Any) -> None:
        self._options = plan.options if isinstance(plan.options, FsdpOptions) else FsdpOptions()
        # Other strategies mix by autocast, which casts what is gathered where it needs it.
        is_mixed = plan.strategy == "fsdp" and plan.precision == "bf16-mixed"
        self._casts = is_mixed and rounding_of(plan.recipe) is None
        self._mesh = mesh

    def allocate(self, model: Any, device: torch.device) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        # Rotary tables stay float32: inputs of the blocks are not cast.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if self._casts else None,
            reduce_dtype=torch.float32,  # 16-bit gradients are summed over ranks in float32
            cast_forward_inputs=False,
        )
        settings: dict[str, Any] = {"mesh": self._mesh, "mp_policy": policy}
        # SHARD_GRAD_OP keeps the parameters of a block between its passes, HYBRID_SHARD frees them.
        sharded_in_between = self._options.sharding != "SHARD_GRAD_OP"
        if self._options.cpu_offload and device.type != "cpu":
            # torch moves rows to the device when it gathers them, and gradients back.
            settings["offload_policy"] = CPUOffloadPolicy()
            device = torch.device("cpu")
        with _integers_without_gradients():
            for block in model.body.blocks:
                fully_shard(block, **settings, reshard_after_forward=sharded_in_between)
            # Not resharded after the forward pass: the backward pass begins with the head.
            if not model.tied:  # one parameter cannot belong to two groups
                fully_shard(model.head, **settings, reshard_after_forward=False)
            fully_shard(model, **settings, reshard_after_forward=False)
        _keep_integers(model)
        if self._options.prefetch:
            self._prefetch(model)
        # Sharded first, on the meta device: the whole model is never allocated.
        model.to_empty(device=device)
        model.tie()

    def _prefetch(self, model: Any) -> None:
        """Make each part of the model gather the parameters of the following parts ahead."""
        parts = [model, *model.body.blocks, *([] if model.tied else [model.head])]
        ahead = self._options.prefetch
        for index, part in enumerate(parts):
            part.set_modules_to_forward_prefetch(parts[index + 1 : index + 1 + ahead])
            # From index 1: the model itself stays gathered all the time.
            part.set_modules_to_backward_prefetch(parts[max(index - ahead, 1) : index][::-1])

    def put(self, model: nn.Module, name: str, value: Rows) -> None:
        self.replace(model.get_parameter(name), value)

    def replace(self, parameter: nn.Parameter, value: Rows) -> None:
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        # Only the rows of this rank are read from the file.
        local.copy_(value[rows_here(parameter)].reshape(local.shape))

    def reshard(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def whole(self, parameter: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor)
        with torch.no_grad():
            return parameter.full_tensor()


_MESSAGES = (
    "all_gather_single",
    "reduce_scatter_single",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
)
"""Functions of torch.distributed that FSDP calls; the last two before torch 2.13."""


def over_all_ranks(plan: Plan) -> FullyShard:
    """Sharding over all ranks of a plan; every rank calls this."""
    from torch.distributed.device_mesh import init_device_mesh

    return FullyShard(plan, init_device_mesh(plan.accelerator, (plan.world_size,)))


@contextmanager
def one_of_many(plan: Plan, shards: int) -> Iterator[Sharding]:
    """Let this process act as one of the ranks that share a model, without communication.

    Args:
        plan: of the ranks.
        shards: how many of them share it.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    connected = dist.is_initialized()  # inside a run of the plan
    talk = {name: getattr(dist, name) for name in _MESSAGES if hasattr(dist, name)}
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(propagator: ShardingPropagator, schema: Any) -> Any:
        # Shapes are computed with fake tensors, which must not count as memory of the step.
        with _disable_current_modes():
            return propagate(propagator, schema)

    propagator: Any = ShardingPropagator
    try:
        if not connected:
            # torch's fake group: collectives return at once, so one process can be a rank of many.
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shards)
        if connected and shards < plan.world_size:
            # Inside a run with hybrid sharding, the ranks that share a model are those of a node.
            nodes = mesh_of_nodes(plan.accelerator, plan.num_nodes)
            mesh = DeviceMesh.from_group(nodes.get_group("shards"), "cpu")
        else:
            mesh = init_device_mesh("cpu", (shards,))
        for name in talk:
            # A run of the plan is connected to real ranks, which would wait for these messages.
            setattr(dist, name, lambda *_, **__: None)
        propagator._propagate_tensor_meta_non_cached = unseen
        yield FullyShard(plan, mesh)
    finally:
        propagator._propagate_tensor_meta_non_cached = propagate
        for name, function in talk.items():
            setattr(dist, name, function)
        if not connected and dist.is_initialized():
            dist.destroy_process_group()


@cache
def mesh_of_nodes(device_type: str, num_nodes: int) -> Any:
    """Mesh of [nodes, devices of each]: copies of the model, and ranks that share one.

    Making it is a collective, so it is made once.
    """
    from torch.distributed.device_mesh import init_device_mesh

    shape = (num_nodes, dist.get_world_size() // num_nodes)
    return init_device_mesh(device_type, shape, mesh_dim_names=("copies", "shards"))


def rows_here(tensor: DTensor) -> slice:
    """Rows of a tensor that this rank has."""
    (box,) = tensor.__create_chunk_list__()
    return slice(box.offsets[0], box.offsets[0] + box.sizes[0])


@contextmanager
def _integers_without_gradients() -> Iterator[None]:
    """Let FSDP shard packed weights, which are integers.

    torch 2.11 creates every parameter with requires_grad and clears it later, which fails for
    integers; torch 2.13 passes the right value.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def parameter(data: Tensor, requires_grad: bool = False) -> nn.Parameter:
        return nn.Parameter(data, requires_grad)

    module: Any = _fsdp_param
    # Only the name in this module is replaced, and only while parameters are created.
    module.nn = SimpleNamespace(**vars(nn) | {"Parameter": parameter})
    try:
        yield
    finally:
        module.nn = nn


def _keep_integers(model: nn.Module) -> None:
    """Make FSDP gather packed weights uncast; torch 2.11 casts them in mixed precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def uncast(parameter: Any) -> Callable[[Any], None]:
        return lambda _: type(parameter).init_dtype_attrs(parameter, MixedPrecisionPolicy())

    for parameter in fsdp_parameters(model):
        if not parameter.sharded_param.is_floating_point():
            parameter.init_dtype_attrs = uncast(parameter)


def fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    """Torch's FSDPParam of every parameter that FSDP shards."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            yield from group.fsdp_params if group is not None else ()
