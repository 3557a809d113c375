"""Greedy answers of a model that is being trained."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ftkit.model import LanguageModel


@torch.no_grad()
def answer_greedily(
    model: LanguageModel, prompts: Sequence[Tensor], *, eos_id: int, max_new_tokens: int
) -> list[Tensor]:
    """Continue each prompt with its most likely tokens, up to the end-of-sequence token.

    The prompts share one forward pass per token and a key-value cache, which is freed again.

    Args:
        model: in evaluation mode.
        prompts: token ids, [length] each, of different lengths.
        eos_id: ends an answer and is not part of it.
        max_new_tokens: longest answer; shorter where the model's context ends.

    Returns:
        Token ids of the answers, [up to max_new_tokens] each.
    """
    device = model.gpt.cos.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    room = min(int(lengths.max()) + max_new_tokens, model.gpt.max_seq_length)
    tokens = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True).to(device).long()
    places = torch.arange(tokens.size(1), device=device).expand_as(tokens)
    ends = lengths - 1 + torch.arange(len(prompts), device=device) * tokens.size(1)
    rows = torch.arange(len(prompts), device=device)
    finished = torch.zeros_like(lengths, dtype=torch.bool)
    answers = []
    model.gpt.set_kv_cache(batch_size=len(prompts), max_seq_length=room, device=device)
    try:
        logits = model(tokens, ends, cache_positions=places)
        for offset in range(room - int(lengths.max())):
            newest = logits.argmax(dim=-1).masked_fill(finished, eos_id)
            finished |= newest == eos_id
            if bool(finished.all()):
                break
            answers.append(newest)
            logits = model(newest[:, None], rows, cache_positions=(lengths + offset)[:, None])
    finally:
        model.gpt.clear_kv_cache()
    if not answers:
        return [torch.empty(0, dtype=torch.long) for _ in prompts]
    table = torch.stack(answers, dim=1).cpu()
    return [row[: int((row != eos_id).sum())] for row in table]
