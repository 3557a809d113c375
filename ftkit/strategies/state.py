"""Optimizer state: the kinds that an optimizer keeps, and views of them for checkpoints.

A checkpoint is written from these views and read into them (`checkpoint/state.py`), whatever the
strategy.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ftkit.errors import UserError, is_out_of_memory
from ftkit.models.language_model import LanguageModel, trainable
from ftkit.models.lora.targets import our_name
from ftkit.recipe.optimizers import BLOCK, OPTIMIZERS, OptimizerPackage
from ftkit.strategies.coded_state import CodedState, Codes
from ftkit.strategies.optimizers import MuonWithAdamW, hidden_matrices, uses_muon

PARAMETER = "parameter"
"""Kind of a parameter's own numbers, beside the kinds of its optimizer state."""
AVERAGE = "average"
"""Kind of the running average of a parameter, also in checkpoints."""

LEFT_OUT = "left out: "
"""Beginning of the names of scalars of parameters that some steps leave out."""

Averages = defaultdict[Tensor, dict[str, Any]]
"""Running averages by parameter, in the form of an optimizer's state."""

_ADAM_KINDS = {"state1": "exp_avg", "state2": "exp_avg_sq"}
"""torch's names for the states of bitsandbytes' Adam."""


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """This rank's part of a parameter or of one kind of its optimizer state, as live views."""

    kind: str
    shape: torch.Size
    """Shape of the whole tensor."""
    start: int
    """First number of the range, in row-major order."""
    values: Tensor
    """[numbers of the range], flat; codes of 4 bits: half as many bytes."""
    scales: Tensor | None = None
    """[blocks of the range], if the values are codes."""
    code: Tensor | None = None
    """Values of the codes: [256], or [16] for 4 bits."""
    block: int = BLOCK
    """Codes that share a scale."""
    quantize: Callable[[Tensor], object] | None = None
    """Sets values and scales to what numbers of the range give, flat in float32."""
    replicated: bool = False
    """Whether every rank holds all of it."""
    copy: tuple[int, int] = (0, 1)
    """Index of this copy and number of copies, if several but not all ranks hold this range."""

    @property
    def numel(self) -> int:
        """Numbers of the range."""
        return self.values.numel() * codes_per_byte(self.code)


def codes_per_byte(code: Tensor | None) -> int:
    """How many numbers an element of a part has, by the values of its codes."""
    return 2 if code is not None and len(code) == 16 else 1


class OptimizerStateView(Protocol):
    """Access to the numbers that an optimizer updates, and to its state."""

    def parts(self, parameter: nn.Parameter) -> Iterator[StatePart]:
        """The parameter's own numbers, then each kind of state that exists."""

    def scalars(self) -> dict[str, float]:
        """State that is one number for all parameters, such as Adam's step."""

    def allocate(
        self, kinds: Mapping[str, Mapping[str, torch.Size]], scalars: dict[str, float]
    ) -> None:
        """Create the state of an optimizer before its first step, with undefined values.

        Args:
            kinds: kinds of state and their shapes, by ftkit's name of the parameter.
            scalars: as `scalars` returned them.
        """


def whole_part(tensor: Tensor, kind: str) -> StatePart:
    """All of a tensor that every rank holds."""
    values = tensor.detach().view(-1)
    return StatePart(kind=kind, shape=tensor.shape, start=0, values=values, replicated=True)


