"""Scores and answers of token sequences, by a model whose ranks compute them together.

Rank 0 asks, with the harness around it; all others serve until it has done. Batches are dealt to
the ranks, and every rank runs as many forward passes as any other: what is sharded needs them all.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ftkit.models.generation import Context, Sampling, answer_greedily
from ftkit.models.language_model import LanguageModel
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.strategies.distributed import broadcast_text, rank, sum_over_ranks
from ftkit.utils.accelerators.use import sum_dtype
from ftkit.utils.progress import OnProgress

_STOP_INTERVAL = 10
"""Batches between two questions whether to end; ranks have to agree on it."""


class AskingEnded(Exception):
    """Somebody wishes to end, on all ranks at once."""


@dataclass(frozen=True, kw_only=True)
class Prompted:
    """Prompts that are answered in the same way."""

    prompts: list[list[int]]
    until: list[str]
    """An answer ends before the first of these."""
    max_new_tokens: int
    sampling: Sampling
    """Its seed counts on from prompt to prompt."""


class Scorer:
    """A model in memory, on one of its ranks."""

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
        """Look at a model.

        Args:
            model: in evaluation mode.
            tokenizer: of its base model.
            stop_ids: tokens that end an answer.
            world_size: ranks that have a part or a copy of the model.
            rows_of: how many sequences of so many tokens are computed at once.
            context: in which the model computes.
            stopped: whether to end early; the same on all ranks, which all ask.
        """
        self.model, self.tokenizer = model, tokenizer
        self._stop_ids, self._world_size = stop_ids, world_size
        self._rank = rank() if world_size > 1 else 0
        self._rows_of, self._context, self._stopped = rows_of, context, stopped
        self._device = model.body.device
        self._positions = model.body.max_length
        self.progress: OnProgress = lambda *_: None
        """Told how far the newest request is: (batches done, batches in all)."""

    # Rank 0

    def likelihoods(self, scored: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Log-probabilities of the ends of sequences, and whether no other end is likelier.

        Args:
            scored: sequences of token ids, and how many tokens at the end count.

        Returns:
            Of each the sum over these tokens in nats, and whether each was the likeliest.
        """
        broadcast_text(json.dumps({"scored": scored}))
        return self._likelihoods(scored)

    def answers(self, asked: Prompted) -> list[str]:
        """The answers to prompts."""
        broadcast_text(json.dumps({"asked": asdict(asked)}))
        return self._answers(asked)

    def dismiss(self) -> None:
        """Let the other ranks go on."""
        broadcast_text(json.dumps({}))

    # All others

    def serve(self) -> None:
        """Compute along until rank 0 has done.

        Raises:
            AskingEnded: somebody wishes to end.
        """
        while task := json.loads(broadcast_text("")):
            if "scored" in task:
                self._likelihoods(task["scored"])
            else:
                sampling = Sampling(**task["asked"].pop("sampling"))
                self._answers(Prompted(**task["asked"], sampling=sampling))

    def restore(self) -> None:
        """Put back what longer sequences than usual have changed."""
        if self.model.body.max_length != self._positions:
            self.model.body.build_rope_cache(self._device, self._positions)

    # All of them

    @torch.no_grad()
    def _likelihoods(self, scored: Sequence[Any]) -> list[tuple[float, bool]]:
        """Sequences that differ in their last token alone share a row."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, (sequence, _) in enumerate(scored):
            alike.setdefault(tuple(sequence[:-1]), []).append(number)
        rows = sorted(alike, key=lambda row: (-len(row), row))
        self._reach(len(rows[0]) if rows else 0)
        sums = torch.zeros(len(scored), 2, dtype=sum_dtype(self._device), device=self._device)
        for mine in self._dealt(rows, len):
            tokens = mine or [(0,)]  # where this rank has no row: a pass without a result
            owners: list[int] = []
            places: list[int] = []
            labels: list[int] = []
            for line, row in enumerate(mine):
                for number in alike[row]:
                    sequence, count = scored[number]
                    first = line * len(tokens[0]) + len(row) - count
                    owners += [number] * count
                    places += range(first, first + count)
                    labels += sequence[-count:]
            found = self._each(tokens, places or [0], labels or [0])
            if owners:
                sums.index_add_(0, torch.tensor(owners, device=self._device), found.to(sums.dtype))
        totals = sum_over_ranks(sums).tolist()
        return [
            (total, round(likeliest) == count)
            for (total, likeliest), (_, count) in zip(totals, scored, strict=True)
        ]

    def _each(
        self, rows: Sequence[tuple[int, ...]], places: list[int], labels: list[int]
    ) -> Tensor:
        """See `Head.forward`; the first row is the longest."""
        longest = len(rows[0])
        padded = [[*row, *[0] * (longest - len(row))] for row in rows]
        device = self._device
        with self._context():
            found: Tensor = self.model(
                torch.tensor(padded, device=device),
                torch.tensor(places, device=device),
                torch.tensor(labels, device=device),
                each=True,
            )
        return found

    def _answers(self, asked: Prompted) -> list[str]:
        longest = max((len(prompt) for prompt in asked.prompts), default=0)
        self._reach(longest + asked.max_new_tokens)
        order = sorted(range(len(asked.prompts)), key=lambda i: (-len(asked.prompts[i]), i))
        table = torch.zeros(
            len(order), asked.max_new_tokens + 1, dtype=torch.long, device=self._device
        )

        def size_of(number: int) -> int:
            return len(asked.prompts[number]) + asked.max_new_tokens

        for mine in self._dealt(order, size_of):
            for number, ids in zip(mine, self._answered(asked, mine), strict=False):
                table[number, 0] = len(ids)
                table[number, 1 : len(ids) + 1] = ids.to(self._device)
        answers = [row[1 : row[0] + 1] for row in sum_over_ranks(table).tolist()]
        return [_cut(self._text(answer), asked.until) for answer in answers]

    def _answered(self, asked: Prompted, numbers: Sequence[int]) -> list[Tensor]:
        """Tokens of the answers to some prompts; without any, passes that others need."""
        prompts = [asked.prompts[number] for number in numbers] or [[0]]
        generators = [
            torch.Generator().manual_seed(asked.sampling.seed + number) for number in numbers
        ]

        def goes_on(_: int, ids: list[int]) -> bool:
            text = self._text(ids)
            return bool(numbers) and _cut(text, asked.until) == text

        def choose(logits: Tensor) -> Tensor:
            if asked.sampling.temperature == 0 or not numbers:
                return logits.argmax(dim=-1)
            drawn = [asked.sampling.choose(*pair) for pair in zip(logits, generators, strict=True)]
            return torch.tensor(drawn, device=logits.device)

        with self._context():
            return answer_greedily(
                self.model,
                [torch.tensor(prompt) for prompt in prompts],
                stop_ids=self._stop_ids,
                max_new_tokens=asked.max_new_tokens,
                goes_on=goes_on,
                choose=choose,
                apart=True,
            )

    def _dealt(self, items: Sequence[Any], size_of: Callable[[Any], int]) -> Any:
        """This rank's batches of what is sorted by size, as many as every rank has; some empty."""
        batches: list[list[Any]] = []
        for item in items:
            if not batches or len(batches[-1]) >= self._rows_of(size_of(batches[-1][0])):
                batches.append([])
            batches[-1].append(item)
        starts = range(0, len(batches), self._world_size)
        for done, start in enumerate(starts):
            if done % _STOP_INTERVAL == 0 and self._stopped():
                raise AskingEnded
            place = start + self._rank
            yield batches[place] if place < len(batches) else []
            self.progress(done + 1, len(starts))

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.processor.decode(ids))

    def _reach(self, length: int) -> None:
        """Have the model take sequences of so many tokens."""
        if length > self.model.body.max_length:
            self.model.body.build_rope_cache(self._device, length)


def _cut(text: str, until: Sequence[str]) -> str:
    """A text up to the first of some others."""
    for end in filter(None, until):
        text = text.partition(end)[0]
    return text
