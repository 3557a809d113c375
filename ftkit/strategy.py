"""Plan -> Lightning strategy and precision."""

from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from ftkit.planning import Plan


class TrueHalfPrecision(HalfPrecision):
    """Half precision for a model that is built in it.

    Lightning's converts the module and every floating-point input; here the parameters have
    their format from the start, and what is float32 on purpose (rotary tables) stays so.
    """

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def convert_input(self, data: Any) -> Any:
        return data


def make_device(plan: Plan, local_rank: int) -> torch.device:
    """The device of a rank."""
    return torch.device("cuda", local_rank) if plan.accelerator == "cuda" else torch.device("cpu")


def make_strategy(plan: Plan, device: torch.device) -> Strategy:
    """Lightning's strategy for the plan's."""
    assert plan.strategy == "single"
    return SingleDeviceStrategy(device)


def make_precision(plan: Plan) -> Precision:
    """Lightning's precision plugin for the plan's."""
    if plan.precision == "bf16-true" or plan.precision == "16-true":
        return TrueHalfPrecision(plan.precision)
    if plan.precision == "bf16-mixed" or plan.precision == "16-mixed":
        return MixedPrecision(plan.precision, plan.accelerator)
    return Precision()
