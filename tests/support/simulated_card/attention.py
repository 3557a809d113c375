"""Flash attention over variable lengths, which has no kernel on CPUs: by products, in float32."""

from typing import Any

Window = tuple[int, int]
"""Tokens before and after a query that it sees beside itself; -1: no limit."""


def install() -> None:
    """Compute what torch asks of flash attention; right after torch was imported."""
    import torch
    from torch import Tensor

    def scores(
        q: Tensor, k: Tensor, starts: Tensor, scale: float, is_causal: bool, window: Window
    ) -> Tensor:
        """[heads, tokens, tokens] float32, of tokens that see each other."""
        places = torch.arange(len(q), device=q.device)
        sequence = torch.searchsorted(starts, places.to(starts.dtype), right=True)
        seen = sequence[:, None] == sequence
        before = places[:, None] - places  # tokens from the key to the query
        left, right = window
        for limit, distance in ((left, before), (0 if is_causal else right, -before)):
            if limit != -1:  # the kernel's word for none
                seen &= distance <= limit
        k = k.float().repeat_interleave(q.size(1) // k.size(1), 1)
        found = torch.einsum("qhs,khs->hqk", q.float(), k) * scale
        return found.masked_fill(~seen, float("-inf"))

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        starts_k: Tensor,
        longest: int,
        longest_k: int,
        dropout: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float,
        window_size_left: int = -1,
        window_size_right: int = -1,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        assert q.dtype in (torch.float16, torch.bfloat16) and starts.dtype == torch.int32
        assert longest == longest_k and not dropout
        found = scores(q, k, starts, scale, is_causal, (window_size_left, window_size_right))
        sums = found.logsumexp(-1)
        v = v.float().repeat_interleave(q.size(1) // v.size(1), 1)
        result = torch.einsum("hqk,khs->qhs", (found - sums[..., None]).exp(), v).to(q.dtype)
        state = torch.zeros(2, dtype=torch.int64, device=q.device)
        return result, sums, state, state, state

    def backward(
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: Tensor,
        sums: Tensor,
        starts: Tensor,
        starts_k: Tensor,
        longest: int,
        longest_k: int,
        dropout: float,
        is_causal: bool,
        *_: Any,
        scale: float,
        window_size_left: int = -1,
        window_size_right: int = -1,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        times = q.size(1) // k.size(1)
        window = (window_size_left, window_size_right)
        shares = (scores(q, k, starts, scale, is_causal, window) - sums[..., None]).exp()
        of_result = gradient.float()
        of_v = torch.einsum("hqk,qhs->khs", shares, of_result)
        values = v.float().repeat_interleave(times, 1)
        of_shares = torch.einsum("qhs,khs->hqk", of_result, values)
        mean = (of_result * result.float()).sum(-1).T[..., None]
        of_scores = shares * (of_shares - mean) * scale
        of_q = torch.einsum("hqk,khs->qhs", of_scores, k.float().repeat_interleave(times, 1))
        of_k = torch.einsum("hqk,qhs->khs", of_scores, q.float())
        of_k, of_v = (x.unflatten(1, (-1, times)).sum(2) for x in (of_k, of_v))
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)

    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_flash_attention_forward", forward, "CUDA")
    aten.impl("_flash_attention_backward", backward, "CUDA")
    _registered.append(aten)


_registered: list[Any] = []
"""What is registered is so while this lives."""
