"""Training state: trained parameters and optimizer state, out of and into any strategy.

Everything is named by parameter and kept in pieces (`checkpoint/shards.py`): what a rank holds of a
parameter under single, DDP, FSDP or ZeRO is a range of its numbers. So saving takes no word between
ranks, and loading asks for the ranges of whatever layout there is now.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ftkit.checkpoint.metadata import CheckpointError
from ftkit.checkpoint.shards import Piece, StoredState, StoredTensor, share_of
from ftkit.errors import UserError
from ftkit.lora.names import our_name
from ftkit.model.load_weights import in_checkpoint
from ftkit.optim.state_kinds import BLOCK, canonical_kind, is_scalar_state, is_tensor_state

PARAMETER = "parameter"
"""Kind of a parameter's own numbers, beside the kinds of its optimizer state."""


def stored_name(kind: str, parameter: str) -> str:
    """The name of a tensor in a checkpoint: parameter/NAME, exp_avg/NAME, ..."""
    return f"{kind}/{parameter}"


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """What this rank holds of a parameter or of one kind of its optimizer state, as live views."""

    kind: str
    shape: torch.Size
    """Of the whole tensor."""
    start: int
    """First number of the range, in row-major order."""
    values: Tensor
    """[numbers of the range], flat."""
    scales: Tensor | None = None
    """[blocks of 256]: the values are 8-bit codes."""
    code: Tensor | None = None
    """[256], what the codes stand for."""
    replicated: bool = False
    """Whether every rank holds all of it."""


class Holder(Protocol):
    """Finds the numbers that an optimizer updates, and its state."""

    def parts(self, parameter: nn.Parameter) -> Iterator[StatePart]:
        """The parameter's own numbers, then each kind of state that there is."""

    def scalars(self) -> dict[str, float]:
        """State that is one number for all parameters, such as Adam's step."""

    def allocate(
        self, kinds: Mapping[str, Mapping[str, torch.Size]], scalars: dict[str, float]
    ) -> None:
        """Make the state of an optimizer that has not stepped yet; its values are undefined.

        Args:
            kinds: for each parameter (our name) the kinds of state and their shapes.
            scalars: as `scalars` returned them.
        """


