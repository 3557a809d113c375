"""Causal self-attention over the sequences of a micro-batch, each by itself, padded or in a row."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import AttentionTraits
from ftkit.recipe.plan import Plan
from ftkit.utils.accelerators.use import pinned

if TYPE_CHECKING:
    from ftkit.models.bodies.exchange import Exchange

AttentionPath = Literal["varlen", "sdpa per sequence", "padded"]
"""Layout of a micro-batch for attention: its tokens in a row, computed whole by torch's attention
over variable lengths; in a row, computed sequence by sequence; or padded to a rectangle."""

AttentionKernel = Literal["flash", "cpu", "sdpa"]
"""Kernel of attention: flash attention on GPUs, torch's kernel for CPUs, or torch's choice."""

Rotation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Rotates query and key, [batch, tokens, heads, head size] each, by tables of cos and sin."""

LARGEST_FLASH_HEAD = 256
"""Largest head size of flash attention, which must be a multiple of 8."""


def attention_path(
    traits: AttentionTraits,
    kernel: AttentionKernel,
    *,
    padding_free: bool | None,
    micro_batch_tokens: int | None = None,
) -> AttentionPath:
    """Choose the layout of micro-batches for attention.

    Args:
        traits: of the model's attention.
        kernel: from `attention_kernel`.
        padding_free: key of the recipe; None: rows where they are faster.
        micro_batch_tokens: of the recipe; such micro-batches are rows where the model takes them.

    Raises:
        UserError: rows are required, but the model's attention cannot compute them.
    """
    # Such a model computes padded micro-batches only, whatever is faster.
    if not traits.takes_rows:
        if padding_free:
            raise UserError(
                "train.padding_free is true, but this model takes padded micro-batches only: its "
                "attention, or its states, cannot be kept apart in a row. Try "
                "--train.padding_free null."
            )
        return "padded"
    padding_free = padding_free if micro_batch_tokens is None else True
    # By default rows are chosen where they are faster: on CPUs always, on GPUs if one kernel takes
    # the whole row. Otherwise many small kernels would cost more than padding.
    if padding_free is False or (padding_free is None and kernel == "sdpa"):
        return "padded"
    return "varlen" if kernel == "flash" else "sdpa per sequence"


def planned_path(
    traits: AttentionTraits, plan: Plan, *, whose: str = "this model"
) -> AttentionPath:
    """Choose the layout of micro-batches for a model's attention in a run.

    Args:
        traits: of the model's attention.
        plan: of the run.
        whose: the model, in a message.

    Raises:
        UserError: as `attention_path`.
    """
    if plan.kind.compiles_shapes:  # where padding to a few lengths is the only way
        return "padded"
    padding_free = plan.recipe.train.padding_free
    if plan.mesh.context > 1:
        _require_shared_rows(traits, plan.mesh.context, whose)
        padding_free = True  # only rows are shared
    return attention_path(
        traits,
        attention_kernel(traits, plan.accelerator, has_flash=plan.has_flash),
        padding_free=padding_free,
        # Where ftkit chose the number, padded micro-batches keep to it as well.
        micro_batch_tokens=plan.micro_batch_tokens if plan.chosen is None else None,
    )


def _require_shared_rows(traits: AttentionTraits, ranks: int, whose: str) -> None:
    """Refuse a model whose rows of tokens ranks cannot share.

    Raises:
        UserError: it mixes tokens elsewhere than in attention, or ranks cannot share its heads.
    """
    if not traits.shares_rows:
        raise UserError(
            f"strategy.context is {ranks}, but ranks cannot share the sequences of {whose}: it "
            "computes padded micro-batches only, or mixes tokens in other layers than attention, "
            "such as convolutions or states. Try --strategy.context 1."
        )
    if traits.common_heads % ranks:
        raise UserError(
            f"strategy.context is {ranks}, but the attention of {whose} has layers of "
            f"{traits.common_heads} heads or a multiple of them, and each rank needs equally many. "
            f"Try --strategy.context {math.gcd(traits.common_heads, ranks)}."
        )


def common_path(own: AttentionPath, other: AttentionPath) -> AttentionPath:
    """Return the layout of micro-batches that two models compute on: padded if one pads them."""
    return "padded" if "padded" in (own, other) else own


