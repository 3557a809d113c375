"""Compilation of the blocks and of the loss by torch.compile, once for all lengths.

A block has a graph for each of a few kinds of call: one line or several, one token or more. What
attention does follows the lengths of the sequences in a micro-batch, which are others in each step,
and what experts do follows which tokens have chosen each: both stay outside, between two graphs. So
do evaluation and answers, which would need more graphs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from ftkit.models.bodies.body import Body
from ftkit.models.loss import OutputLayer

BACKEND = "inductor"


def compile_blocks(body: Body, output_layer: nn.Module) -> None:
    """Have blocks and loss compiled at their first use.

    Args:
        body: whose blocks they are; hooks of a strategy stay outside of what is compiled.
        output_layer: an adapter may have made it its own; it is left to torch then.
    """
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    dynamo.optimize_ddp = False  # cuts whole models at its buckets, not blocks
    inductor.fallback_random = True  # dropout draws what it draws elsewhere
    body.exclude_from_compile()
    for block in body.blocks:
        plain = block.forward
        compiled = torch.compile(plain, dynamic=True, backend=BACKEND)
        block.forward = partial(_forward, compiled, plain)
    if isinstance(output_layer, OutputLayer):
        compute = torch.compile(output_layer.loss_and_grad, dynamic=True, backend=BACKEND)
        output_layer.loss_and_grad = compute


def _forward(
    compiled: Callable[..., Any], plain: Callable[..., Any], *inputs: Any, **options: Any
) -> Any:
    return (compiled if torch.is_grad_enabled() else plain)(*inputs, **options)


def compiled_graphs() -> int:
    """Graphs that torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