class TorchState:
    """State of torch's or bitsandbytes' optimizer over parameters that this rank holds whole."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        averages: Averages | None = None,
        *,
        left_out: Iterable[nn.Parameter] = (),
    ) -> None:
        """View the state of an optimizer.

        Args:
            model: that is trained.
            optimizer: that updates it.
            averages: of its parameters; None: there are none.
            left_out: parameters that some steps leave out, all at once: their steps are counted
                apart.
        """
        self._optimizer, self._averages = optimizer, averages
        self._left_out = {*left_out}
        self._names = {
            parameter: our_name(name)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def local_values(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor."""
        return tensor

    def local(self, tensor: Tensor, kind: str) -> StatePart:
        """This rank's part of a tensor, with its place in the whole."""
        return whole_part(tensor, kind)

    def parts(self, parameter: nn.Parameter) -> Iterator[StatePart]:
        whole = self.local(parameter, PARAMETER)
        yield whole
        # .get: a lookup would create an empty entry, because the state is a defaultdict.
        state = self._optimizer.state.get(parameter, {})
        if self._averages is not None:
            state = state | self._averages[parameter]
        for key, value in state.items():
            if not is_tensor_state(key, value, parameter):
                continue
            kind = canonical_kind(self._optimizer, key)
            values, rows = self.local_values(value), self.local_values(parameter)
            scales, code = _table_of(state, key, "absmax"), _table_of(state, key, "qmap")
            if values.shape == rows.shape:
                yield self._of_range(whole, kind, values, scales, code)
            elif count := numbers_for_each(values.shape, rows.shape):
                # Several numbers for each of the parameter, as in [2, *shape]: as many ranges.
                place = replace(whole, shape=torch.Size([count, *parameter.shape]))
                for index, some in enumerate(values):
                    start = whole.start + index * parameter.numel()
                    own = None if scales is None else scales[index]
                    yield self._of_range(replace(place, start=start), kind, some, own, code)
            elif whole.replicated:  # such as a factored second moment
                yield self.local(value, kind)
            else:
                raise without_place(self._optimizer, kind)

    def _of_range(
        self,
        place: StatePart,
        kind: str,
        values: Tensor,
        scales: Tensor | None,
        code: Tensor | None,
    ) -> StatePart:
        """A state with a number for each number of a range.

        Args:
            place: the range, with other values.
            kind: of the state.
            values: of the state.
            scales: of bitsandbytes' codes, if the values are these.
            code: values of the codes.
        """
        optimizer = self._optimizer
        found = optimizer.codes_in(values) if isinstance(optimizer, CodedState) else None
        if found is not None:
            return coded_part(found, values, kind, place)
        flat = values.detach().view(-1)
        part = replace(place, kind=kind, values=flat, scales=scales, code=code)
        if code is not None:
            part = replace(part, quantize=partial(_quantize_as_bitsandbytes, part))
        return part

    def scalars(self) -> dict[str, float]:
        found: dict[str, float] = {}
        by_number: dict[str, dict[float, list[nn.Parameter]]] = {}
        for parameter in self._names:
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if is_scalar_state(value):
                    key = f"{LEFT_OUT}{key}" if parameter in self._left_out else key
                    of_key = by_number.setdefault(key, {})
                    of_key.setdefault(float(value), []).append(parameter)
        for key, of_key in by_number.items():
            # One number in the checkpoint stands for all parameters, so they must agree. Parameters
            # that have never had a gradient keep what a checkpoint gave them.
            numbers = [n for n, those in of_key.items() if len(of_key) == 1 or self._moved(those)]
            if len(numbers) > 1:
                raise UserError(
                    f"The optimizer {type(self._optimizer).__name__} keeps a different "
                    f"{key} for each parameter, which checkpoints cannot hold. "
                    "Try --optimizer AdamW."
                )
            found[key] = max(numbers or of_key)
        return found

    def _moved(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether the optimizer has had a gradient of any of these parameters."""
        return any(
            bool(value.detach().any())
            for parameter in parameters
            for value in self._optimizer.state[parameter].values()
            if isinstance(value, Tensor) and not is_scalar_state(value)
        )

    def allocate(
        self, kinds: Mapping[str, Mapping[str, torch.Size]], scalars: dict[str, float]
    ) -> None:
        optimizer: Any = self._optimizer
        is_bitsandbytes = hasattr(optimizer, "init_state")
        if is_bitsandbytes and not optimizer.initialized:
            # bitsandbytes does this at the beginning of its first step, together with moving all
            # state to the GPU.
            optimizer.check_overrides()
            optimizer.initialized = True
        for group_index, group in enumerate(optimizer.param_groups):
            # torch keeps the step of a fused optimizer on the device of the parameters.
            on_device = group.get("fused") or group.get("capturable")
            for index, parameter in enumerate(group["params"]):
                wanted = dict(kinds.get(self._names[parameter], {}))
                # Averages are not state of the optimizer. Without train.ema_decay, stored ones are
                # dropped.
                if wanted.pop(AVERAGE, None) is not None and self._averages is not None:
                    average = torch.empty_like(parameter, dtype=torch.float32)
                    self._averages[parameter][AVERAGE] = average
                state = optimizer.state[parameter]
                if is_bitsandbytes:
                    # Its own method, because it decides for each parameter between 8 and 32 bits.
                    optimizer.init_state(group, parameter, group_index, index)
                    own = scalars_of(scalars, left_out=parameter in self._left_out)
                    state.update({key: int(value) for key, value in own.items()})
                    continue
                if isinstance(optimizer, CodedState):
                    state.update(optimizer.new_state(parameter))
                for kind, shape in wanted.items():
                    if kind not in state:
                        # Like the parameter, so that state of a DTensor is sharded in the same way.
                        like = torch.empty_like(parameter)
                        state[kind] = like if shape == like.shape else like.new_empty(shape)
                if uses_muon(group):  # keeps no count of steps
                    continue
                device = parameter.device if on_device else torch.device("cpu")
                for key, value in scalars_of(scalars, left_out=parameter in self._left_out).items():
                    state[key] = torch.tensor(value, dtype=torch.float32, device=device)


def scalars_of(scalars: Mapping[str, float], *, left_out: bool) -> dict[str, float]:
    """Scalars of the parameters that some steps leave out, or of the others.

    There are none of parameters that every step has left out.
    """
    return {
        key.removeprefix(LEFT_OUT): value
        for key, value in scalars.items()
        if key.startswith(LEFT_OUT) == left_out
    }


def _table_of(state: Mapping[str, Any], key: str, table: str) -> Tensor | None:
    """Table of bitsandbytes for a state: scales of its blocks (absmax), values of codes (qmap)."""
    found: Tensor | None = state.get(f"{table}{key.removeprefix('state')}")
    return found


def without_place(optimizer: Optimizer, kind: str) -> UserError:
    """The error for a state of which a rank has parts that are no ranges of the whole."""
    return UserError(
        f"The optimizer {type(optimizer).__name__} keeps a {kind} of another shape than the "
        "parameter, which ranks that share parameters cannot save. Try --optimizer AdamW, or "
        "--strategy ddp."
    )


def coded_part(found: Codes, values: Tensor, kind: str, whole: StatePart) -> StatePart:
    """A part of a parameter's range as an optimizer with codes keeps it.

    Args:
        found: codes and scales of the state.
        values: this rank's state of the range.
        kind: of the state.
        whole: the parameter's own numbers in the range.
    """
    return replace(
        whole,
        kind=kind,
        values=found.codes,
        scales=found.scales,
        code=found.code,
        block=found.block,
        quantize=lambda numbers: values.copy_(numbers.view(values.shape)),
    )


def _quantize_as_bitsandbytes(part: StatePart, numbers: Tensor) -> None:
    from bitsandbytes.functional import quantize_blockwise

    assert part.code is not None and part.scales is not None
    codes, quantized = quantize_blockwise(
        numbers.to(part.values.device), part.code, blocksize=part.block
    )
    part.values.copy_(codes)
    part.scales.copy_(quantized.absmax)


# Kinds of state


def canonical_kind(optimizer: Optimizer, key: str) -> str:
    """Kind of state under a key of an optimizer, by torch's name for it."""
    names = {base.__name__ for base in type(optimizer).__mro__}
    is_adam = any(name.startswith(("Adam", "PagedAdam")) for name in names)
    return _ADAM_KINDS.get(key, key) if is_adam else key


_MATRIX, _VECTOR = (2, 3), (3,)
Shapes = Sequence[tuple[int, ...]]


def shapes_like(model: LanguageModel, optimizer_class: type[Optimizer]) -> Shapes:
    """Small shapes of the kinds that are trained: optimizers may keep other state for each.

    Args:
        model: outlined or filled.
        optimizer_class: that updates it.
    """
    matrices = updated_as_matrices(model, optimizer_class)
    has_others = len(trainable(model)) > len(matrices)
    return [_MATRIX] * bool(matrices) + [_VECTOR] * has_others


def updated_as_matrices(
    model: LanguageModel, optimizer_class: type[Optimizer]
) -> list[nn.Parameter]:
    """Trained parameters that an optimizer updates as matrices."""
    if optimizer_class is MuonWithAdamW:  # an embedding is updated as a vector is
        return hidden_matrices(model)
    return [parameter for parameter in trainable(model) if parameter.ndim > 1]


def state_kinds(
    optimizer_class: type[Optimizer],
    arguments: dict[str, Any],
    device: torch.device,
    shapes: Shapes = (_MATRIX, _VECTOR),
) -> dict[str, int]:
    """Kinds of tensors that an optimizer keeps, learned from a step with small parameters.

    Args:
        optimizer_class: of the recipe.
        arguments: of the optimizer.
        device: of the parameters.
        shapes: of the small parameters.

    Returns:
        For each kind, how many numbers it has for each number of a parameter; 0: its shape is
        another one.

    Raises:
        UserError: the optimizer cannot step, or keeps state that checkpoints cannot hold.
    """
    package, _ = _origin(optimizer_class)
    if package.kinds:
        return dict(package.kinds)
    parameters = [nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
    for parameter in parameters:
        # Zeros are enough: state is created for every parameter that has a gradient.
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer = optimizer_class(parameters, **arguments)
        optimizer.step()
    except Exception as error:  # optimizers fail in any way with arguments from a recipe
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"optimizer {optimizer_class.__name__} cannot fine-tune: {error}. "
            "Try --optimizer AdamW."
        ) from None
    kinds: dict[str, int] = {}
    for parameter in parameters:
        for key, value in optimizer.state[parameter].items():
            if is_tensor_state(key, value, parameter):
                kind = canonical_kind(optimizer, key)
                count = numbers_for_each(value.shape, parameter.shape)
                # 0 as soon as one parameter keeps it in another shape, such as a factored moment.
                kinds[kind] = min(kinds.get(kind, count), count)
            elif not (is_scalar_state(value) or _is_bitsandbytes_table(key) or value is None):
                raise UserError(
                    f"optimizer {optimizer_class.__name__} keeps a {key} that checkpoints cannot "
                    "hold. Try --optimizer AdamW, or --checkpoint.save false."
                )
    return kinds


def bytes_per_number(
    optimizer_class: type[Optimizer],
    arguments: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    matrix_fraction: float,
) -> float:
    """Bytes in a checkpoint for each trained number: itself and its optimizer state.

    Args:
        optimizer_class: of the recipe.
        arguments: of the optimizer.
        dtype: of the numbers that the optimizer updates.
        device: of these numbers.
        matrix_fraction: share of these numbers that the optimizer updates in matrices.
    """
    # Without kinds of other shapes than the parameter's: factored ones are small.
    of_matrix, of_vector = (
        sum(state_kinds(optimizer_class, arguments, device, [shape]).values())
        for shape in (_MATRIX, _VECTOR)
    )
    states = matrix_fraction * of_matrix + (1 - matrix_fraction) * of_vector
    package, name = _origin(optimizer_class)
    state_bytes: float = dtype.itemsize
    if package.number_bytes is not None:
        state_bytes = package.number_bytes(name, arguments)
    return dtype.itemsize + state_bytes * states


def _origin(optimizer_class: type[Optimizer]) -> tuple[OptimizerPackage, str]:
    """The package that has an optimizer, or the one it derives from, with the name there."""
    # By the modules: some are used without being named by a recipe.
    return next(
        (package, base.__name__)
        for base in optimizer_class.__mro__
        for package in (*OPTIMIZERS, *OPTIMIZERS.opened.values())
        if f"{base.__module__}.".startswith(f"{package.name}.")
    )


def numbers_for_each(state: torch.Size, parameter: torch.Size) -> int:
    """How many numbers a state has for each number of its parameter; 0: it has another shape."""
    if state == parameter:
        return 1
    return state[0] if state[1:] == parameter else 0


def is_scalar_state(value: object) -> bool:
    """Return whether a state is one number for a whole parameter, such as the count of steps."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def is_tensor_state(key: str, value: object, parameter: nn.Parameter) -> bool:
    """Return whether a state has values for parts of the parameter, as moments have."""
    if not isinstance(value, Tensor) or _is_bitsandbytes_table(key):
        return False
    return value.dim() > 0 or value.shape == parameter.shape


def _is_bitsandbytes_table(key: str) -> bool:
    # They belong to a state (qmap, absmax) or to a single step (unorm).
    return key.startswith(("qmap", "absmax", "unorm"))
