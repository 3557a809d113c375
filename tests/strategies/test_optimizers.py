"""The table of optimizers against the optimizers themselves; the trial of those without a row."""

import importlib
import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import says
from optimizers import DEEPSPEED, KNOWN
from plugins import plugin_of
from rank_jobs import needs_deepspeed
from torch import Tensor, nn

from ftkit.errors import UserError
from ftkit.recipe.devices import Devices
from ftkit.recipe.optimizers import OPTIMIZERS
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import make_plan
from ftkit.recipe.plugin import using
from ftkit.recipe.recipe import Component
from ftkit.strategies.optimizer_trial import (
    RATE,
    SHAPE,
    continues,
    learns_in_backward,
    learns_in_parts,
    try_optimizer,
)
from ftkit.strategies.optimizers import resolve_optimizer
from ftkit.strategies.state import StatePart, TorchState, bytes_per_number, state_kinds

CPU = torch.device("cpu")
# DeepSpeed's are compiled, which takes a minute on a new machine.
MARKS = {
    f"{DEEPSPEED}.DeepSpeedCPUAdam": [pytest.mark.slow, needs_deepspeed],
    f"{DEEPSPEED}.FusedAdam": [pytest.mark.matrix, needs_deepspeed],
}
USABLE = [
    pytest.param(name, marks=MARKS.get(name, ()))
    for name, traits in KNOWN.items()
    if not traits.unusable
]


def resolved(class_path: str, **more: Any) -> tuple[Any, dict[str, Any]]:
    """Class and arguments; with momentum, without which some keep no state or do not update."""
    arguments = {"lr": RATE, **more}
    package, _, name = class_path.rpartition(".")
    if "momentum" in inspect.signature(getattr(importlib.import_module(package), name)).parameters:
        arguments["momentum"] = 0.9
    chosen = Component(class_path=class_path, init_args=arguments)
    return resolve_optimizer(chosen, may_fuse=False)


@pytest.mark.parametrize(
    "package",
    [
        pytest.param(name, marks=[pytest.mark.slow, needs_deepspeed] if name == DEEPSPEED else [])
        for name in (row.name for row in OPTIMIZERS)
    ],
)
def test_every_optimizer_that_a_recipe_can_name_has_a_row(package: str) -> None:
    module = importlib.import_module(package)
    named = {
        f"{package}.{name}"
        for name, found in vars(module).items()
        if isinstance(found, type)
        and issubclass(found, torch.optim.Optimizer)
        and found is not torch.optim.Optimizer
    }
    assert named <= KNOWN.keys()


@pytest.mark.parametrize("class_path", USABLE)
def test_a_row_says_what_the_optimizer_does(class_path: str) -> None:
    traits, (kind, arguments) = KNOWN[class_path], resolved(class_path)
    make = partial(kind, **arguments)
    assert learns_in_parts(make, CPU) == (not traits.whole)
    assert continues(make, CPU)
    assert learns_in_backward(make, CPU)
    counts = set(state_kinds(kind, arguments, CPU, [SHAPE]).values())
    assert {"number": {1}, "numbers": {1, 2}, "factors": {0}}[traits.state] == counts


@pytest.mark.parametrize("class_path", USABLE)
def test_the_bytes_of_a_checkpoint_are_known(class_path: str) -> None:
    kind, arguments = resolved(class_path)
    matrix, vector = nn.Parameter(torch.randn(256, 256)), nn.Parameter(torch.randn(8192))
    optimizer = kind([matrix, vector], **arguments)
    for parameter in (matrix, vector):
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    model = nn.Module()
    model.matrix, model.vector = matrix, vector
    view = TorchState(model, optimizer)
    held = [part for parameter in (matrix, vector) for part in view.parts(parameter)]
    bytes_held = sum(
        part.values.nbytes + (0 if part.scales is None else part.scales.nbytes) for part in held
    )
    numbers = matrix.numel() + vector.numel()
    per_number = bytes_per_number(kind, arguments, torch.float32, CPU, matrix.numel() / numbers)
    assert numbers * per_number == pytest.approx(bytes_held, rel=0.02)


