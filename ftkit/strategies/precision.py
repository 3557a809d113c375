"""Precisions: data types of parameters and of computation, as Lightning plugins."""

from typing import Any

import torch
from lightning.pytorch.plugins.precision import (
    DeepSpeedPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)

from ftkit.config.plan import Plan


class TrueHalfPrecision(HalfPrecision):
    """Half precision for a model that is built in it.

    Lightning's converts the module and every floating-point input; here the parameters have
    their format from the start, and what is float32 on purpose (rotary tables) stays so.
    """

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def convert_input(self, data: Any) -> Any:
        return data


class BuiltDeepSpeedPrecision(DeepSpeedPrecision):
    """DeepSpeed's precision for a model that is built in it, as TrueHalfPrecision."""

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def convert_input(self, data: Any) -> Any:
        return data


def parameter_dtype(plan: Plan) -> torch.dtype:
    """Number format of the parameters; DeepSpeed keeps float32 masters of 16-bit ones itself."""
    kind, _, how = plan.precision.partition("-")
    if kind == "32" or (how == "mixed" and plan.strategy != "deepspeed"):
        return torch.float32
    return torch.bfloat16 if kind == "bf16" else torch.float16


def compute_dtype(plan: Plan) -> torch.dtype:
    """Number format of the large matrix products."""
    kind = plan.precision.partition("-")[0]
    return {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}[kind]


def make_precision(plan: Plan) -> Precision:
    """Lightning's precision plugin for the plan's."""
    if plan.strategy == "deepspeed":
        return BuiltDeepSpeedPrecision(plan.precision)
    if plan.precision == "bf16-true" or plan.precision == "16-true":
        return TrueHalfPrecision(plan.precision)
    if plan.strategy == "fsdp":
        return Precision()  # the casts of bf16-mixed are FSDP's own
    if plan.precision == "bf16-mixed" or plan.precision == "16-mixed":
        return MixedPrecision(plan.precision, plan.accelerator)
    return Precision()
