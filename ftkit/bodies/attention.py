"""Causal self-attention over the sequences of a micro-batch, each by itself, padded or in a row."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ftkit.architectures.architecture import AttentionTraits
from ftkit.config.plan import Plan
from ftkit.errors import UserError

AttentionPath = Literal["varlen", "sdpa per sequence", "padded"]
"""How attention sees a micro-batch: its tokens in a row, which torch's attention over variable
lengths takes whole, or in a row whose sequences are taken one by one, or padded to a rectangle."""

AttentionKernel = Literal["flash", "cpu", "sdpa"]
"""What computes it: flash attention on GPUs, torch's kernel for CPUs, or whatever torch chooses."""

Rotation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Query and key, [batch, tokens, heads, head size] each, turned by tables of cos and sin."""

LARGEST_FLASH_HEAD = 256
"""Numbers in a head of flash attention, at most; a multiple of 8."""


def attention_path(traits: AttentionTraits, plan: Plan) -> AttentionPath:
    """How attention sees the micro-batches of a plan.

    Without `train.padding_free`, a row is chosen where it is faster: on CPUs always, on GPUs where
    one kernel takes all of it. Elsewhere many small kernels would cost more than padding does.

    Raises:
        UserError: rows are asked for, and the model's attention knows none.
    """
    tokens = plan.micro_batch_tokens
    asked = plan.recipe.train.padding_free if tokens is None else True
    if not traits.takes_rows:
        if asked:
            key, value, instead = (
                ("padding_free", "true", "false")
                if tokens is None
                else ("micro_batch_tokens", str(tokens), "null")
            )
            raise UserError(
                f"train.{key} is {value}, but the model's latent attention takes padded "
                f"micro-batches alone. Try --train.{key} {instead}."
            )
        return "padded"
    kernel = attention_kernel(traits, plan)
    if asked is False or (asked is None and kernel == "sdpa"):
        return "padded"
    return "varlen" if kernel == "flash" else "sdpa per sequence"


def attention_kernel(traits: AttentionTraits, plan: Plan) -> AttentionKernel:
    """What computes attention on the devices of a plan."""
    if plan.accelerator == "cpu":
        return "cpu"
    size = traits.head_size
    takes = not traits.softcapped and size % 8 == 0 and size <= LARGEST_FLASH_HEAD
    return "flash" if plan.has_flash and takes else "sdpa"


@dataclass(frozen=True)
class Sequences:
    """Which tokens of a micro-batch belong together."""

    lengths: tuple[int, ...]
    """Tokens of each sequence; they lie one after the other."""
    kernel: AttentionKernel = "sdpa"
    """What computes attention."""
    starts: Tensor | None = None
    """[sequences + 1] int32, where each begins and the last one ends, for torch's attention over
    variable lengths; None: that is not used."""

    @classmethod
    def of(cls, input_ids: Tensor, lengths: Iterable[int] | None, kernel: AttentionKernel) -> Self:
        """Those of a micro-batch.

        Args:
            input_ids: [batch, sequence], padded on the right; or [1, tokens], sequences in a row.
            lengths: tokens of each sequence in a row; None: there is one in each line.
            kernel: what computes attention.
        """
        if lengths is None:
            batch, length = input_ids.shape
            return cls((length,) * batch, kernel)
        starts, found = None, tuple(lengths)
        if kernel == "flash":
            starts = _copied(np.cumsum([0, *found], dtype=np.int32), input_ids.device)
        return cls(found, kernel, starts)

    def positions(self, device: torch.device) -> Tensor:
        """[tokens] int64, where each token stands in its sequence."""
        return _copied(np.concatenate([np.arange(n) for n in self.lengths]), device)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Neighbours of one length: how many, and how long."""
        return [(len(list(run)), length) for length, run in groupby(self.lengths)]