# --- State and its place in a checkpoint --------------------------------------------------------


@pytest.mark.parametrize("name", ["AdEMAMix", "AdEMAMix8bit"])
def test_several_numbers_in_one_tensor_are_as_many_ranges(name: str) -> None:
    model, optimizer = trained(f"bitsandbytes.optim.{name}")
    view = TorchState(model, optimizer)
    parts = [part for part in view.parts(model.weight) if part.kind == "state1"]
    numbers = model.weight.numel()
    assert [part.start for part in parts] == [0, numbers]
    assert all(part.shape == (2, *model.weight.shape) for part in parts)
    assert all(part.numel == numbers for part in parts)
    assert all((part.scales is not None) == name.endswith("8bit") for part in parts)
    other_model, other = trained(f"bitsandbytes.optim.{name}", steps=0)
    other_view = TorchState(other_model, other)
    shapes = {part.kind: part.shape for part in parts}
    other_view.allocate({"weight": shapes | {"state2": model.weight.shape}}, view.scalars())
    pairs = zip(view.parts(model.weight), other_view.parts(other_model.weight), strict=True)
    for part, target in pairs:
        target.values.copy_(part.values)
        if part.scales is not None and target.scales is not None:
            target.scales.copy_(part.scales)
    for one, its in ((model, optimizer), (other_model, other)):
        one.weight.grad = torch.linspace(-1, 1, numbers).view(one.weight.shape)
        its.step()
    assert model.weight.equal(other_model.weight)