def attention_kernel(
    traits: AttentionTraits, accelerator: str, *, has_flash: bool
) -> AttentionKernel:
    """Choose the kernel of attention.

    Args:
        traits: of the model's attention.
        accelerator: kind of device, as torch calls it.
        has_flash: whether the devices have flash attention in the number format of the plan.
    """
    if accelerator == "cpu":
        return "cpu"
    size = traits.head_size
    takes = traits.is_plain and size % 8 == 0 and size <= LARGEST_FLASH_HEAD
    return "flash" if has_flash and takes else "sdpa"


class FixedRow:
    """Sequences in a row whose starts and positions lie in memory that never moves.

    A recorded pass reads there what each micro-batch has written.
    """

    # No dataclass: Fabric looks into those that a model is given.

    def __init__(self, starts: Tensor, places: Tensor, longest: int) -> None:
        """Name the memory.

        Args:
            starts: as of `Sequences`.
            places: [tokens] int64, the position of each token in its sequence.
            longest: tokens of the longest sequence that there may be.
        """
        self.starts, self.places, self.longest = starts, places, longest


Blocks = tuple[tuple[tuple[int, int], ...], ...]
"""For each sequence, spans [first, end) whose tokens also see the later ones of their span."""


@dataclass(frozen=True)
class Sequences:
    """Sequences of a micro-batch: which of its tokens belong together."""

    lengths: tuple[int, ...]
    """Tokens of each sequence, one sequence after the other."""
    kernel: AttentionKernel = "sdpa"
    """Kernel that computes attention."""
    starts: Tensor | None = None
    """[sequences + 1] int32, the start of each and the end of the last, for torch's attention over
    variable lengths; None: it is not used."""
    exchange: "Exchange | None" = None
    """With the ranks that have the other pieces of the row; None: it is here, all of it."""
    places: Tensor | None = None
    """[tokens] int64, their positions on the device; None: they follow from the lengths."""

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        lengths: Iterable[int] | FixedRow | None,
        kernel: AttentionKernel,
        exchange: "Exchange | None" = None,
    ) -> Self:
        """Describe the sequences of a micro-batch.

        Args:
            input_ids: [batch, sequence], padded on the right; or [1, tokens], sequences in a row,
                or this rank's piece of it.
            lengths: tokens of each sequence in the whole row; None: one sequence in each line.
            kernel: of attention.
            exchange: with ranks that may have other pieces of the row.
        """
        # Padding counts as part of a sequence: it follows the tokens, which never see it.
        if lengths is None:
            batch, length = input_ids.shape
            return cls((length,) * batch, kernel)
        if isinstance(lengths, FixedRow):
            return cls((lengths.longest,), kernel, lengths.starts, places=lengths.places)
        starts, known = None, tuple(lengths)
        # Other kernels never read them, and a copy to the device would be for nothing.
        if kernel == "flash":
            starts = _copied(np.cumsum([0, *known], dtype=np.int32), input_ids.device)
        # Also where rows are shared in training, others are whole: those of evaluation tasks.
        is_whole = sum(known) == input_ids.numel()
        return cls(known, kernel, starts, None if is_whole else exchange)

    def positions(self, device: torch.device) -> Tensor:
        """Return [tokens here] int64: the position of each token in its sequence."""
        if self.places is not None:
            return self.places
        places = np.concatenate([np.arange(n) for n in self.lengths])
        if self.exchange is not None:
            places = places[self.exchange.piece.span(len(places))]
        return _copied(places, device)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Neighbouring sequences of equal length: their number and length."""
        return [(len(list(run)), length) for length, run in groupby(self.lengths)]


@dataclass(frozen=True)
class Scores:
    """Rule by which products of queries and keys become weights of values."""

    scale: float
    """Factor of the products."""
    softcap: float | None = None
    """Bound of the products, by a hyperbolic tangent; None: no bound. Gemma 2:
    https://arxiv.org/abs/2408.00118."""
    window: int | None = None
    """Number of tokens that a token sees, including itself; None: all before it. Longformer:
    https://arxiv.org/abs/2004.05150."""
    sinks: Tensor | None = None
    """[heads], a score of each head that takes weight without adding a value; None: no sinks.
    https://arxiv.org/abs/2309.17453."""

    @property
    def are_plain(self) -> bool:
        """True if kernels can compute the scores: scaled products, perhaps within a window."""
        return self.softcap is None and self.sinks is None

    def window_within(self, length: int) -> int | None:
        """Return the window if it is shorter than a sequence of this length, else None."""
        return self.window if self.window is not None and self.window < length else None


