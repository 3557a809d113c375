"""Sharding of parameters: whole, as rows (FSDP), or as flat partitions (ZeRO-3).

ZeRO: Rajbhandari et al. 2019, https://arxiv.org/abs/1910.02054. FSDP: Zhao et al. 2023,
https://arxiv.org/abs/2304.11277.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from ftkit.config.plan import Plan
from ftkit.config.strategies import FsdpOptions


class Rows(Protocol):
    """A tensor in memory, or in a file, of which some rows are asked for."""

    def __getitem__(self, rows: slice, /) -> Tensor:
        """The rows."""


class Sharding(Protocol):
    """How a model gets its memory on this rank."""

    def allocate(self, model: Any, device: torch.device) -> None:
        """Give every parameter of the model its memory on this rank; the values are undefined."""

    def put(self, model: nn.Module, name: str, value: Rows) -> None:
        """Set a parameter; only what belongs to this rank is read from the value.

        Every rank puts the same parameters in the same order.
        """

    def reshard(self, model: nn.Module) -> None:
        """Free what was gathered for a forward pass that no backward pass has followed."""

    def whole(self, parameter: Tensor) -> Tensor:
        """The full parameter, gathered from all ranks, which all call this."""


class Whole:
    """Every rank has every parameter: single, DDP, and ZeRO stages 1 and 2."""

    def allocate(self, model: Any, device: torch.device) -> None:
        model.to_empty(device=device)
        model.tie()

    def put(self, model: nn.Module, name: str, value: Rows) -> None:
        model.get_parameter(name).data.copy_(value[:])

    def reshard(self, model: nn.Module) -> None:
        pass

    def whole(self, parameter: Tensor) -> Tensor:
        return parameter.detach()


@contextmanager
def _integers_without_gradients() -> Iterator[None]:
    """Let FSDP shard packed weights, which are integers.

    In torch 2.11 it makes every parameter with a gradient at first and takes that away after; a
    parameter of integers cannot be made so. torch 2.13 says for each one whether it has any.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def parameter(data: Tensor, requires_grad: bool = False) -> nn.Parameter:
        return nn.Parameter(data, requires_grad)

    module: Any = _fsdp_param
    module.nn = SimpleNamespace(**vars(nn) | {"Parameter": parameter})
    try:
        yield
    finally:
        module.nn = nn


def _keep_integers(model: nn.Module) -> None:
    """Have FSDP gather packed weights as they are; torch 2.11 casts them in mixed precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def uncast(parameter: Any) -> Callable[[Any], None]:
        return lambda _: type(parameter).init_dtype_attrs(parameter, MixedPrecisionPolicy())

    for parameter in fsdp_parameters(model):
        if not parameter.sharded_param.is_floating_point():
            parameter.init_dtype_attrs = uncast(parameter)


def fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    """What FSDP knows of every parameter that it shards: torch's FSDPParam."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            yield from group.fsdp_params if group is not None else ()


class FullyShard:
    """FSDP2: each rank has some rows of every parameter, block by block."""

    def __init__(self, plan: Plan, mesh: Any) -> None:
        assert isinstance(plan.options, FsdpOptions)
        self._options = plan.options
        self._mixed = plan.precision == "bf16-mixed"
        self._mesh = mesh

    def allocate(self, model: Any, device: torch.device) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        # Rotary tables stay float32: inputs of the blocks are not cast.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if self._mixed else None,
            reduce_dtype=torch.float32,  # in which ranks add up, also gradients of 16 bits
            cast_forward_inputs=False,
        )
        settings: dict[str, Any] = {"mesh": self._mesh, "mp_policy": policy}
        sharded_in_between = self._options.sharding == "FULL_SHARD"
        if self._options.cpu_offload and device.type != "cpu":
            settings["offload_policy"] = CPUOffloadPolicy()
            device = torch.device("cpu")
        with _integers_without_gradients():
            for block in model.gpt.transformer.h:
                fully_shard(block, **settings, reshard_after_forward=sharded_in_between)
            # The backward pass begins with what the forward pass ends with.
            if not model.tied:  # one parameter cannot belong to two groups
                fully_shard(model.head, **settings, reshard_after_forward=False)
            fully_shard(model, **settings, reshard_after_forward=False)
        _keep_integers(model)
        model.to_empty(device=device)
        model.tie()

    def put(self, model: nn.Module, name: str, value: Rows) -> None:
        parameter = model.get_parameter(name)
        assert isinstance(parameter, DTensor)
        (box,) = parameter.__create_chunk_list__()
        rows = slice(box.offsets[0], box.offsets[0] + box.sizes[0])
        local = parameter.to_local()
        local.copy_(value[rows].reshape(local.shape))

    def reshard(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def whole(self, parameter: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor)
        with torch.no_grad():
            return parameter.full_tensor()


class ZeroThree:
    """DeepSpeed ZeRO-3: each rank has an equal part of every flattened parameter."""

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

    def reshard(self, model: nn.Module) -> None:
        pass

    def whole(self, parameter: Tensor) -> Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
