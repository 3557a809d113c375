"""Generation: greedy answers of many prompts at once, or one sampled token by token."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from ftkit.models.language_model import LanguageModel
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.utils.accelerators.kinds import device_kind

Context = Callable[[], AbstractContextManager[object]]
"""Makes the context in which a model computes: the casts of a precision."""

ReadMedia = Callable[[int], Mapping[str, Any]]
"""Reads the media of prompts, given the width to which these are padded."""

_SMALLEST = 64
"""Smallest size of prompts and caches, in tokens, where few sizes have to repeat."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings by which the next token is chosen."""

    temperature: float = 0.0
    """Divides the logits; 0: choose the most likely token."""
    top_k: int | None = None
    """Choose among this many of the most likely tokens."""
    top_p: float = 1.0
    """Choose among the most likely tokens that together have this probability."""
    seed: int = 1337
    """Answers depend on prompt and seed alone, whatever was drawn before."""

    def generator(self) -> torch.Generator:
        """Generator for the tokens of one answer."""
        # One for each answer: prompt and seed give the same answer beside any other prompt.
        return torch.Generator().manual_seed(self.seed)

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """Choose the next token.

        Args:
            logits: [vocabulary], float32.
            generator: on the CPU, so that a seed gives the same answer on every device.
        """
        if self.temperature == 0:
            return int(logits.argmax())
        # Drawn on the CPU, whose generator gives the same numbers on every machine.
        # Stable, so that equal logits keep the order of their ids.
        values, tokens = (logits.cpu() / self.temperature).sort(descending=True, stable=True)
        if self.top_k is not None:
            values, tokens = values[: self.top_k], tokens[: self.top_k]
        chances = values.softmax(dim=0)
        before = chances.cumsum(dim=0) - chances
        chances[1:].masked_fill_(before[1:] >= self.top_p, 0.0)  # the first one always stays
        return int(tokens[chances.multinomial(1, generator=generator)])


def size_for(model: LanguageModel, count: int) -> int:
    """Size of a tensor for this many values.

    As many; where the model computes on a device that compiles programs for each shape, the next
    power of two, so that few sizes repeat whatever the prompts are.
    """
    if not device_kind(model.body.device.type).compiles_shapes:
        return count
    return max(_SMALLEST, 1 << (count - 1).bit_length())


def length_for(model: LanguageModel, tokens: int) -> int:
    """Size of a tensor for this many tokens of a sequence, within the model's context."""
    return min(size_for(model, tokens), max(tokens, model.architecture.context_length))


@torch.no_grad()
def answer_in_tokens(
    model: LanguageModel,
    prompt: Tensor,
    *,
    stop_ids: Collection[int],
    max_new_tokens: int,
    sampling: Sampling,
    context: Context = nullcontext,
    media: ReadMedia | None = None,
) -> Iterator[int]:
    """Continue a prompt token by token, with a key-value cache.

    Args:
        model: in evaluation mode.
        prompt: [length] token ids, at least one, fewer than the model's context.
        stop_ids: tokens that end the answer and do not belong to it.
        max_new_tokens: length of the longest answer; the end of the model's context ends it too.
        sampling: how tokens are chosen.
        context: makes the context in which the model computes.
        media: reads those of the prompt; None: it has none.

    Yields:
        The token ids of the answer.
    """
    body, device = model.body, model.body.device
    length, context_length = len(prompt), model.architecture.context_length
    room = min(length + max_new_tokens, context_length)
    width = length_for(model, length)
    kept = length_for(model, min(width + max_new_tokens, context_length))
    # The tables reach as far as training needed.
    if kept > body.max_length:
        body.build_rope_cache(device, kept)
    generator = sampling.generator()
    # Padding follows the prompt, which never sees it; the answer overwrites its keys and values.
    newest = F.pad(prompt.long(), (0, width - length)).to(device)
    read = None if media is None else move_data_to_device(media(width), device)
    last, places = torch.tensor([length - 1], device=device), torch.arange(width, device=device)
    # The context never spans a `yield`, where it would also change the computation of the caller.
    try:
        with context():
            body.start_cache(1, kept)
        for place in range(length, room):
            with context():
                # Only the last token needs logits, which the head computes for no other.
                logits = model(newest[None], last, positions=places[None], media=read)
            read = None  # of the prompt alone
            token = sampling.choose(logits[0], generator)
            if token in stop_ids:
                return
            yield token
            newest, last = torch.tensor([token], device=device), torch.zeros_like(last)
            places = torch.tensor([place], device=device)
    # Also if the caller stops early, which closes the generator.
    finally:
        body.end_cache()


class TextStream:
    """Decodes tokens that arrive one by one.

    A character may be spread over several tokens, and a token's text may depend on the one before.
    Text that was returned is never taken back.
    """

    # DecodeStream of tokenizers 0.22 raises "Invalid prefix" if a token makes the bytes before it
    # invalid, such as a newline and half an emoji.

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.text_of
        self._ids: list[int] = []
        self._context = self._shown = 0

    def add(self, token: int) -> str:
        """Text that this token makes certain."""
        self._ids.append(token)
        text = self._new_text()
        if text.endswith("\ufffd"):  # part of a character
            return ""
        # A token's text may depend on the one before: the tokens shown last are decoded with it.
        self._context, self._shown = self._shown, len(self._ids)
        return text

    def rest(self) -> str:
        """Text that was held back, when no token follows."""
        return self._new_text()

    def _new_text(self) -> str:
        known = self._decode(self._ids[self._context : self._shown])
        text: str = self._decode(self._ids[self._context :])
        return text[len(known) :]