def _copied(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy to a device without waiting for it."""
    return pinned(torch.from_numpy(values), device).to(device, non_blocking=True)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    scores: Scores,
    blocks: Blocks | None = None,
) -> Tensor:
    """Causal attention within each sequence.

    Where ranks share the row, all of them call this, each with the tokens that it has.

    Args:
        q: [tokens, heads, head size].
        k: [tokens, groups, head size]; each group serves as many heads.
        v: [tokens, groups, value size].
        sequences: which tokens belong together.
        scores: how products become weights.
        blocks: of each sequence; None: none has any.

    Returns:
        [tokens, heads, value size].
    """
    if sequences.exchange is not None:
        assert blocks is None, "media are refused where ranks share rows"
        return _attend_over_ranks(q, k, v, sequences, scores, sequences.exchange)
    if blocks is not None:
        return _attend_in_blocks(q, k, v, sequences, scores, blocks)
    if sequences.starts is not None:
        return _varlen(q, k, v, sequences, scores)
    # The kernel for CPUs takes values of the size of keys only.
    if sequences.kernel == "cpu" and scores.are_plain and q.size(-1) == v.size(-1):
        attended: Tensor = _FlashOnCpu.apply(q, k, v, sequences, scores)
        return attended
    results = []
    for (count, length), *parts in _by_run(sequences, q, k, v):
        queries, keys, values = (_by_heads(part, count) for part in parts)
        if scores.are_plain:
            result = _sdpa(queries, keys, values, scores, grouped=sequences.kernel == "flash")
        else:
            hidden = _hidden(length, scores.window_within(length), q.device)
            result = _weighted(queries, keys, values, scores, hidden)
        results.append(result.transpose(1, 2).flatten(0, 1))
    return results[0] if len(results) == 1 else torch.cat(results)


def _attend_over_ranks(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores, exchange: "Exchange"
) -> Tensor:
    """Attention within each sequence, of whose tokens each rank has some; here, of some heads."""
    if (copies := exchange.copies(k.size(1))) > 1:
        k, v = (part.repeat_interleave(copies, 1) for part in (k, v))
    if scores.sinks is not None:
        scores = dataclasses.replace(scores, sinks=exchange.own_heads(scores.sinks))
    q, k, v = (exchange.to_heads(part) for part in (q, k, v))
    whole = dataclasses.replace(sequences, exchange=None)
    return exchange.to_tokens(attend(q, k, v, whole, scores))


def _attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores, blocks: Blocks
) -> Tensor:
    """Attention within each sequence, in which the tokens of a block see each other, too."""
    results = []
    parts = (part.split(sequences.lengths) for part in (q, k, v))
    for queries, keys, values, own in zip(*parts, blocks, strict=True):
        length = len(queries)
        if not own:  # as if none had any, so that it is computed alike beside all others
            alone = Sequences((length,), sequences.kernel)
            results.append(attend(queries, keys, values, alone, scores))
            continue
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(diagonal=1)
        for first, end in own:
            hidden[first:end, first:end] = False
        if (window := scores.window_within(length)) is not None:
            hidden |= torch.ones_like(hidden).tril(diagonal=-window)
        q, k, v = (_by_heads(part, 1) for part in (queries, keys, values))
        results.append(_weighted(q, k, v, scores, hidden).transpose(1, 2).flatten(0, 1))
    return torch.cat(results)


@dataclass
class KeyValueCache:
    """Keys and values of all layers by the positions of their tokens."""

    shape: tuple[int, int]
    """Number of sequences, and of positions in each."""
    positions: Tensor | None = None
    """[sequences, tokens], of the tokens in the current pass."""
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """[sequences, groups, positions, size] each, by the index of the layer."""
    blocks: Blocks | None = None
    """Of the sequences, in a pass of whole prompts; None: no token sees a later one."""

    def _extended(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of the current pass and return all of a layer.

        Args:
            layer: its index.
            keys: [sequences, groups, tokens, size].
            values: [sequences, groups, tokens, value size].
        """
        assert self.positions is not None
        # Allocated in the first pass, when shapes and dtype of the layer are known.
        if layer not in self.layers:
            count, length = self.shape
            self.layers[layer] = (
                keys.new_zeros(count, keys.size(1), length, keys.size(3)),
                values.new_zeros(count, values.size(1), length, values.size(3)),
            )
        for kept, new in zip(self.layers[layer], (keys, values), strict=True):
            places = self.positions[:, None, :, None].expand_as(new)
            # By position: tokens of padding are overwritten by those that follow the prompt.
            kept.scatter_(2, places, new.to(kept.dtype))
        return self.layers[layer]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        """Add the current pass to a layer, and compute causal attention to all positions so far.

        Args:
            layer: its index.
            q: [sequences, heads, tokens, size].
            k: [sequences, groups, tokens, size].
            v: [sequences, groups, tokens, value size].
            scores: how products become weights.

        Returns:
            [sequences, tokens, heads, value size].
        """
        keys, values = self._extended(layer, k, v)
        assert self.positions is not None
        # Prompts of different lengths are in one batch, so each row has its own mask.
        places = torch.arange(keys.size(2), device=keys.device)
        hidden = places > self.positions[..., None]
        for row, own in enumerate(self.blocks or ()):
            for first, end in own:
                hidden[row, first:end, first:end] = False
        if scores.window is not None:
            hidden |= places <= self.positions[..., None] - scores.window
        hidden = hidden[:, None]
        # The heads that share a group see the same places: as rows of one product they read its
        # keys once, where repeated keys would be a copy of the whole cache for each token.
        one_token = q.size(2) == 1
        if one_token:
            q = q.squeeze(2).unflatten(1, (keys.size(1), -1))
        if scores.are_plain:
            k, v = _repeated(keys, q.size(1)), _repeated(values, q.size(1))
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=~hidden, scale=scores.scale
            )
        else:
            attended = _weighted(q, keys, values, scores, hidden)
        return attended.flatten(1, 2)[:, None] if one_token else attended.transpose(1, 2)