def _copied(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """On a device, without waiting for it."""
    found = torch.from_numpy(values)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Causal attention within each sequence.

    Args:
        q: [tokens, heads, head size].
        k: [tokens, groups, head size]; each group serves as many heads.
        v: likewise.
        sequences: which tokens belong together.
        scale: factor of the scores.
        softcap: their bound, approached by a tangent; None: they have none.

    Returns:
        [tokens, heads, head size].
    """
    if sequences.starts is not None:
        return _varlen(q, k, v, sequences, scale)
    if sequences.kernel == "cpu" and softcap is None:
        found: Tensor = _FlashOnCpu.apply(q, k, v, sequences, scale)
        return found
    results = []
    for (count, _), *parts in _by_run(sequences, q, k, v):
        one, other, third = (_by_heads(part, count) for part in parts)
        if softcap is not None:
            result = _softcapped(one, other, third, scale, softcap)
        else:
            result = _sdpa(one, other, third, scale, grouped=sequences.kernel == "flash")
        results.append(result.transpose(1, 2).flatten(0, 1))
    return results[0] if len(results) == 1 else torch.cat(results)


class AttentionLayer:
    """What layers of attention have in common: others may compute parts of them."""

    attend: Callable[..., Tensor] = staticmethod(attend)
    """Or another one that computes the same."""
    rotation: Literal["halves", "pairs"] = "halves"
    """Which numbers of a head are turned together: those half a head apart, or neighbours."""
    rotate: Rotation | None = None
    """What turns query and key, instead of torch's operations."""


def _by_run(sequences: Sequences, *values: Tensor) -> Iterator[tuple[Any, ...]]:
    """Of neighbours of one length: their number and length, and their part of each value.

    Split, not cut out one by one: a backward pass would fill a tensor with zeros for each.
    """
    runs = sequences.runs
    sizes = [count * length for count, length in runs]
    return zip(runs, *(value.split(sizes) for value in values), strict=True)


class _FlashOnCpu(torch.autograd.Function):
    """torch's kernel for CPUs, run by run into one tensor.

    F.scaled_dot_product_attention calls the same kernel, but what it returns for each run would be
    kept beside what they are joined to. It takes groups of heads as they are.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float
    ) -> Tensor:
        joined = q.new_empty(q.shape)
        sums = []
        for (count, _), to, *parts in _by_run(sequences, joined, q, k, v):
            result, sum_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(_by_heads(part, count) for part in parts), 0.0, True, scale=scale
            )
            _by_heads(to, count).copy_(result)
            sums.append(sum_)
        ctx.save_for_backward(q, k, v, joined, *sums)
        ctx.sequences, ctx.scale = sequences, scale
        return joined

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, joined, *sums = ctx.saved_tensors
        found = [value.new_empty(value.shape) for value in (q, k, v)]
        runs = _by_run(ctx.sequences, gradient, q, k, v, joined, *found)
        for sum_, ((count, _), *parts) in zip(sums, runs, strict=True):
            *known, to_q, to_k, to_v = (_by_heads(part, count) for part in parts)
            results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *known, sum_, 0.0, True, scale=ctx.scale
            )
            for to, result in zip((to_q, to_k, to_v), results, strict=True):
                to.copy_(result)
        return *found, None, None


def _by_heads(part: Tensor, count: int) -> Tensor:
    """[count * length, heads, size] as [count, heads, length, size]."""
    return part.unflatten(0, (count, -1)).transpose(1, 2)


def _repeated(part: Tensor, heads: int) -> Tensor:
    """[..., groups, length, size], each group as often as it has heads."""
    groups = part.size(-3)
    return part if groups == heads else part.repeat_interleave(heads // groups, -3)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, *, grouped: bool) -> Tensor:
    """Of [count, heads, length, size] each; grouped: what computes it takes groups of heads."""
    if not grouped:  # it would take the whole matrix of scores instead
        k, v = _repeated(k, q.size(1)), _repeated(v, q.size(1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float) -> Tensor:
    """In torch's operations: SDPA knows no bound of scores."""
    k, v = _repeated(k, q.size(1)), _repeated(v, q.size(1))
    scores = torch.tanh(q @ k.mT * scale / softcap) * softcap
    length = q.size(2)
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(diagonal=1)
    scores = scores.masked_fill(later, torch.finfo(q.dtype).min)
    return F.softmax(scores, dim=-1, dtype=torch.float).to(dtype=q.dtype) @ v


@cache
def _varlen_attention(groups: bool) -> Callable[..., Tensor]:
    """Torch's attention over variable lengths, as it takes groups of heads or not.

    Below torch 2.12 it does not say that it does.
    """
    from torch.nn.attention.varlen import varlen_attn

    knows_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters
    attention: Callable[..., Tensor] = varlen_attn  # type: ignore[assignment]  # no second result
    if not groups:
        return attention
    if knows_groups:
        return partial(attention, enable_gqa=True)

    def repeated(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        times = q.size(1) // k.size(1)
        k, v = (part.repeat_interleave(times, 1) for part in (k, v))
        return attention(q, k, v, *rest, **options)

    return repeated


def _varlen(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float) -> Tensor:
    attention = _varlen_attention(groups=q.size(1) != k.size(1))
    starts, longest = sequences.starts, max(sequences.lengths)
    return attention(q, k, v, starts, starts, longest, longest, scale=scale, window_size=(-1, 0))
