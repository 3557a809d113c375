"""Precision: dtypes of parameters and of computation, and Fabric's plugins for them."""

import os
from typing import Any

import torch
from lightning.fabric.plugins.precision import DeepSpeedPrecision, HalfPrecision

from ftkit.recipe.plan import Plan


class TrueHalfPrecision(HalfPrecision):
    """Fabric's half precision without its conversions of the module and of all inputs.

    The parameters already have their dtype, and rotary tables must stay float32.
    """

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def convert_input(self, data: Any) -> Any:
        return data


class BuiltDeepSpeedPrecision(DeepSpeedPrecision):
    """Fabric's precision of DeepSpeed without conversions, as in TrueHalfPrecision."""

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def convert_input(self, data: Any) -> Any:
        return data


def parameter_dtype(plan: Plan) -> torch.dtype:
    """Dtype of the parameters; master weights that a strategy keeps beside them are float32."""
    # Mixed precision is autocast over float32 parameters, but under DeepSpeed the parameters have
    # 16 bits, beside float32 masters.
    kind, _, how = plan.precision.partition("-")
    if kind == "32" or (how == "mixed" and not plan.rules.keeps_masters):
        return torch.float32
    return torch.bfloat16 if kind == "bf16" else torch.float16


def updated_dtype(plan: Plan) -> torch.dtype:
    """Dtype of the numbers that the optimizer updates: master weights or parameters."""
    return torch.float32 if plan.rules.keeps_masters else parameter_dtype(plan)


def compute_dtype(plan: Plan) -> torch.dtype:
    """Dtype of the large matrix products."""
    kind = plan.precision.partition("-")[0]
    return {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}[kind]


def set_arithmetic(*, deterministic: bool) -> None:
    """Set how exactly this process computes; called before its first use of a device."""
    # "high" lets GPUs compute float32 products in TF32, with 10 bits of mantissa.
    torch.set_float32_matmul_precision("highest" if deterministic else "high")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:  # otherwise cuBLAS picks any of several workspaces, which changes sums
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
