"""Precisions: number formats of parameters and of computation, and Fabric's plugins for them."""

import os
from typing import Any

import torch
from lightning.fabric.plugins.precision import DeepSpeedPrecision, HalfPrecision

from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe import Recipe


class TrueHalfPrecision(HalfPrecision):
    """Half precision for a model that is built in it.

    Fabric's converts the module and every floating-point input; here the parameters have their
    format from the start, and what is float32 on purpose (rotary tables) stays so.
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
    """Number format of the parameters; masters that a strategy keeps beside them are float32."""
    kind, _, how = plan.precision.partition("-")
    if kind == "32" or (how == "mixed" and not plan.rules.keeps_masters):
        return torch.float32
    return torch.bfloat16 if kind == "bf16" else torch.float16


def updated_dtype(plan: Plan) -> torch.dtype:
    """Number format of what the optimizer updates: the masters, or the parameters."""
    return torch.float32 if plan.rules.keeps_masters else parameter_dtype(plan)


def compute_dtype(plan: Plan) -> torch.dtype:
    """Number format of the large matrix products."""
    kind = plan.precision.partition("-")[0]
    return {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}[kind]


def set_arithmetic(recipe: Recipe) -> None:
    """Have this process compute as the recipe says; comes before its first use of a device."""
    exact = recipe.deterministic
    torch.set_float32_matmul_precision("highest" if exact else "high")
    torch.use_deterministic_algorithms(exact)
    torch.backends.cudnn.deterministic = exact
    if exact:  # cuBLAS otherwise adds up in buffers of which it may take any
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
