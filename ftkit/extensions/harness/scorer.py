"""Log-likelihoods and answers for the lm-evaluation-harness, computed by all ranks of a model.

Rank 0 runs the harness; the others serve its requests until it is done. Every rank runs the same
number of forward passes, because those of a sharded model are collectives.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ftkit.evaluation.task_programs import EvaluationAborted
from ftkit.models.generation import Context, Sampling, answer_greedily, length_for, size_for
from ftkit.models.language_model import LanguageModel
from ftkit.models.loss import Likelihoods
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.strategies.distributed import broadcast_text, rank, sum_over_ranks
from ftkit.utils.accelerators.use import sum_dtype
from ftkit.utils.progress import OnProgress

_STOP_INTERVAL = 10
"""Batches between two checks for an early end, which is a collective."""


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """Prompts to be answered with the same settings."""

    prompts: list[list[int]]
    until: list[str]
    """Stop sequences: an answer ends before the first of these."""
    max_new_tokens: int
    sampling: Sampling
    """Its seed is raised by one from prompt to prompt."""


class Scorer:
    """Scores and answers of a model, seen from one of its ranks."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        stop_ids: frozenset[int],
        world_size: int,
        rows_of: Callable[[int], int],
        context: Context,
        stopped: Callable[[], object] = lambda: False,
    ) -> None:
        """Wrap a model; arguments as of `ftkit.evaluation.task_programs.make_scorer`."""
        self.model, self.tokenizer = model, tokenizer
        self._stop_ids, self._world_size = stop_ids, world_size
        self._rank = rank() if world_size > 1 else 0
        self._rows_of, self._context, self._stopped = rows_of, context, stopped
        self._device = model.body.device
        self._positions = model.body.max_length
        self.progress: OnProgress = lambda *_: None
        """Called with (batches done, batches in all) of the current request."""

    # Rank 0

    def log_likelihoods(self, scored: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Return log-probabilities of the ends of sequences, and whether they are the greedy ones.

        Args:
            scored: sequences of token ids, each with the number of tokens that form its end.

        Returns:
            For each sequence the sum over these tokens in nats, and whether each was the likeliest.
        """
        broadcast_text(json.dumps({"scored": scored}))
        return self._log_likelihoods(scored)

    def answers(self, batch: PromptBatch) -> list[str]:
        """Answer prompts."""
        broadcast_text(json.dumps({"prompts": asdict(batch)}))
        return self._answers(batch)

    def release(self) -> None:
        """End the service of the other ranks."""
        broadcast_text(json.dumps({}))

    # All others

    def serve(self) -> None:
        """Compute along with rank 0 until it releases this rank.

        Raises:
            EvaluationAborted: the evaluation ends early.
        """
        while request := json.loads(broadcast_text("")):
            if "scored" in request:
                self._log_likelihoods(request["scored"])
            else:
                sampling = Sampling(**request["prompts"].pop("sampling"))
                self._answers(PromptBatch(**request["prompts"], sampling=sampling))

    def restore(self) -> None:
        """Shrink the rotary tables to their usual length after longer sequences."""
        if self.model.body.max_length != self._positions:
            self.model.body.build_rope_cache(self._device, self._positions)

    # All of them

    @torch.no_grad()
    def _log_likelihoods(self, scored: Sequence[Any]) -> list[tuple[float, bool]]:
        # Choices of one token share their prompt: sequences that differ in the last token alone
        # are one row.
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, (sequence, _) in enumerate(scored):
            alike.setdefault(tuple(sequence[:-1]), []).append(number)
        # Longest first: a batch is as wide as its first row, and one that does not fit fails at
        # once.
        rows = sorted(alike, key=lambda row: (-len(row), row))
        self._extend_positions(self._length(len(rows[0])) if rows else 0)
        # One more, for labels that only pad.
        sums = torch.zeros(len(scored) + 1, 2, dtype=sum_dtype(self._device), device=self._device)
        for mine in self._own_batches(rows, lambda row: self._length(len(row))):
            tokens = mine or [(0,)]  # where this rank has no row: a pass without a result
            width = self._length(len(tokens[0]))
            owners: list[int] = []
            places: list[int] = []
            labels: list[int] = []
            for line, row in enumerate(mine):
                for number in alike[row]:
                    sequence, count = scored[number]
                    first = line * width + len(row) - count
                    owners += [number] * count
                    places += range(first, first + count)
                    labels += sequence[-count:]
            padding = size_for(self.model, max(len(owners), 1)) - len(owners)
            owners, places = owners + [len(scored)] * padding, places + [0] * padding
            found = self._each(tokens, width, places, labels + [0] * padding)
            sums.index_add_(0, torch.tensor(owners, device=self._device), found.to(sums.dtype))
        totals = sum_over_ranks(sums).tolist()[:-1]
        return [
            # round(): counts are added up over ranks as floats.
            (total, round(likeliest) == count)
            for (total, likeliest), (_, count) in zip(totals, scored, strict=True)
        ]

    def _each(
        self, rows: Sequence[tuple[int, ...]], width: int, places: list[int], labels: list[int]
    ) -> Tensor:
        """Log-probability of each label, and whether it is the likeliest, of padded rows."""
        padded = [[*row, *[0] * (width - len(row))] for row in rows]
        device = self._device
        with self._context():
            found: Tensor = self.model(
                torch.tensor(padded, device=device),
                torch.tensor(places, device=device),
                torch.tensor(labels, device=device),
                Likelihoods(),
            )
        return found

    def _answers(self, batch: PromptBatch) -> list[str]:
        longest = max((len(prompt) for prompt in batch.prompts), default=0)
        self._extend_positions(self._length(longest + batch.max_new_tokens))
        order = sorted(range(len(batch.prompts)), key=lambda i: (-len(batch.prompts[i]), i))
        # Each rank fills rows of its own, the sum over ranks has all. The first column counts
        # tokens.
        table = torch.zeros(
            len(order), batch.max_new_tokens + 1, dtype=torch.long, device=self._device
        )

        def size_of(number: int) -> int:
            return self._length(len(batch.prompts[number]) + batch.max_new_tokens)

        for mine in self._own_batches(order, size_of):
            for number, ids in zip(mine, self._answered(batch, mine), strict=False):
                # Token 0 may be a real one, so padding cannot be recognised.
                table[number, 0] = len(ids)
                table[number, 1 : len(ids) + 1] = ids.to(self._device)
        answers = [row[1 : row[0] + 1] for row in sum_over_ranks(table).tolist()]
        return [_cut(self._text(answer), batch.until) for answer in answers]

    def _answered(self, batch: PromptBatch, numbers: Sequence[int]) -> list[Tensor]:
        """Answer some prompts in tokens; without any, run the passes that other ranks need."""
        # A forward pass of a sharded model gathers its weights from all ranks: one that has nothing
        # to answer runs along.
        prompts = [batch.prompts[number] for number in numbers] or [[0]]
        # A generator for each answer, which is then the same in any batch.
        generators = [
            torch.Generator().manual_seed(batch.sampling.seed + number) for number in numbers
        ]

        def goes_on(_: int, ids: list[int]) -> bool:
            text = self._text(ids)
            return bool(numbers) and _cut(text, batch.until) == text

        def choose(logits: Tensor) -> Tensor:
            if batch.sampling.temperature == 0 or not numbers:
                return logits.argmax(dim=-1)
            drawn = [batch.sampling.choose(*pair) for pair in zip(logits, generators, strict=True)]
            return torch.tensor(drawn, device=logits.device)

        with self._context():
            return answer_greedily(
                self.model,
                [torch.tensor(prompt) for prompt in prompts],
                stop_ids=self._stop_ids,
                max_new_tokens=batch.max_new_tokens,
                goes_on=goes_on,
                choose=choose,
                apart=True,
            )

    def _own_batches(self, items: Sequence[Any], size_of: Callable[[Any], int]) -> Iterator[Any]:
        """Yield this rank's batches of items sorted by size; empty ones where others have more."""
        batches: list[list[Any]] = []
        for item in items:
            if not batches or len(batches[-1]) >= self._rows_of(size_of(batches[-1][0])):
                batches.append([])
            batches[-1].append(item)
        starts = range(0, len(batches), self._world_size)
        for done, start in enumerate(starts):
            # Every rank comes here in the same batch, also those without a row: the check is a
            # collective.
            if done % _STOP_INTERVAL == 0 and self._stopped():
                raise EvaluationAborted
            place = start + self._rank
            yield batches[place] if place < len(batches) else []
            self.progress(done + 1, len(starts))

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.text_of(ids)

    def _length(self, tokens: int) -> int:
        return length_for(self.model, tokens)

    def _extend_positions(self, length: int) -> None:
        if length > self.model.body.max_length:
            self.model.body.build_rope_cache(self._device, length)


def _cut(text: str, until: Sequence[str]) -> str:
    for end in filter(None, until):
        text = text.partition(end)[0]
    return text
