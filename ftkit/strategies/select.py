"""Selection of the strategy that a plan names."""

import importlib

from ftkit.recipe.plan import Plan
from ftkit.strategies.strategy import Strategy

_CLASSES = {
    "single": "ftkit.strategies.single:Single",
    "ddp": "ftkit.strategies.ddp:Ddp",
    "fsdp": "ftkit.strategies.fsdp:Fsdp",
    "deepspeed": "ftkit.strategies.deepspeed:DeepSpeed",
}
"""Strategies by name; only the one that is used is imported."""


def make_strategy(plan: Plan) -> Strategy:
    """The strategy of a plan, not connected yet."""
    module, _, name = _CLASSES[plan.strategy].partition(":")
    chosen: type[Strategy] = getattr(importlib.import_module(module), name)
    return chosen(plan)