@torch.no_grad()
def answer_greedily(
    model: LanguageModel,
    prompts: Sequence[Tensor],
    *,
    stop_ids: Collection[int],
    max_new_tokens: int,
    goes_on: Callable[[int, list[int]], bool] | None = None,
    choose: Callable[[Tensor], Tensor] = lambda logits: logits.argmax(dim=-1),
    apart: bool = False,
    media: ReadMedia | None = None,
) -> list[Tensor]:
    """Continue each prompt with its most likely tokens, up to a token that ends the answer.

    The prompts share one forward pass per token and a key-value cache, which is freed again.
    Ranks that are connected answer together, and all give the answers of rank 0; or each answers
    prompts of its own, in as many forward passes as the longest answer of them all takes.

    Args:
        model: in evaluation mode.
        prompts: token ids, [length] each, of different lengths.
        stop_ids: tokens that end an answer and do not belong to it; at least one.
        max_new_tokens: length of the longest answer; the end of the model's context ends it too.
        goes_on: whether an answer should continue, given the index of its prompt and its tokens so
            far. None: every answer runs to its end.
        choose: the next tokens, [prompts], given logits, [prompts, vocabulary].
        apart: whether each rank has prompts of its own, with room for equally many tokens.
        media: reads those of the prompts; None: they have none.

    Returns:
        Token ids of the answers, [up to max_new_tokens] each.
    """
    device = model.body.device
    longest, reach = max(map(len, prompts)), model.body.max_length
    room = min(longest + max_new_tokens, reach)
    width = min(length_for(model, longest), reach)
    kept = min(length_for(model, min(width + max_new_tokens, reach)), reach)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    tokens = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True).long()
    tokens = F.pad(tokens, (0, width - longest)).to(device)
    # Padding follows each prompt, which never sees it; the answer overwrites its keys and values.
    places = torch.arange(tokens.size(1), device=device).expand_as(tokens)
    ends = lengths - 1 + torch.arange(len(prompts), device=device) * tokens.size(1)
    rows = torch.arange(len(prompts), device=device)
    finished = torch.zeros_like(lengths, dtype=torch.bool)
    ends_answer = torch.tensor(sorted(stop_ids), device=device)
    answers = []
    read = None if media is None else move_data_to_device(media(width), device)
    model.body.start_cache(len(prompts), kept)
    try:
        # First the whole prompts, then the newest token of each.
        inputs, lasts, positions = tokens, ends, places
        for offset in range(room - longest):
            newest = choose(model(inputs, lasts, positions=positions, media=read))
            read = None  # of the prompts alone
            newest = newest if apart else _broadcast_tokens(newest)
            # Finished answers go on with an end token, so that the batch keeps its shape.
            newest = newest.masked_fill(finished, ends_answer[0])
            finished |= torch.isin(newest, ends_answer)
            if _all(finished, apart=apart):
                break
            # On the host: on a device that compiles, each number of them would be a new shape.
            answers.append(newest.cpu())
            if goes_on is not None:
                finished |= _without_interest(answers, finished, goes_on)
                if _all(finished, apart=apart):
                    break
            inputs, lasts, positions = newest[:, None], rows, (lengths + offset)[:, None]
    finally:
        model.body.end_cache()
    if not answers:
        return [torch.empty(0, dtype=torch.long) for _ in prompts]
    table = torch.stack(answers, dim=1)
    # After its end, an answer consists of end tokens alone.
    counts = (~torch.isin(table, ends_answer.cpu())).sum(dim=1)
    return [row[: int(count)] for row, count in zip(table, counts, strict=True)]


def _without_interest(
    answers: Sequence[Tensor], finished: Tensor, goes_on: Callable[[int, list[int]], bool]
) -> Tensor:
    """Return [prompts] bool: unfinished answers that need not continue."""
    so_far = torch.stack(list(answers), dim=1).tolist()
    ends = [
        not done and not goes_on(row, so_far[row]) for row, done in enumerate(finished.tolist())
    ]
    return torch.tensor(ends, device=finished.device)


def _all(finished: Tensor, *, apart: bool) -> bool:
    """Return whether all prompts are finished: on this rank; with prompts of its own, on all."""
    if apart and dist.is_initialized() and dist.get_world_size() > 1:
        left = (~finished).sum()
        # Every rank reaches this in each step, also with its own prompts finished.
        dist.all_reduce(left)
        return int(left) == 0
    return bool(finished.all())


def _broadcast_tokens(tokens: Tensor) -> Tensor:
    """Tokens that rank 0 has chosen."""
    # Unlike devices may choose differently between nearly equal logits. Under FSDP and ZeRO-3 a
    # rank that ends its answer earlier would leave the others waiting for its weights.
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(tokens, src=0)
    return tokens
