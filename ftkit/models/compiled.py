"""Compilation of the blocks and of the loss by torch.compile, once for all lengths.

A block has a graph for each of a few kinds of call: one line or several, one token or more.
Attention depends on the lengths of the sequences in a micro-batch, which differ in each step, and
experts on the tokens that choose them: both stay outside, between two graphs. Evaluation and
answers are not compiled, because they would need more graphs.
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
    """Compile blocks and loss at their first use.

    Args:
        body: the blocks are its own; hooks of a strategy stay outside of the graphs.
        output_layer: not compiled if an adapter has replaced it.
    """
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    dynamo.optimize_ddp = False  # it splits whole models at DDP's buckets, and these are blocks
    inductor.fallback_random = True  # so that dropout draws the same numbers as without compile
    body.exclude_from_compile()
    # Blocks, not the model: 5 to 9 graphs in all instead of one for each length.
    for block in body.blocks:
        plain = block.forward
        # dynamic=True from the start: otherwise the first length gets a graph of its own.
        compiled = torch.compile(plain, dynamic=True, backend=BACKEND)
        block.forward = partial(_forward, compiled, plain)
    if isinstance(output_layer, OutputLayer):
        compute = torch.compile(output_layer.loss_and_grad, dynamic=True, backend=BACKEND)
        output_layer.loss_and_grad = compute


def _forward(
    compiled: Callable[..., Any], plain: Callable[..., Any], *inputs: Any, **options: Any
) -> Any:
    # Evaluation would need further graphs, and takes a small part of the time.
    return (compiled if torch.is_grad_enabled() else plain)(*inputs, **options)


def compiled_graphs() -> int:
    """Number of graphs that torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
