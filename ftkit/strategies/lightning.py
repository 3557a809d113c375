"""Lightning's strategies: single device, DDP, FSDP, DeepSpeed, as a plan asks for them."""

import atexit
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch.nn.parallel import DistributedDataParallel

from ftkit.config.plan import Plan
from ftkit.config.recipe import Recipe
from ftkit.config.strategies import DeepSpeedOptions, FsdpOptions
from ftkit.strategies.distributed import make_device
from ftkit.strategies.precision import make_precision
from ftkit.strategies.sharding import FullyShard, Sharding, Whole, ZeroThree


class _StateStays(Strategy):
    """Leaves the state of optimizers where it is when training ends, well or not.

    Lightning's strategies move it to host memory: beside the copy of the last checkpoint, before
    the result is saved, and in a process that ends soon.
    """

    def teardown(self) -> None:
        self.optimizers = []
        super().teardown()


class SingleDevice(_StateStays, SingleDeviceStrategy):
    """Lightning's strategy for one device."""


class Replicated(_StateStays, DDPStrategy):
    """Lightning's strategy for DDP."""


class DeepSpeed(_StateStays, DeepSpeedStrategy):
    """Lightning's strategy, on CPU too, and with the loss divided once.

    Lightning's refuses CPUs, which DeepSpeed itself runs on. It also divides the loss by the
    number of micro-steps, and DeepSpeed divides again: gradients would be too small by that
    factor and clipping would never bite.
    """

    def setup_environment(self) -> None:
        if isinstance(self.accelerator, CPUAccelerator):
            import deepspeed

            assert self.parallel_devices is not None
            # Compiled in every process at the start, for a collective that training does not use.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            # DeepSpeed wants devices with an index.
            self.parallel_devices = [
                torch.device("cpu", index) for index in range(len(self.parallel_devices))
            ]
            super(DeepSpeedStrategy, self).setup_environment()
        else:
            super().setup_environment()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Leave modules as they are made: `ZeroThree` partitions each parameter itself."""
        self._init_config_if_needed()
        yield

    def backward(
        self,
        closure_loss: torch.Tensor,
        optimizer: torch.optim.Optimizer | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)


_BOTH = "cpu:gloo,cuda:nccl"
"""Backends of a process group whose ranks also reduce what is offloaded to host memory: gradients
for their norm, and parameters that are gathered for a result. NCCL alone takes no CPU tensors
(https://github.com/pytorch/pytorch/issues/148532)."""


class FullySharded(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, with every parameter left where it was put.

    Lightning's moves the whole module to the device at the end of its set-up, also the parameters
    that are kept in host memory.
    """

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.process_group_backend == _BOTH:  # Lightning does so for "nccl" alone
            atexit.register(_leave_process_group)

    def model_to_device(self) -> None:
        pass


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def set_arithmetic(recipe: Recipe) -> None:
    """Have this process compute as the recipe says; comes before its first use of a device."""
    exact = recipe.deterministic
    torch.set_float32_matmul_precision("highest" if exact else "high")
    torch.use_deterministic_algorithms(exact)
    torch.backends.cudnn.deterministic = exact
    if exact:  # cuBLAS otherwise adds up in buffers of which it may take any
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def make_strategy(plan: Plan, module: torch.nn.Module) -> Strategy:
    """Lightning's strategy for the plan's; the module is outlined, without memory."""
    if plan.strategy == "single":
        return SingleDevice(make_device(plan))
    backend: str | None = plan.communication
    if isinstance(plan.options, FsdpOptions) and plan.options.cpu_offload and backend == "nccl":
        backend = _BOTH
    if plan.strategy == "ddp":
        tables: dict[str, Any] = {_SYNC_BUFFERS: False}  # every rank computes them
        return Replicated(
            process_group_backend=backend,
            gradient_as_bucket_view=True,  # saves a copy of the gradients
            **tables,
        )
    if plan.strategy == "fsdp":
        return FullySharded(
            data_parallel_size=plan.world_size,
            tensor_parallel_size=1,
            process_group_backend=backend,
        )
    return DeepSpeed(config=deepspeed_config(plan, module), process_group_backend=backend)


_SYNC_BUFFERS = next(  # torch 2.13 warns of the older name
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)
REDUCE_BUCKET_ELEMENTS = 50_000_000
"""Gradients that ranks add up at once; DeepSpeed's own ten times as many take 2 GB in float32."""


def deepspeed_config(plan: Plan, module: torch.nn.Module) -> dict[str, Any]:
    """DeepSpeed's own settings for the plan and what it trains."""
    options = plan.options
    assert isinstance(options, DeepSpeedOptions)
    # The buffer is taken in full, however few gradients there are.
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    bucket = min(trained, REDUCE_BUCKET_ELEMENTS)
    zero: dict[str, Any] = {"stage": options.stage, "reduce_bucket_size": bucket}
    if options.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": plan.accelerator == "cuda"}
    if options.offload_parameters and options.stage == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": plan.accelerator == "cuda"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
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


def make_sharding(plan: Plan, module: L.LightningModule) -> Sharding:
    """Where the parameters live; the processes are connected."""
    if plan.strategy == "fsdp":
        mesh = module.device_mesh
        assert mesh is not None
        return FullyShard(plan, mesh["data_parallel"])
    if isinstance(plan.options, DeepSpeedOptions) and plan.options.stage == 3:
        return ZeroThree(deepspeed_config(plan, module))
    return Whole()


def make_plugins(plan: Plan) -> list[Precision | ClusterEnvironment]:
    """Plugins of Lightning's Trainer: the precision, and who started the ranks."""
    plugins: list[Precision | ClusterEnvironment] = [make_precision(plan)]
    if plan.strategy != "single":
        plugins.append(TorchElasticEnvironment())  # reads torchrun's variables, as we set them
    return plugins