def capture(model: nn.Module, holder: Holder, rank: int, world_size: int) -> Iterator[Piece]:
    """What this rank writes of the state of training; views of live memory.

    What every rank holds is shared out in equal ranges.
    """
    for name, parameter in model.named_parameters():
        if not in_checkpoint(name, parameter):
            continue
        for part in holder.parts(parameter):
            first, last = 0, part.values.numel()
            if part.replicated:
                first, last = share_of(rank, world_size, last)
            if first == last:
                continue
            scales = part.scales
            yield Piece(
                name=stored_name(part.kind, our_name(name)),
                shape=part.shape,
                start=part.start + first,
                values=part.values[first:last],
                scales=None if scales is None else scales[first // BLOCK : -(-last // BLOCK)],
                code=part.code,
            )


def trained_parameter(stored: StoredState, name: str) -> StoredTensor:
    """A parameter in a checkpoint, by our name."""
    return stored[stored_name(PARAMETER, name)]


def restore(
    model: nn.Module, holder: Holder, stored: StoredState, scalars: dict[str, float]
) -> None:
    """Put the state of training back, on whatever layout there is now.

    Args:
        model: whose parameters the optimizer updates.
        holder: of an optimizer that has not stepped yet.
        stored: from a checkpoint.
        scalars: from its metadata.
    """
    shapes: dict[str, dict[str, torch.Size]] = {}
    for name in stored.names():
        kind, _, parameter = name.partition("/")
        if kind != PARAMETER:
            shapes.setdefault(parameter, {})[kind] = stored[name].shape
    holder.allocate(shapes, scalars)
    with torch.no_grad():
        for own, trained in model.named_parameters():
            if trained.requires_grad:
                for part in holder.parts(trained):
                    _read(part, stored, stored_name(part.kind, our_name(own)))


def _read(part: StatePart, stored: StoredState, name: str) -> None:
    tensor = stored[name]
    if tensor.shape != part.shape:
        raise CheckpointError(f"{name} has shape {list(tensor.shape)}, not {list(part.shape)}")
    start, stop = part.start, part.start + part.values.numel()
    if start == stop:
        return
    if part.scales is None or part.code is None:
        part.values.copy_(tensor.read(start, stop))
        return
    exact = tensor.read_quantized(start, stop)
    if exact is None:
        from bitsandbytes.functional import quantize_blockwise

        numbers = tensor.read(start, stop).float().to(part.values.device)
        codes, quantized = quantize_blockwise(numbers, part.code, blocksize=BLOCK)
        exact = codes, quantized.absmax
    part.values.copy_(exact[0])
    part.scales.copy_(exact[1])


def check_kinds(kinds: Mapping[str, bool], stored: StoredState, optimizer: str) -> None:
    """Refuse an optimizer whose state the checkpoint has not, or only a part of.

    Args:
        kinds: what it keeps, from `state_kinds`.
        stored: from the checkpoint.
        optimizer: its class path.

    Raises:
        UserError: it keeps other kinds of state.
    """
    known = {name.partition("/")[0] for name in stored.names()} - {PARAMETER}
    if known != kinds.keys():
        raise UserError(
            f"optimizer {optimizer} with the arguments in the recipe keeps "
            f"{', '.join(sorted(kinds)) or 'no state'}, but the checkpoint has "
            f"{', '.join(sorted(known)) or 'none'}. Continue with the optimizer settings that the "
            "checkpoint was made with (ftkit checkpoints show)."
        )


class TorchState:
    """Of torch's and bitsandbytes' optimizers: single, DDP and FSDP."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._names = {
            parameter: our_name(name)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def parts(self, parameter: nn.Parameter) -> Iterator[StatePart]:
        whole = _local(parameter, PARAMETER)
        yield whole
        state = self._optimizer.state.get(parameter, {})
        for key, value in state.items():
            if not is_tensor_state(key, value, parameter):
                continue
            values = value.to_local() if isinstance(value, DTensor) else value
            kind = canonical_kind(self._optimizer, key)
            if values.numel() != whole.values.numel():  # of a shape of its own
                yield _local(value, kind)
                continue
            number = key.removeprefix("state")
            yield StatePart(
                kind=kind,
                shape=whole.shape,
                start=whole.start,
                values=values.detach().view(-1),
                scales=state.get(f"absmax{number}"),
                code=state.get(f"qmap{number}"),
                replicated=whole.replicated,
            )

    def scalars(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for parameter in self._names:
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if is_scalar_state(value):
                    number = float(value)
                    if found.setdefault(key, number) != number:
                        raise UserError(
                            f"The optimizer {type(self._optimizer).__name__} keeps a {key} of its "
                            "own for each parameter, which checkpoints cannot hold. "
                            "Try --optimizer AdamW."
                        )
        return found

    def allocate(
        self, kinds: Mapping[str, Mapping[str, torch.Size]], scalars: dict[str, float]
    ) -> None:
        optimizer: Any = self._optimizer
        is_bitsandbytes = hasattr(optimizer, "init_state")
        if is_bitsandbytes and not optimizer.initialized:
            optimizer.check_overrides()
            optimizer.initialized = True
        for group_index, group in enumerate(optimizer.param_groups):
            # torch keeps the step of a fused optimizer beside the parameters
            beside = group.get("fused") or group.get("capturable")
            for index, parameter in enumerate(group["params"]):
                state = optimizer.state[parameter]
                if is_bitsandbytes:
                    optimizer.init_state(group, parameter, group_index, index)
                    state.update({key: int(value) for key, value in scalars.items()})
                    continue
                for kind, shape in kinds.get(self._names[parameter], {}).items():
                    if kind not in state:
                        like = torch.empty_like(parameter)
                        state[kind] = like if shape == like.shape else like.new_empty(shape)
                device = parameter.device if beside else torch.device("cpu")
                for key, value in scalars.items():
                    state[key] = torch.tensor(value, dtype=torch.float32, device=device)


class ZeroState:
    """Of an optimizer that DeepSpeed has sharded: float32 numbers in flat partitions."""

    def __init__(self, engine: Any) -> None:
        """The engine's optimizer is one of ZeRO, of any stage."""
        self._zero = engine.optimizer
        self._inner = self._zero.optimizer
        self._rank = torch.distributed.get_rank()

    def parts(self, parameter: Any) -> Iterator[StatePart]:
        kinds = [None, *self._kinds()]
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
            yield _local(parameter, PARAMETER)
            return
        fragment = parameter._hp_mapping
        if fragment is None:  # this rank has nothing of it
            return
        if len(kinds) > 1 and not fragment.optim_fragment:
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
        state = self._inner.state.get(self._partitions()[0], {})
        return {key: float(value) for key, value in state.items() if is_scalar_state(value)}

    def allocate(
        self, kinds: Mapping[str, Mapping[str, torch.Size]], scalars: dict[str, float]
    ) -> None:
        wanted = {kind for shapes in kinds.values() for kind in shapes}
        whole_steps = type(self._inner).__module__.startswith("deepspeed.")
        for flat in self._partitions():
            state = self._inner.state[flat]
            state.update({kind: torch.zeros_like(flat.data) for kind in wanted})
            for key, value in scalars.items():
                state[key] = int(value) if whole_steps else torch.tensor(value)
        if not hasattr(self._zero, "fp32_partitioned_groups_flat"):
            self._zero._lazy_init_hp_params_optimizer_state()

    def _kinds(self) -> list[str]:
        flat = self._partitions()[0]
        state = self._inner.state.get(flat, {})
        return [k for k, v in state.items() if isinstance(v, Tensor) and v.shape == flat.shape]

    def _partitions(self) -> list[Tensor]:
        for name in (
            "fp32_partitioned_groups_flat",  # stage 3
            "single_partition_of_fp32_groups",  # stages 1 and 2
            "fp32_groups_flat_partition",  # stage 1 in bfloat16
        ):
            if hasattr(self._zero, name):
                return list(getattr(self._zero, name))
        raise AssertionError(f"{type(self._zero).__name__} has no partitions")


def _local(tensor: Tensor, kind: str) -> StatePart:
    """This rank's part of a tensor: rows of a DTensor, or all of it."""
    if not isinstance(tensor, DTensor):
        return StatePart(
            kind=kind,
            shape=tensor.shape,
            start=0,
            values=tensor.detach().view(-1),
            replicated=True,
        )
    values = tensor.to_local().detach().view(-1)
    start = 0
    if values.numel():  # there may be fewer rows than ranks
        (box,) = tensor.__create_chunk_list__()
        start = box.offsets[0] * (tensor.numel() // tensor.shape[0])
    return StatePart(kind=kind, shape=tensor.shape, start=start, values=values)