def trained(class_path: str, steps: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    model = nn.Linear(96, 64, bias=False)
    kind, arguments = resolved(class_path)
    optimizer = kind(model.parameters(), **arguments)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.weight.normal_(generator=generator)
    for _ in range(steps):
        model.weight.grad = torch.randn(model.weight.shape, generator=generator)
        optimizer.step()
    return model, optimizer


class HalfOfRows(TorchState):
    """This rank has the first half of the rows of a parameter."""

    def local_values(self, tensor: Tensor) -> Tensor:
        return tensor[: len(tensor) // 2]

    def local(self, tensor: Tensor, kind: str) -> StatePart:
        return replace(super().local(self.local_values(tensor), kind), replicated=False)


@pytest.mark.extensions
def test_a_state_without_a_place_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from ftkit.extensions.deepspeed.deepspeed import ZeroState

    model, optimizer = trained("torch.optim.Adafactor")
    list(TorchState(model, optimizer).parts(model.weight))  # on one device it has a place
    for parameter_state in optimizer.state.values():
        parameter_state["row_var"] = parameter_state["row_var"][:-1]
    with pytest.raises(UserError, match=r"row_var .*ddp"):
        list(HalfOfRows(model, optimizer).parts(model.weight))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    flat = torch.zeros(12)
    inner = SimpleNamespace(
        state={flat: {"step": torch.tensor(1.0), "state1": torch.zeros(2, 12)}},
        param_groups=[{"params": [flat], "is_apart": False}],
    )
    zero = SimpleNamespace(optimizer=inner, single_partition_of_fp32_groups=[flat])
    with pytest.raises(UserError, match=r"state1 .*ddp"):
        ZeroState(zero, averages=False).kinds()


# --- Optimizers without a row -------------------------------------------------------------------

OWN = """
import torch

class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p, grad, state, group):
"""
SIGN = (
    "p.sub_(state.setdefault('m', torch.zeros_like(p)).lerp_(grad, 0.1).sign(), alpha=group['lr'])"
)
BODIES = {
    "each number": (
        "mean = state.setdefault('mean', torch.zeros_like(p)).lerp_(grad, 0.1); "
        "p.sub_(mean.sign(), alpha=group['lr'])"
    ),
    "norms": "p.sub_(grad * p.norm() / grad.norm(), alpha=group['lr'])",
    "rows": "p.sub_(grad / grad.norm(dim=-1, keepdim=True), alpha=group['lr'])",
    "state of rows": (
        "state.setdefault('rows', torch.zeros(p.shape[0])).add_(1); p.sub_(grad, alpha=group['lr'])"
    ),
    "two in one tensor": (
        "both = state.setdefault('both', torch.zeros((2, *p.shape))); "
        "both[0].lerp_(grad, 0.1); both[1].lerp_(grad, 0.2); "
        "p.sub_(both.sum(0), alpha=group['lr'])"
    ),
    "a count of the group": (
        "group['count'] = group.get('count', 0) + 1; p.sub_(grad / group['count'], "
        "alpha=group['lr'])"
    ),
    "matrices alone": "p.sub_(grad @ grad.T @ grad, alpha=group['lr'])",
    "chance": "p.sub_(grad + torch.randn_like(grad), alpha=group['lr'])",
}
SHARDED = "optimizer is plugin.Own ... --optimizer AdamW, or --strategy ddp"
UNSAVED = "optimizer is plugin.Own ... --checkpoint.save false"


@pytest.mark.parametrize(
    ("body", "strategy", "message"),
    [
        *(("each number", strategy, "") for strategy in ("single", "ddp", "fsdp", "deepspeed")),
        *((body, "ddp", "") for body in BODIES if body != "a count of the group"),
        *(
            (body, strategy, SHARDED)
            for body in BODIES
            for strategy in ("fsdp", "deepspeed")
            if body not in ("each number", "a count of the group")
        ),
        ("a count of the group", "single", UNSAVED),
        ("a count of the group", "fsdp", UNSAVED),
    ],
)
def test_an_optimizer_without_a_row_is_tried(
    tmp_path: Path, body: str, strategy: str, message: str
) -> None:
    before = torch.get_rng_state()
    assert says(trial(tmp_path, body, strategy=strategy), message)
    assert torch.get_rng_state().equal(before)


def test_a_count_beside_the_state_is_no_matter_where_nothing_is_saved(tmp_path: Path) -> None:
    assert not trial(tmp_path, "a count of the group", checkpoint__save="false")


def test_one_that_couples_parameters_does_not_update_in_the_backward_pass(tmp_path: Path) -> None:
    keys = {
        "checkpoint__save": "false",
        "train__optimizer_in_backward": "true",
        "train__micro_batch_size": "16",
        "train__max_norm": "null",
    }
    message = trial(tmp_path, "a count of the group", **keys)
    assert says(message, "plugin.Own ... depends on others ... --train.optimizer_in_backward false")
    assert not trial(tmp_path, "each number", **keys)


def test_one_that_fails_is_refused_by_name(tmp_path: Path) -> None:
    assert says(
        trial(tmp_path, "each number", source=OWN + "        raise KeyError('lion')"),
        "optimizer ... Own ... lion ... --optimizer AdamW",
    )


def trial(directory: Path, body: str, source: str = "", **keys: str) -> str:
    """Message with which a plugin's optimizer is refused; empty: it is not."""
    plugin = plugin_of(directory, source or f"{OWN}        {BODIES[body]}\n")
    settings = {"checkpoint_dir": "base", "optimizer": "Own", "strategy": "single"} | {
        key.replace("__", "."): value for key, value in keys.items()
    }
    with using(plugin):
        recipe = read_recipe([], list(settings.items()), method="full")
        devices = 1 if settings["strategy"] == "single" else 2
        plan = make_plan(replace(recipe, devices=devices), Devices(accelerator="cpu", count=2))
        kind, arguments = resolve_optimizer(recipe.optimizer, may_fuse=False)
        try:
            try_optimizer(kind, arguments, plan, CPU)
        except UserError as error:
            return str(error)
    return ""