class AttentionLayer:
    """Common parts of attention layers, which compiled or fused functions may replace."""

    attend: Callable[..., Tensor] = staticmethod(attend)
    attend_to_cache: Callable[..., Tensor] = staticmethod(KeyValueCache.attend)
    """Both are replaced by uncompiled versions if blocks are compiled."""
    rotation: Literal["halves", "pairs"] = "halves"
    """Pairs of numbers of a head that are rotated together: half a head apart, or neighbours."""
    rotate: Rotation | None = None
    """Fused rotation of query and key; None: torch's operations."""


def _by_run(sequences: Sequences, *values: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield number and length of neighbours of equal length, and their part of each value."""
    # Split, not sliced one by one: the backward pass would fill a tensor with zeros for each.
    runs = sequences.runs
    sizes = [count * length for count, length in runs]
    return zip(runs, *(value.split(sizes) for value in values), strict=True)


class _FlashOnCpu(torch.autograd.Function):
    """Torch's kernel for CPUs, run by run into one tensor; it takes groups of heads as they are."""

    # F.scaled_dot_product_attention calls the same kernel, but autograd would keep its result for
    # each run beside the joined tensor: 8 of 228 MiB of activations with 34 M parameters.

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores
    ) -> Tensor:
        # Contiguous, one tensor for all runs: only this and one sum per row are kept of the result.
        joined = q.new_empty(q.shape)
        sums = []
        for (count, length), to, *parts in _by_run(sequences, joined, q, k, v):
            result, sum_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(_by_heads(part, count) for part in parts),
                0.0,
                **_causality(scores, length, q),
                scale=scores.scale,
            )
            _by_heads(to, count).copy_(result)
            sums.append(sum_)
        # The sums of each row are enough to compute its weights again, as in flash attention.
        ctx.save_for_backward(q, k, v, joined, *sums)
        ctx.sequences, ctx.scores = sequences, scores
        return joined

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, joined, *sums = ctx.saved_tensors
        gradients = [value.new_empty(value.shape) for value in (q, k, v)]
        runs = _by_run(ctx.sequences, gradient, q, k, v, joined, *gradients)
        for sum_, ((count, length), *parts) in zip(sums, runs, strict=True):
            *known, to_q, to_k, to_v = (_by_heads(part, count) for part in parts)
            # The kernel takes two to four times as long in 16 bits.
            wide = [part.float() for part in known]
            results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *wide, sum_, 0.0, **_causality(ctx.scores, length, wide[0]), scale=ctx.scores.scale
            )
            for to, result in zip((to_q, to_k, to_v), results, strict=True):
                to.copy_(result)
        return *gradients, None, None


def _by_heads(part: Tensor, count: int) -> Tensor:
    """View [count * length, heads, size] as [count, heads, length, size]."""
    return part.unflatten(0, (count, -1)).transpose(1, 2)


