"""Which strategies run an optimizer, and what is refused, known without torch."""

import functools
import re

import pytest
from messages import message_of, says
from optimizers import DEEPSPEED, KNOWN

from ftkit.errors import UserError
from ftkit.recipe.changes import carries_over
from ftkit.recipe.devices import Devices
from ftkit.recipe.optimizers import MUON, strategies_of
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import make_plan
from ftkit.recipe.strategy_rows import STRATEGIES

MACHINE = Devices(accelerator="cuda", count=2, names=("A100",) * 2)
BY_NORMS = [
    f"bitsandbytes.optim.{name}"
    for name in ("LAMB", "LAMB8bit", "LAMB32bit", "LARS", "LARS8bit", "LARS32bit", "PytorchLARS")
]


@functools.cache  # the same ones are suggested many times
def plan(optimizer: str, strategy: str) -> None:
    devices = "1" if strategy == "single" else "2"
    keys = {"optimizer": optimizer, "strategy": strategy, "devices": devices}
    recipe = read_recipe([], [("checkpoint_dir", "base"), *keys.items()], method="full")
    make_plan(recipe, MACHINE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES.names)
def test_what_a_strategy_cannot_run_is_refused_with_what_works(strategy: str) -> None:
    for optimizer, traits in KNOWN.items():
        if strategy in strategies_of(optimizer):
            plan(optimizer, strategy)
            continue
        message = message_of(plan, optimizer, strategy)
        assert says(message, f"optimizer is {optimizer}"), message
        others = re.findall(r"--optimizer ([\w.]+\w)", message)
        assert others
        for other in others:
            plan(other, strategy if not traits.unusable else "ddp")
        for instead in re.findall(r"--strategy (\w+)", message):
            plan(optimizer, instead)


@pytest.mark.extensions
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
@pytest.mark.parametrize("name", ["torch.optim.Adafactor", *BY_NORMS])
def test_updates_of_whole_parameters_are_refused_where_ranks_have_parts(
    name: str, strategy: str
) -> None:
    assert says(message_of(plan, name, strategy), f"optimizer is {name} ... whole ... ddp")


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("optimizer", "message"),
    {
        "LBFGS": "torch.optim.LBFGS ... several times ... --optimizer AdamW",
        "SparseAdam": "torch.optim.SparseAdam ... sparse ... --optimizer AdamW",
        "bitsandbytes.optim.PagedAdEMAMix32bit": "half of its state ... AdEMAMix",
        "torchao.optim.CPUOffloadOptimizer": "no quantised state ... torchao.optim.AdamW8bit",
        "torchao.optim._AdamW": "no quantised state ... torchao.optim.AdamW8bit",
        f"{DEEPSPEED}.ZenFlowCPUAdam": "ZenFlow ... --optimizer AdamW",
    }.items(),
)
def test_what_cannot_fine_tune_is_refused(optimizer: str, message: str) -> None:
    for strategy in STRATEGIES.names:
        assert says(message_of(plan, optimizer, strategy), message)


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("saved", "now", "is_same"),
    [
        ("torch.optim.AdamW", "bitsandbytes.optim.PagedAdam8bit", True),
        ("torchao.optim.Adam4bit", f"{DEEPSPEED}.FusedAdam", True),
        ("bitsandbytes.optim.AdEMAMix", "bitsandbytes.optim.PagedAdEMAMix8bit", True),
        ("bitsandbytes.optim.Lion", "bitsandbytes.optim.PagedLion32bit", True),
        ("bitsandbytes.optim.LAMB", "bitsandbytes.optim.LAMB8bit", True),
        ("bitsandbytes.optim.LAMB", "bitsandbytes.optim.LARS", False),
        ("torch.optim.AdamW", "bitsandbytes.optim.AdEMAMix", False),
        ("torch.optim.SGD", "bitsandbytes.optim.SGD", False),
        ("torch.optim.NAdam", "torch.optim.RAdam", False),
        ("plugin.Lion", "plugin.Lion", True),
    ],
)
def test_optimizers_of_a_family_continue_each_other(saved: str, now: str, is_same: bool) -> None:
    assert carries_over(saved, now) == is_same


@pytest.mark.parametrize(
    ("keys", "remedy"),
    [
        (
            {"optimizer": "bitsandbytes.optim.PagedAdEMAMix8bit"},
            "--optimizer bitsandbytes.optim.AdEMAMix8bit",
        ),
        (
            {"optimizer": "bitsandbytes.optim.AdEMAMix", "optimizer.is_paged": "true"},
            "--optimizer.is_paged false",
        ),
    ],
)
def test_paged_state_that_a_cpu_cannot_hold_is_refused(keys: dict[str, str], remedy: str) -> None:
    recipe = read_recipe([], [("checkpoint_dir", "base"), *keys.items()], method="full")
    make_plan(recipe, MACHINE)
    message = message_of(make_plan, recipe, Devices(accelerator="cpu", count=1))
    assert says(message, "optimizer ... paged ... cpu", remedy)


def test_muon_is_gathered_by_fsdp_and_trains_no_adapter() -> None:
    assert strategies_of(MUON) == ("single", "ddp", "fsdp")
    recipe = read_recipe([], [("checkpoint_dir", "base"), ("optimizer", "Muon")], method="lora")
    with pytest.raises(UserError, match="LoRA"):
        make_plan(recipe, MACHINE)