def _repeated(part: Tensor, heads: int) -> Tensor:
    """Repeat the groups of [..., groups, length, size] to the number of heads."""
    groups = part.size(-3)
    return part if groups == heads else part.repeat_interleave(heads // groups, -3)


def _hidden(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return [length, length] bool: tokens hidden from each, later or too far back."""
    hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(diagonal=1)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril(diagonal=-window)
    return hidden


def _causality(scores: Scores, length: int, like: Tensor) -> dict[str, Any]:
    """Arguments that make a kernel causal, for sequences of one length."""
    window = scores.window_within(length)
    if window is None:
        return {"is_causal": True}
    hidden = _hidden(length, window, like.device)
    mask = torch.zeros(length, length, dtype=like.dtype, device=like.device)
    return {"is_causal": False, "attn_mask": mask.masked_fill_(hidden, float("-inf"))}


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scores: Scores, *, grouped: bool) -> Tensor:
    """SDPA of [count, heads, length, size] each; grouped: its kernel takes groups of heads."""
    if not grouped:  # a kernel that cannot would compute the whole matrix of scores
        k, v = _repeated(k, q.size(1)), _repeated(v, q.size(1))
    causality = _causality(scores, q.size(2), q)
    return F.scaled_dot_product_attention(
        q, k, v, **causality, scale=scores.scale, enable_gqa=grouped
    )


def _weighted(q: Tensor, k: Tensor, v: Tensor, scores: Scores, hidden: Tensor) -> Tensor:
    """Attention step by step, because SDPA has neither a bound of scores nor sinks.

    q is [count, heads, tokens, size], k [count, groups, length, size], v [count, groups, length,
    value size], and hidden [..., tokens, length] bool. The heads of a group at one token may be
    tokens of one head.
    """
    k, v = _repeated(k, q.size(1)), _repeated(v, q.size(1))
    products = q @ k.mT * scores.scale
    if scores.softcap is not None:
        products = torch.tanh(products / scores.softcap) * scores.softcap
    # Not -inf: a row that is hidden entirely would become NaN.
    products = products.masked_fill(hidden, torch.finfo(q.dtype).min)
    if scores.sinks is None:
        return F.softmax(products, dim=-1, dtype=torch.float).to(dtype=q.dtype) @ v
    sinks = scores.sinks.to(products.dtype).view(q.size(1), -1, 1).expand(len(q), -1, q.size(2), 1)
    weights = F.softmax(torch.cat((products, sinks), dim=-1), dim=-1, dtype=torch.float)
    # Without the weight of the sink, which has no value: a row may sum to less than one.
    return weights[..., :-1].to(dtype=q.dtype) @ v


@cache
def _takes_groups() -> bool:
    """Whether torch's attention over variable lengths takes groups of heads, as since 2.12."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _varlen(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores) -> Tensor:
    if q.size(1) != k.size(1) and not _takes_groups():
        times = q.size(1) // k.size(1)
        k, v = (part.repeat_interleave(times, 1) for part in (k, v))
    longest = max(sequences.lengths)
    # The kernel counts tokens before the query, and -1 is no limit; our window includes the query.
    before = -1 if scores.window is None else scores.window - 1
    attended: Tensor = _FlashInRow.apply(q, k, v, sequences.starts, longest, scores.scale, before)
    return attended


class _FlashInRow(torch.autograd.Function):
    """Flash attention over variable lengths, as `torch.nn.attention.varlen` calls it."""

    # Not its public function, an operation made in Python: that takes the host longer, and in each
    # layer fills three tensors that nothing reads. The arguments of these private operations are
    # the same from torch 2.11 to 2.13.

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        longest: int,
        scale: float,
        before: int,
    ) -> Tensor:
        # Lengths of queries and keys, dropout, and whether there is no window but causality.
        ctx.layout = (longest, longest, 0.0, before == -1)
        ctx.options = {"scale": scale, "window_size_left": before, "window_size_right": 0}
        result: Tensor
        result, sums, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, *ctx.layout, False, **ctx.options
        )
        ctx.save_for_backward(q, k, v, result, sums, starts, state, unused)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *known, starts, state, unused = ctx.saved_tensors
        found = torch.ops.aten._flash_attention_backward(
            *gradients, *known, starts, starts, *ctx.layout, state, unused, **ctx.options
        )
        return *found, None, None, None, None
